"""Prepared rows: the folder <run>/prepared/, which appears whole or not at all.

It is an Arrow data set of `datasets` (input_ids int32, loss_mask bool, n_tokens, n_supervised, source, sample_id,
heldout) with prepared.json beside it: the accounting, the options, and what the target was.
"""

from __future__ import annotations

import os
import shutil
from array import array
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import xxhash
from datasets.arrow_writer import ArrowWriter

from eagle3lib.accounting import Accounting
from eagle3lib.errors import Eagle3Error
from eagle3lib.rows import Row
from eagle3lib.runs import read_json, write_json

FORMAT = 1
FOLDER, ABOUT = "prepared", "prepared.json"
FEATURES = datasets.Features({
    "input_ids": datasets.List(datasets.Value("int32")),
    "loss_mask": datasets.List(datasets.Value("bool")),
    "n_tokens": datasets.Value("int32"),
    "n_supervised": datasets.Value("int32"),
    "source": datasets.Value("string"),
    "sample_id": datasets.Value("string"),
    "heldout": datasets.Value("bool"),
})  # fmt: skip
_BATCH = 1000  # rows written at a time
_DAMAGED = (OSError, ValueError, KeyError, pyarrow.ArrowInvalid)  # what `datasets` raises on a folder that is not whole


@dataclass(frozen=True)
class Prepared:
    """The rows and their accounting (what prepared.json holds)."""

    rows: datasets.Dataset
    about: dict[str, Any]
    folder: Path

    def metrics(self) -> dict[str, int]:
        """The numbers for `stage.finish(**prepared.metrics())`."""
        names = ("records_read", "rows_in", "rows_kept", "rows_cut", "rows_heldout", "tokens", "supervised_tokens")
        return {name: self.about[name] for name in names}

    def __repr__(self) -> str:
        a = self.about
        return (f"{a['rows_kept']:,} rows ({a['rows_heldout']:,} held out), {a['tokens']:,} tokens, "
                f"{a['supervised_tokens']:,} of them supervised ({a['supervised_tokens'] / a['tokens']:.0%})")


def load_prepared(run_dir: Path) -> datasets.Dataset:
    """The prepared rows of a run. Raises Eagle3Error when there are none, or the folder is not whole."""
    return open_prepared(run_dir).rows


def open_prepared(run_dir: Path) -> Prepared:
    """The prepared rows of a run with their accounting. Raises Eagle3Error as `load_prepared`."""
    folder = Path(run_dir) / FOLDER
    if not (folder / ABOUT).is_file():
        raise Eagle3Error(f"{folder}: no prepared rows there. Run notebooks/01_prepare.ipynb first.")
    about = read_json(folder / ABOUT)
    try:
        rows = datasets.load_from_disk(str(folder))
    except _DAMAGED as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise Eagle3Error(f"{folder}: cannot be opened ({why}). Run notebooks/01_prepare.ipynb again.") from None
    if len(rows) != about.get("rows_kept"):
        found = f"{len(rows):,} rows, but {ABOUT} says {about.get('rows_kept')}"
        raise Eagle3Error(f"{folder}: {found}. Run notebooks/01_prepare.ipynb again.")
    return Prepared(rows, about, folder)


def find(run_dir: Path, key: str) -> Prepared | None:
    """The preparation with this key, if it is there and whole."""
    try:
        found = open_prepared(run_dir)
    except Eagle3Error:
        return None
    return found if found.about.get("key") == key else None


class Writer:
    """Collects rows on disk (memory stays bounded), then puts them in seeded order into the run folder at once."""

    def __init__(self, run_dir: Path, seed: int):
        self._run, self._seed = Path(run_dir), seed
        self._temporary = self._run / f".{FOLDER}.{os.getpid()}"
        self._batch: dict[str, list[Any]] = {name: [] for name in FEATURES}
        self._ranks = array("Q")  # of each row in the final order; eight bytes a row are all that stays in memory
        self._totals = {"tokens": 0, "supervised_tokens": 0, "rows_heldout": 0}

    def __enter__(self) -> Writer:
        self._run.mkdir(parents=True, exist_ok=True)
        for leftover in self._run.glob(f".{FOLDER}.*"):  # of a killed preparation; a run folder has one user at a time
            shutil.rmtree(leftover, ignore_errors=True)
        self._temporary.mkdir()
        self._arrow = ArrowWriter(path=str(self._temporary / "unordered.arrow"), features=FEATURES)
        return self

    def __exit__(self, *_: object) -> None:
        self._arrow.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, row: Row, source: str, sample_id: str, heldout: bool) -> None:
        ids, mask = np.asarray(row.input_ids, dtype=np.int32), np.asarray(row.loss_mask, dtype=bool)
        values = (ids, mask, len(row.input_ids), row.n_supervised, source, sample_id, heldout)
        for column, value in zip(self._batch.values(), values, strict=True):
            column.append(value)
        self._ranks.append(xxhash.xxh3_64_intdigest(sample_id.encode(), seed=self._seed))
        self._totals["tokens"] += len(row.input_ids)
        self._totals["supervised_tokens"] += row.n_supervised
        self._totals["rows_heldout"] += heldout
        if len(self._batch["source"]) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        columns = {name: pyarrow.array(values, FEATURES.arrow_schema.field(name).type) for name, values in self._batch.items()}
        try:
            self._arrow.write_table(pyarrow.table(columns, FEATURES.arrow_schema))
        except OSError as error:
            raise self._refused(error) from None
        self._batch = {name: [] for name in FEATURES}

    def finish(self, accounting: Accounting, about: dict[str, Any]) -> Prepared:
        """Order, save, swap in. The old folder, if any, goes when the new one is complete."""
        self._flush()
        final = self._temporary / FOLDER
        try:
            self._arrow.finalize()
            rows = datasets.Dataset.from_file(str(self._temporary / "unordered.arrow"))
            with _quiet():
                rows.select(self._order()).save_to_disk(str(final))
            write_json(final / ABOUT, {"format": FORMAT, **about, **self._totals, **accounting.to_dict()})
            _swap(final, self._run / FOLDER)
        except OSError as error:
            raise self._refused(error) from None
        return open_prepared(self._run)

    def _order(self) -> np.ndarray:
        """Rows by the seeded hash of their ids: a shuffle that does not depend on the order in which they came."""
        return np.argsort(np.frombuffer(self._ranks, dtype=np.uint64), kind="stable")

    def _refused(self, error: OSError) -> Eagle3Error:
        why = error.strerror or str(error)
        return Eagle3Error(f"{self._run}: the prepared rows cannot be written ({why}). Free some space, or choose another run_dir.")


class _quiet:
    """Without the progress bars of `datasets`: saving takes a moment, and its bars do not go away."""

    def __enter__(self) -> None:
        self._was_on = datasets.is_progress_bar_enabled()
        datasets.disable_progress_bars()

    def __exit__(self, *_: object) -> None:
        if self._was_on:
            datasets.enable_progress_bars()


def _swap(new: Path, place: Path) -> None:
    """Between the two renames there is no folder at all, which a reader reports; there is never half of one."""
    old = new.parent / "old"
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)


@dataclass(frozen=True)
class Forecast:
    """What extraction will cost. dump_bytes: the hidden states alone, tokens x (aux layers + last) x H x 2 in bf16."""

    rows: int
    tokens: int
    supervised_tokens: int
    dump_bytes: int
    hours: float | None  # of prefill; None when no rate was given

    def __repr__(self) -> str:
        hours = "" if self.hours is None else f", about {self.hours:.2g} h of prefill"
        return (f"{self.rows:,} rows, {self.tokens:,} tokens ({self.supervised_tokens:,} supervised): "
                f"{self.dump_bytes / 1e9:,.3g} GB of hidden states{hours}")


def forecast(
    prepared: Prepared, *, hidden_size: int, aux_layers: int = 3, value_bytes: int = 2, prefill_tokens_per_s: float | None = None
) -> Forecast:
    """The dump's size for a target of this hidden size (value_bytes: 2 for bf16), and the time at a given prefill rate."""
    a = prepared.about
    dump_bytes = a["tokens"] * (aux_layers + 1) * hidden_size * value_bytes
    hours = a["tokens"] / prefill_tokens_per_s / 3600 if prefill_tokens_per_s else None
    return Forecast(a["rows_kept"], a["tokens"], a["supervised_tokens"], dump_bytes, hours)
