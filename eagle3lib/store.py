"""The store: hidden states on disk, crash-safe, checksummed, opened in an instant whatever its size.

    store.json                   manifest: fingerprint, layers and their meaning, sizes, dtype
    index.bin                    one 48-byte record a sample, appended only after the sample's bytes are durable
    shard-00000.safetensors      hidden [R, A+1, H], input_ids int32 [R], loss_mask uint8 [R]; R rows of whole samples

Legend: T tokens of a sample, A aux layers, H hidden size, R rows (tokens) of a shard. Stream 0..A-1 of `hidden` are the
aux residual streams in the order of manifest["layers"], stream A is the last hidden state (after the final norm).

Crash rules: a shard is written under another name, fsynced and renamed; then its records are appended and fsynced. So a
torn index tail or a shard that no record names is garbage of a crash: the next writer removes both.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from eagle3lib.errors import Eagle3Error

FORMAT = 1
RECORD = np.dtype([("id", "V16"), ("shard", "<u4"), ("row", "<u4"), ("rows", "<u4"),
                   ("hidden_xxh", "<u8"), ("tokens_xxh", "<u8"), ("crc", "<u4")])
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Sample:
    id: str  # 32 hex digits: sample_id(input_ids, loss_mask)
    input_ids: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # bool [T]
    hidden: torch.Tensor  # [T, A+1, H] in the store's dtype


def sample_id(input_ids: Any, loss_mask: Any) -> str:
    """Identity of a row: a hash of its token ids and loss mask, whatever its file, order or worker."""
    ids = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    return xxhash.xxh3_128_hexdigest(ids + np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())


def bytes_per_token(manifest: dict[str, Any]) -> int:
    """Stored bytes a token: A+1 hidden vectors, one int32 id, one mask byte."""
    return manifest["streams"] * manifest["hidden_size"] * DTYPES[manifest["dtype"]].itemsize + 5


def make_manifest(fingerprint: dict[str, Any], layers: list[int], hidden_size: int, dtype: str) -> dict[str, Any]:
    return {"format": FORMAT, "fingerprint": fingerprint, "layers": layers, "streams": len(layers) + 1,
            "hidden_size": hidden_size, "dtype": dtype,
            "layer_meaning": "k names r_k, the residual stream that enters layer k",
            "last_meaning": "after the final norm: logits = lm_head(last)"}


class Writer:
    """Appends samples; at most one writer a store (an flock, so a dead owner holds nothing). Use as a context manager."""

    def __init__(self, path: Path, manifest: dict[str, Any], shard_bytes: int = 2**30):
        self.path, self.manifest, self.shard_bytes = Path(path), manifest, shard_bytes
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        try:
            _keep_or_write_manifest(self.path, manifest)
            self.index = _recover(self.path)
        except BaseException:
            self._lock.close()
            raise
        self.ids = {bytes(i).hex() for i in self.index["id"]}
        self._next_shard = int(self.index["shard"].max()) + 1 if len(self.index) else 0
        self._buffer: list[Sample] = []
        self._buffered = 0

    def append(self, sample: Sample) -> None:
        """Take one sample; it is durable once its shard is full or flush() returns. The same id twice is an error."""
        if sample.id in self.ids:
            raise Eagle3Error(f"store {self.path}: sample {sample.id} is already in it; a sample is stored once.")
        _require_fits(sample, self.manifest)
        self.ids.add(sample.id)
        self._buffer.append(sample)
        self._buffered += sample.hidden.nbytes
        if self._buffered >= self.shard_bytes:
            self.flush()

    def flush(self) -> None:
        """Make every appended sample durable: shard first, then its index records."""
        samples, self._buffer, self._buffered = self._buffer, [], 0
        if not samples:
            return
        try:
            _write_shard(self.path / _shard_name(self._next_shard), samples)
            _append_records(self.path / "index.bin", _records(samples, self._next_shard))
        except (OSError, SafetensorError) as error:  # safetensors wraps what the disk says
            self.ids -= {s.id for s in samples}
            raise _disk_error(self.path, error) from error
        self._next_shard += 1

    def close(self) -> None:
        self.flush()
        self._lock.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, (Exception, KeyboardInterrupt)):
                self.flush()  # work already done is kept, whatever stopped us
        finally:
            self._lock.close()


class Store:
    """A store opened for reading. Opening maps the index; reading a sample touches only that sample's bytes."""

    def __init__(self, path: Path):
        self.path = Path(path)
        if not (self.path / "store.json").is_file():
            raise Eagle3Error(f"store {self.path}: no store.json there. Run notebook 02_extract (or name the right run).")
        self.manifest = json.loads((self.path / "store.json").read_text())
        if self.manifest.get("format") != FORMAT:
            raise Eagle3Error(f"store {self.path}: format {self.manifest.get('format')!r}, this version reads {FORMAT}. Extract again.")
        self.index = _valid_records(self.path / "index.bin")
        self._shards: dict[int, Any] = {}

    @staticmethod
    def create(path: Path, manifest: dict[str, Any], shard_bytes: int = 2**30) -> Writer:
        return Writer(path, manifest, shard_bytes)

    @classmethod
    def open(cls, path: Path) -> Store:
        return cls(path)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> list[str]:
        return [bytes(i).hex() for i in self.index["id"]]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, in the order of the index: int64 [N]."""
        return self.index["rows"].astype(np.int64)

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    def read(self, i: int) -> Sample:
        """Sample i of the index, its checksums proved. Raises Eagle3Error that names sample and shard."""
        record = self.index[i]
        span = slice(int(record["row"]), int(record["row"] + record["rows"]))
        name = bytes(record["id"]).hex()
        try:
            shard = self._shard(int(record["shard"]))
            sample = Sample(name, shard.get_slice("input_ids")[span].long(), shard.get_slice("loss_mask")[span].bool(),
                            shard.get_slice("hidden")[span])
        except (OSError, SafetensorError, ValueError, RuntimeError, IndexError) as error:
            raise self._damaged(name, record, str(error)) from None
        if _hidden_sum(sample) != record["hidden_xxh"] or _tokens_sum(sample) != record["tokens_xxh"]:
            raise self._damaged(name, record, "its bytes differ from the checksum taken when it was written")
        return sample

    def __iter__(self) -> Iterator[Sample]:
        return (self.read(i) for i in range(len(self)))

    def digest(self) -> str:
        """One name for exactly these bytes: a hash of manifest and of every sample's id and checksums, order aside."""
        parts = sorted(r["id"].tobytes() + r["hidden_xxh"].tobytes() + r["tokens_xxh"].tobytes() for r in self.index)
        return xxhash.xxh3_128_hexdigest(json.dumps(self.manifest, sort_keys=True).encode() + b"".join(parts))

    def disk_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.path.iterdir() if f.is_file())

    def _shard(self, number: int) -> Any:
        if number not in self._shards:
            if len(self._shards) >= 64:  # bound the number of mappings
                self._shards.pop(next(iter(self._shards)))
            self._shards[number] = safe_open(self.path / _shard_name(number), framework="pt")
        return self._shards[number]

    def _damaged(self, name: str, record: Any, why: str) -> Eagle3Error:
        return Eagle3Error(f"store {self.path}: sample {name} in {_shard_name(int(record['shard']))} is damaged: {why}. "
                           "Delete the store and extract again (02_extract).")


def _shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


def _hidden_sum(sample: Sample) -> int:
    return xxhash.xxh3_64_intdigest(sample.hidden.contiguous().view(torch.uint8).numpy())


def _tokens_sum(sample: Sample) -> int:
    ids = sample.input_ids.to(torch.int32).contiguous().numpy().tobytes()
    return xxhash.xxh3_64_intdigest(ids + sample.loss_mask.to(torch.uint8).contiguous().numpy().tobytes())


def _require_fits(sample: Sample, manifest: dict[str, Any]) -> None:
    tokens = len(sample.input_ids)
    wanted = (tokens, manifest["streams"], manifest["hidden_size"])
    if tuple(sample.hidden.shape) != wanted or sample.hidden.dtype != DTYPES[manifest["dtype"]] or len(sample.loss_mask) != tokens:
        raise Eagle3Error(f"sample {sample.id}: hidden states {tuple(sample.hidden.shape)} {sample.hidden.dtype}, mask of {len(sample.loss_mask)}; "
                          f"the store takes {wanted} {manifest['dtype']}. Nothing is cast or cut here: extract it again.")
    if sample.id != sample_id(sample.input_ids, sample.loss_mask):
        raise Eagle3Error(f"sample {sample.id}: its token ids and mask hash to {sample_id(sample.input_ids, sample.loss_mask)}; "
                          "they are another row's.")


def _write_shard(path: Path, samples: list[Sample]) -> None:
    temporary = path.with_suffix(".tmp")
    save_file({"hidden": torch.cat([s.hidden for s in samples]),
               "input_ids": torch.cat([s.input_ids for s in samples]).to(torch.int32),
               "loss_mask": torch.cat([s.loss_mask for s in samples]).to(torch.uint8)}, temporary)
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


def _records(samples: list[Sample], shard: int) -> np.ndarray:
    records = np.zeros(len(samples), RECORD)
    row = 0
    for record, sample in zip(records, samples, strict=True):
        record["id"] = np.void(bytes.fromhex(sample.id))
        record["shard"], record["row"], record["rows"] = shard, row, len(sample.input_ids)
        record["hidden_xxh"], record["tokens_xxh"] = _hidden_sum(sample), _tokens_sum(sample)
        record["crc"] = _crc(record)
        row += len(sample.input_ids)
    return records


def _crc(record: np.void) -> int:
    return zlib.crc32(record.tobytes()[:-4])


def _append_records(path: Path, records: np.ndarray) -> None:
    with path.open("ab") as index:
        index.write(records.tobytes())
        index.flush()
        os.fsync(index.fileno())


def _valid_records(path: Path) -> np.ndarray:
    """The index up to a torn tail. A bad record with good ones behind it is damage, not a torn tail: an error."""
    if not path.is_file() or path.stat().st_size < RECORD.itemsize:
        return np.zeros(0, RECORD)
    records = np.memmap(path, RECORD, mode="r", shape=(path.stat().st_size // RECORD.itemsize,))
    good = len(records)
    while good and records[good - 1]["crc"] != _crc(records[good - 1]):
        good -= 1
    return records[:good]


def _recover(path: Path) -> np.ndarray:
    """Remove what a crash left: a torn index tail, temporary files, shards that no record names."""
    records = np.array(_valid_records(path / "index.bin"))
    if (path / "index.bin").is_file():
        os.truncate(path / "index.bin", records.nbytes)
    named = {_shard_name(int(n)) for n in np.unique(records["shard"])}
    for file in path.glob("shard-*"):
        if file.name not in named:
            file.unlink()
    return records


def _keep_or_write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    file = path / "store.json"
    if not file.is_file():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
        fsync(temporary)
        os.replace(temporary, file)
        return
    if differences := compare(json.loads(file.read_text()), manifest):
        raise Eagle3Error(f"store {path} was made by another configuration; hidden states are never mixed. Use another run folder or delete it.\n"
                          + "\n".join(f"  {line}" for line in differences))


def compare(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two manifests (or fingerprints) differ, one readable line each."""
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += compare(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} there, {b!r} now")
    return lines


def _lock(path: Path) -> Any:
    handle = (path / "lock").open("w")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise Eagle3Error(f"store {path}: another extraction is writing it now. Wait for it to end, or use another run folder.") from None
    return handle


def fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_error(path: Path, error: Exception) -> Eagle3Error:
    stat = os.statvfs(path)
    return Eagle3Error(f"store {path}: cannot write ({error}); {stat.f_bavail * stat.f_frsize / 1e9:.2f} GB are free there. "
                       "Samples in the index are safe: make room and run 02_extract again, it goes on where it was.")
