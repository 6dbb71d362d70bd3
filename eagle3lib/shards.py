"""The store's files, byte by byte: shards and their index. numpy only, so that opening a store of any size costs next to nothing.

A shard is a plain safetensors file whose header is padded to 1,024 bytes. Its rows are written as they come and its header
last, so writing holds no shard in memory; and since the header follows from the sizes alone, any other header is damage.

    hidden      [R, S, H]  the streams: bfloat16 (float16, float32) as captured, or F8_E4M3 beside `scale`
    scale       [R, S]     float32, only with F8_E4M3: value = hidden * scale, a power of two
    input_ids   [R] int32;  loss_mask [R] uint8

The index is one 48-byte record a sample. Legend: R rows (tokens) of a shard, T of a sample, S streams, H hidden size.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HEADER_BYTES = 1024
RECORD = np.dtype([("id", "V16"), ("shard", "<u4"), ("row", "<u4"), ("rows", "<u4"),
                   ("hidden_xxh", "<u8"), ("tokens_xxh", "<u8"), ("crc", "<u4")])
SAFETENSORS = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4), "float8_e4m3": ("F8_E4M3", 1)}
FP8 = "float8_e4m3"


@dataclass(frozen=True)
class Layout:
    """Where the parts of a row lie. dtype: one of SAFETENSORS."""

    streams: int
    hidden_size: int
    dtype: str

    @property
    def hidden_bytes(self) -> int:
        return self.streams * self.hidden_size * SAFETENSORS[self.dtype][1]

    @property
    def scale_bytes(self) -> int:
        return 4 * self.streams if self.dtype == FP8 else 0

    @property
    def row_bytes(self) -> int:
        """All bytes of one token: hidden vectors, their scales, an int32 id, a mask byte."""
        return self.hidden_bytes + self.scale_bytes + 5

    def parts(self, rows: int) -> dict[str, tuple[str, list[int], int]]:
        """name -> (safetensors dtype, shape, bytes a row), in the order of the file."""
        parts = {"hidden": (SAFETENSORS[self.dtype][0], [rows, self.streams, self.hidden_size], self.hidden_bytes)}
        if self.scale_bytes:
            parts["scale"] = ("F32", [rows, self.streams], self.scale_bytes)
        return parts | {"input_ids": ("I32", [rows], 4), "loss_mask": ("U8", [rows], 1)}

    def header(self, rows: int) -> bytes:
        offset, content = 0, {}
        for name, (dtype, shape, each) in self.parts(rows).items():
            content[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + rows * each]}
            offset += rows * each
        return (HEADER_BYTES - 8).to_bytes(8, "little") + json.dumps(content).encode().ljust(HEADER_BYTES - 8)

    def shard_bytes(self, rows: int) -> int:
        return HEADER_BYTES + rows * self.row_bytes


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


class ShardWriter:
    """One shard while it is written, under another name. `add` puts hidden states on their way at once and keeps the few other bytes."""

    def __init__(self, path: Path, layout: Layout):
        self.path, self.layout = path, layout
        self._added: list[tuple[int, dict[str, bytes]]] = []  # (rows with it, the few bytes beside the states) of every call of add
        self._file = path.with_suffix(".tmp").open("wb", buffering=0)
        self._file.seek(HEADER_BYTES)

    @property
    def rows(self) -> int:
        return self._added[-1][0] if self._added else 0

    @property
    def size(self) -> int:
        return self.rows * self.layout.row_bytes

    def add(self, hidden: Any, others: dict[str, bytes], rows: int) -> int:
        """Append rows (any buffer of hidden_bytes each); returns the first one's number in the shard."""
        self._settle()
        first = self.rows
        write_all(self._file, hidden)
        self._added.append((first + rows, others))  # one step, so that an interrupt finds all of it or nothing
        return first

    def _settle(self) -> None:
        """Take back what an interrupted `add` has written."""
        end = HEADER_BYTES + self.rows * self.layout.hidden_bytes
        if self._file.tell() != end:
            self._file.seek(end)
            self._file.truncate()

    def seal(self) -> None:
        """The rest, the header, fsync, the final name: afterwards the shard is durable."""
        self._settle()
        for name in self.layout.parts(0):
            if name != "hidden":
                write_all(self._file, b"".join(others[name] for _, others in self._added))
        self._file.seek(0)
        write_all(self._file, self.layout.header(self.rows))
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._file.name, self.path)
        fsync(self.path.parent)

    def discard(self) -> None:
        self._file.close()
        Path(self._file.name).unlink(missing_ok=True)


def write_all(file: Any, data: Any) -> None:
    """A raw write may stop short (a signal, 2 GiB): go on until all is out."""
    view = memoryview(data).cast("B") if len(data) else memoryview(b"")
    while len(view):
        view = view[file.write(view):]


class ShardReader:
    """One shard for reading. Raises ValueError when file size or header is not what a whole shard of this layout has."""

    def __init__(self, path: Path, layout: Layout):
        self.layout = layout
        self._descriptor = os.open(path, os.O_RDONLY)
        try:
            self.rows = self._whole()
        except BaseException:
            self.close()
            raise

    def _whole(self) -> int:
        size = os.fstat(self._descriptor).st_size
        rows, rest = divmod(size - HEADER_BYTES, self.layout.row_bytes)
        if rest or rows < 1:
            raise ValueError(f"a file of {size:,} bytes is no whole shard (cut off?)")
        if os.pread(self._descriptor, HEADER_BYTES, 0) != self.layout.header(rows):
            raise ValueError("its header is not the one that this store writes")
        return rows

    def read(self, name: str, first: int, count: int, out: Any) -> None:
        """Fill the buffer `out` with `count` rows of a part."""
        if first + count > self.rows:
            raise ValueError(f"rows {first} to {first + count - 1} were written, it has {self.rows}")
        start = HEADER_BYTES
        for part, (_dtype, _shape, each) in self.layout.parts(self.rows).items():
            if part == name:
                break
            start += self.rows * each
        read_all(self._descriptor, out, start + first * each)

    def close(self) -> None:
        os.close(self._descriptor)

    def __del__(self) -> None:
        try:
            self.close()
        except (OSError, AttributeError):  # closed already, or never opened
            pass


def read_all(descriptor: int, out: Any, offset: int) -> None:
    view = memoryview(out).cast("B")
    while len(view):
        count = os.preadv(descriptor, [view], offset)
        if count == 0:
            raise ValueError("it ends in the middle of the rows")
        view, offset = view[count:], offset + count


# index -------------------------------------------------------------------------------------------------------------


def crcs(records: np.ndarray) -> np.ndarray:
    """CRC-32 of every record but its last four bytes: uint32 [N]. All records step by step together, two bytes a step: a million in
    0.1 s, where zlib would be called a million times."""
    found = np.empty(len(records), np.uint32)
    for start in range(0, len(records), 1 << 14):  # what fits into the cache
        words = np.ascontiguousarray(records[start : start + (1 << 14)]).view("<u2").reshape(-1, RECORD.itemsize // 2)
        crc = np.full(len(words), 0xFFFFFFFF, np.uint32)
        for column in np.ascontiguousarray(words[:, :-2].T):
            crc = _CRC_TABLE[(crc ^ column) & 0xFFFF] ^ (crc >> 16)
        found[start : start + len(crc)] = ~crc
    return found


def _crc_table() -> np.ndarray:
    """What 16 zero bits behind each value of the low 16 bits make of it; 0xEDB88320 is zlib's polynomial."""
    table = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(16):
        table = np.where(table & 1, (table >> 1) ^ np.uint32(0xEDB88320), table >> 1)
    return table


_CRC_TABLE = _crc_table()
_RECORD = struct.Struct("<16sIIIQQ")  # a RECORD without its crc


def make_record(name: str, shard: int, row: int, rows: int, hidden_xxh: int, tokens_xxh: int) -> bytes:
    data = _RECORD.pack(bytes.fromhex(name), shard, row, rows, hidden_xxh, tokens_xxh)
    return data + zlib.crc32(data).to_bytes(4, "little")


def read_records(path: Path, skip: int = 0) -> np.ndarray:
    """All whole records of the index behind the first `skip`, good or bad."""
    if not path.is_file():
        return np.zeros(0, RECORD)
    count = max(0, path.stat().st_size // RECORD.itemsize - skip)
    return np.fromfile(path, RECORD, count, offset=skip * RECORD.itemsize)


def good_records(records: np.ndarray) -> np.ndarray:
    """bool [N]: the record's own checksum holds, and no earlier good record has the same id."""
    good = crcs(records) == records["crc"]
    halves = np.ascontiguousarray(records["id"]).view("<u8").reshape(-1, 2)[:, 0]
    ordered = np.sort(halves)
    if (ordered[1:] == ordered[:-1]).any():  # seldom: only then look at whole ids
        seen: set[bytes] = set()
        for i in np.flatnonzero(good):
            name = records[i]["id"].tobytes()
            good[i] = name not in seen
            seen.add(name)
    return good


def append_records(path: Path, records: bytes) -> None:
    """Durable when this returns; when it raises, the index is as it was: half a record would shift all that follow."""
    new = not path.exists()
    with path.open("ab", buffering=0) as index:
        before = os.fstat(index.fileno()).st_size
        try:
            write_all(index, records)
            os.fsync(index.fileno())
            if new:
                fsync(path.parent)
        except OSError:
            os.ftruncate(index.fileno(), before)
            raise


def replace_records(path: Path, records: np.ndarray) -> None:
    """Put a mended index in the place of the old one; it appears whole or not at all."""
    temporary = path.with_suffix(".tmp")
    temporary.write_bytes(records.tobytes())
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
