"""Quarantine: rows whose states never checked out, with the reasons. `quarantine.jsonl` beside the shards, a line a row.

A new extraction asks for them again, so the file starts empty with each.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from eagle3lib.errors import Eagle3Error

FILE = "quarantine.jsonl"
SHARE = 0.01  # of all rows; above it something is wrong with more than single rows


def clear(store: Path) -> None:
    (store / FILE).unlink(missing_ok=True)


def add(store: Path, entry: dict[str, Any]) -> None:
    with (store / FILE).open("a") as file:
        file.write(json.dumps(entry) + "\n")


def read(store: Path) -> list[dict[str, Any]]:
    """Entries with sample_id, tokens and reasons (one for every attempt)."""
    if not (store / FILE).is_file():
        return []
    try:
        return [json.loads(line) for line in (store / FILE).read_text().splitlines()]
    except ValueError as error:
        raise Eagle3Error(f"{store / FILE}: damaged ({error}). Run 02_extract again: it writes it anew.") from None


def summary(store: Path) -> str:
    """For a reader: how many, why, and the first few."""
    entries = read(store)
    if not entries:
        return "No row is in quarantine."
    kinds = Counter(entry["reasons"][-1].split(": ", 1)[-1].split(";")[0][:100] for entry in entries)
    lines = [f"{len(entries)} rows ({sum(e['tokens'] for e in entries):,} tokens) are in quarantine, not in the store:"]
    return "\n".join([*lines, *(f"  {count} x {kind}" for kind, count in kinds.most_common(10)),
                      *(f"  {entry['sample_id']}: {entry['reasons'][-1]}" for entry in entries[:5])])
