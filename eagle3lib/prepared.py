"""Prepared rows: the folder <run>/prepared/, which appears whole or not at all.

It is an Arrow data set of `datasets` (input_ids int32, loss_mask bool, n_tokens, n_supervised, source, sample_id,
heldout) with prepared.json beside it: the accounting, the options, and what the target was.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow
import pyarrow.ipc
import xxhash
from datasets.arrow_writer import ArrowWriter

from eagle3lib import vocab
from eagle3lib.accounting import Accounting
from eagle3lib.errors import Eagle3Error
from eagle3lib.runs import read_json, write_json

FORMAT = 2
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
_SPILLED = FEATURES.arrow_schema.append(pyarrow.field("rank", pyarrow.uint64())).remove_metadata()
_BUCKET_SHIFT = 58  # the upper six bits of a rank choose one of 64 buckets
_SPILL_TOKENS = 8_000_000  # about 40 MB of rows in memory
_FILE_BYTES = 500_000_000
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
    """Collects rows, then puts them in seeded order into the run folder at once.

    Memory is bounded whatever their number: rows are spilled to buckets by their rank, the seeded hash of their ids,
    and each bucket is sorted by itself. That is a shuffle that does not depend on the order in which rows came.
    """

    def __init__(self, run_dir: Path, seed: int, vocab_size: int = 0):
        self._run, self._seed = Path(run_dir), seed
        self._temporary = self._run / f".{FOLDER}.{os.getpid()}"
        self._rows: list[_Ranked] = []
        self._buffered = 0  # tokens
        self._buckets: dict[int, _Bucket] = {}
        self._totals = {"tokens": 0, "supervised_tokens": 0, "rows_heldout": 0}
        self._supervised = np.zeros(vocab_size, dtype=np.int64)  # how often each id is supervised
        self._replies: Counter[int] = Counter()  # rows by their number of trained replies

    def __enter__(self) -> Writer:
        self._run.mkdir(parents=True, exist_ok=True)
        for leftover in self._run.glob(f".{FOLDER}.*"):  # of a killed preparation; a run folder has one user at a time
            shutil.rmtree(leftover, ignore_errors=True)
        (self._temporary / FOLDER).mkdir(parents=True)
        return self

    def __exit__(self, *_: object) -> None:
        for bucket in self._buckets.values():
            bucket.close()
        shutil.rmtree(self._temporary, ignore_errors=True)

    def add(self, ids: np.ndarray, mask: np.ndarray, source: str, sample_id: str, heldout: bool) -> None:
        """ids: [T] int32. mask: [T] bool."""
        taught = ids[mask]
        rank = xxhash.xxh3_64_intdigest(sample_id.encode(), seed=self._seed)
        self._rows.append((rank, ids, mask, len(taught), source, sample_id, heldout))
        self._buffered += len(ids)
        self._totals["tokens"] += len(ids)
        self._totals["supervised_tokens"] += len(taught)
        self._totals["rows_heldout"] += heldout
        self._replies[int(mask[0]) + int(np.count_nonzero(mask[1:] & ~mask[:-1]))] += 1
        self._count(taught)
        if self._buffered >= _SPILL_TOKENS or len(self._rows) >= _SPILL_TOKENS // 32:
            self._spill()

    def _count(self, ids: np.ndarray) -> None:
        if len(ids) and (most := int(ids.max())) >= len(self._supervised):
            self._supervised = np.pad(self._supervised, (0, most + 1 - len(self._supervised)))
        np.add.at(self._supervised, ids, 1)

    def _spill(self) -> None:
        self._rows.sort(key=itemgetter(0))
        try:
            for number, rows in groupby(self._rows, key=lambda row: row[0] >> _BUCKET_SHIFT):
                if number not in self._buckets:
                    self._buckets[number] = _Bucket(self._temporary / f"bucket-{number}")
                self._buckets[number].append(_as_batch(list(rows)))
        except OSError as error:
            raise self._refused(error) from None
        self._rows, self._buffered = [], 0

    def finish(self, accounting: Accounting, about: dict[str, Any]) -> Prepared:
        """Order, save, swap in. The old folder, if any, goes when the new one is complete."""
        if self._buckets:
            self._spill()
        folder = self._temporary / FOLDER
        curves = {"coverage": vocab.coverage_curve(self._supervised), "replies": sorted(self._replies.items())}
        try:
            _save(self._in_order(), folder, about.get("key") or "")
            write_json(folder / ABOUT, {"format": FORMAT, **about, **self._totals, **accounting.to_dict(), **curves})
            _swap(folder, self._run / FOLDER)
        except OSError as error:
            raise self._refused(error) from None
        return open_prepared(self._run)

    def _in_order(self) -> Iterator[pyarrow.Table]:
        """All rows by rank, in tables of bounded size. Few rows were never spilled."""
        if not self._buckets:
            self._rows.sort(key=itemgetter(0))
            yield pyarrow.Table.from_batches([_as_batch(self._rows)])
        for number in sorted(self._buckets):
            table = self._buckets.pop(number).read()
            yield table.take(np.argsort(table["rank"].to_numpy(), kind="stable"))

    def _refused(self, error: OSError) -> Eagle3Error:
        why = error.strerror or str(error)
        return Eagle3Error(f"{self._run}: the prepared rows cannot be written ({why}). Free some space, or choose another run_dir.")


_Ranked = tuple[int, np.ndarray, np.ndarray, int, str, str, bool]  # rank, ids, mask, supervised tokens, source, sample id, held out?


def _as_batch(rows: list[_Ranked]) -> pyarrow.RecordBatch:
    """Columns of FEATURES, then the rank. Lists are joined by us: one copy instead of one Python object a token."""
    ranks, ids, masks, taught, sources, names, heldout = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(7))
    lengths = np.array([len(i) for i in ids], dtype=np.int32)
    ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)

    def lists(values: list[Any], kind: type) -> pyarrow.Array:
        return pyarrow.ListArray.from_arrays(ends, pyarrow.array(np.concatenate(values) if values else np.array([], kind)))

    columns = [lists(ids, np.int32), lists(masks, bool), lengths, np.array(taught, np.int32), sources, names, heldout, np.array(ranks, np.uint64)]
    return pyarrow.record_batch([pyarrow.array(c, f.type) if not isinstance(c, pyarrow.Array) else c.cast(f.type)
                                 for c, f in zip(columns, _SPILLED, strict=True)], schema=_SPILLED)


class _Bucket:
    """Rows of neighbouring ranks on disk, in the order in which they came."""

    def __init__(self, path: Path):
        self._path = path
        self._file = pyarrow.OSFile(str(path), "wb")
        self._stream = pyarrow.ipc.new_stream(self._file, _SPILLED)

    def append(self, batch: pyarrow.RecordBatch) -> None:
        self._stream.write_batch(batch)

    def close(self) -> None:
        self._stream.close()
        self._file.close()

    def read(self) -> pyarrow.Table:
        """All rows; the bucket is gone then."""
        self.close()
        with pyarrow.OSFile(str(self._path)) as file:
            table = pyarrow.ipc.open_stream(file).read_all()
        self._path.unlink()
        return table


def _save(tables: Iterable[pyarrow.Table], folder: Path, fingerprint: str) -> None:
    """The folder that `datasets.load_from_disk` opens, written table by table. (`save_to_disk` would go through a
    memory map of all rows, which counts as memory of ours.)"""
    files: list[str] = []
    writer, size = None, 0
    for table in tables:
        if writer is None or size > _FILE_BYTES:
            if writer:
                writer.finalize()
            files.append(f"data-{len(files):05}.arrow")
            writer, size = ArrowWriter(path=str(folder / files[-1]), features=FEATURES), 0
        writer.write_table(table.select(FEATURES.arrow_schema.names).combine_chunks())
        size += table.nbytes
    if writer:
        writer.finalize()
    datasets.DatasetInfo(features=FEATURES).write_to_directory(str(folder))
    write_json(folder / "state.json", {
        "_data_files": [{"filename": name} for name in files], "_fingerprint": fingerprint or "eagle3", "_format_columns": None,
        "_format_kwargs": {}, "_format_type": None, "_output_all_columns": False, "_split": None,
    })  # fmt: skip


def _swap(new: Path, place: Path) -> None:
    """Between the two renames there is no folder at all, which a reader reports; there is never half of one."""
    old = new.parent / "old"
    if place.exists():
        os.rename(place, old)
    os.rename(new, place)
