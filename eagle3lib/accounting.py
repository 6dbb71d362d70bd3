"""Accounting: every row that went in came out, or was dropped for a reason that is counted.

The unit is the row. A record is one row, unless it becomes several (one per reply); then the others count as split.
Always, for the whole and for every source: rows_in = rows_kept + the sum of the drops.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from eagle3lib.errors import Eagle3Error


@dataclass
class SourceCount:
    """Counts of one source. records_read = not_sampled + (rows_in - rows_split)."""

    records_read: int = 0
    not_sampled: int = 0
    rows_split: int = 0
    rows_kept: int = 0
    rows_cut: int = 0  # of the kept: shortened to max_tokens
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def rows_in(self) -> int:
        return self.records_read - self.not_sampled + self.rows_split

    def __add__(self, other: SourceCount) -> SourceCount:
        return SourceCount(
            self.records_read + other.records_read, self.not_sampled + other.not_sampled, self.rows_split + other.rows_split,
            self.rows_kept + other.rows_kept, self.rows_cut + other.rows_cut, self.dropped + other.dropped,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        return {
            "records_read": self.records_read, "not_sampled": self.not_sampled, "rows_split": self.rows_split,
            "rows_in": self.rows_in, "rows_kept": self.rows_kept, "rows_cut": self.rows_cut,
            "dropped": dict(sorted(self.dropped.items(), key=lambda item: (-item[1], item[0]))),
        }  # fmt: skip


class Accounting:
    """Counts by source, and for each reason where it was first met."""

    def __init__(self) -> None:
        self.sources: dict[str, SourceCount] = {}
        self.examples: dict[str, str] = {}
        self.own_starts = 0  # rows whose replies need not begin behind the generation prompt

    def of(self, source: str) -> SourceCount:
        return self.sources.setdefault(source, SourceCount())

    def drop(self, source: str, reason: str, where: str, detail: str = "") -> None:
        self.of(source).dropped[reason] += 1
        self.examples.setdefault(reason, f"{where}: {detail}" if detail else where)

    def copy(self) -> Accounting:
        new = Accounting()
        new.sources = {name: count + SourceCount() for name, count in self.sources.items()}
        new.examples = dict(self.examples)
        return new

    @property
    def total(self) -> SourceCount:
        return sum(self.sources.values(), SourceCount())

    def require_balance(self) -> None:
        """Raise when a row got lost: that would be a defect of this library."""
        for name, count in self.sources.items():
            out = count.rows_kept + sum(count.dropped.values())
            if count.rows_in != out:
                raise Eagle3Error(f"accounting of {name}: {count.rows_in:,} rows in, {out:,} kept or dropped; please report this")

    def to_dict(self) -> dict[str, Any]:
        """For prepared.json: the totals, then the same by source, then an example of each reason."""
        by_source = {name: count.to_dict() for name, count in self.sources.items()}
        return {**self.total.to_dict(), "own_starts": self.own_starts, "sources": by_source, "examples": self.examples}

    def lines(self) -> list[str]:
        """The table as text, for errors and terminals."""
        return as_lines(table(self.to_dict()))


Line = tuple[str, int, str]  # name, count, where it was first met


def table(counts: dict[str, Any]) -> list[Line]:
    """The lines that tell what became of the records, from the dictionary that prepared.json holds."""
    lines: list[Line] = [("records read", counts["records_read"], "")]
    lines += [("not sampled (max_prompts)", counts["not_sampled"], "")] if counts["not_sampled"] else []
    lines += [("more rows by splitting", counts["rows_split"], "")] if counts["rows_split"] else []
    lines += [("rows in", counts["rows_in"], "")]
    lines += [(f"dropped: {reason}", n, counts["examples"].get(reason, "")) for reason, n in counts["dropped"].items()]
    return [*lines, ("rows kept", counts["rows_kept"], ""), ("of these: cut to max_tokens", counts["rows_cut"], "")]


def waterfall(counts: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(name, change in rows, rows then): from the records chosen, over every loss and gain, to the rows kept.

    What max_prompts leaves aside is no loss, and would dwarf those that are: the first name tells it.
    """
    changes = [("split, one row a reply", counts["rows_split"]), *((reason, -n) for reason, n in counts["dropped"].items())]
    left = counts["records_read"] - counts["not_sampled"]
    lines = [(f"chosen of {counts['records_read']:,} records" if counts["not_sampled"] else "records read", left, left)]
    for name, change in changes:
        if change:
            left += change
            lines.append((name, change, left))
    return [*lines, ("rows kept", counts["rows_kept"], counts["rows_kept"])]


def as_lines(lines: list[Line]) -> list[str]:
    return [f"{n:>12,}  {name}" + (f"  (first: {first})" if first else "") for name, n, first in lines]
