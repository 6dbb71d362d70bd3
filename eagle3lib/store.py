"""The store: hidden states on disk, crash-safe, checksummed, opened in an instant whatever its size.

    store.json                   manifest: fingerprint, layers and their meaning, sizes, dtypes
    index.bin                    one 48-byte record a sample, appended only after the sample's bytes are durable
    shard-00000.safetensors      the rows of whole samples (see shards)
    quarantine.jsonl             rows that never checked out, with the reasons (see extract)

Stream 0..A-1 of a sample are the aux residual streams in the order of manifest["layers"], stream A is the last hidden
state (after the final norm). Legend: T tokens of a sample, A aux layers, S = A+1 streams, H hidden size.

Crash rules: a shard is written under another name, fsynced and renamed; then its records are appended and fsynced. So a
torn index tail or a shard that no record names is garbage of a crash: the next writer removes both. Index lines that
are damaged or doubled go too, and their samples are asked for again. Opening imports no torch; reading a sample does.
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from eagle3lib import shards
from eagle3lib.errors import Eagle3Error
from eagle3lib.manifest import bytes_per_token, compare, keep_or_write, layout, make_manifest, read_manifest
from eagle3lib.samples import Sample, Stack, sample_id
from eagle3lib.shards import FP8, RECORD, ShardReader, ShardWriter, fsync, shard_name

if TYPE_CHECKING:
    import torch

__all__ = ["FP8", "RECORD", "Sample", "Stack", "Store", "Writer", "bytes_per_token", "compare", "fsync", "make_manifest", "sample_id"]
OPEN_SHARDS = 64  # files that a reader keeps open


class Writer:
    """Appends samples, from any number of threads; at most one writer a store (an flock, so a dead owner holds nothing).

    Hidden states go to the disk as they come; a full shard is made durable by a thread of its own, its records after it.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], shard_bytes: int = 2**30):
        self.path, self.manifest, self.shard_bytes, self.layout = Path(path), manifest, shard_bytes, layout(manifest)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = lock(self.path)
        try:
            keep_or_write(self.path, manifest)
            index = recover(self.path)
        except BaseException:
            self._lock.close()
            raise
        self._known = {name.tobytes() for name in index["id"]}
        self._next_shard = int(index["shard"].max()) + 1 if len(index) else 0
        self._open: _OpenShard | None = None
        self._guard = threading.Lock()
        self._sealer = ThreadPoolExecutor(1, thread_name_prefix="seal")
        self._sealing: tuple[_OpenShard, Future[None]] | None = None

    def __contains__(self, name: str) -> bool:
        return bytes.fromhex(name) in self._known

    def __len__(self) -> int:
        return len(self._known)

    @property
    def ids(self) -> set[str]:
        return {name.hex() for name in self._known}

    def append(self, sample: Sample) -> None:
        """Take one sample; it is durable once its shard is full or flush() returns. The same id twice is an error."""
        _require_fits(sample, self.manifest)
        self.append_parts(sample.id, len(sample.input_ids), _parts(sample, self.manifest))

    def append_parts(self, sample: str, rows: int, parts: dict[str, Any]) -> None:
        """The same for who has the bytes as the shard will hold them (see shards), and has proved them: buffers by part."""
        sums, name = (_hidden_sum(parts), _tokens_sum(parts)), bytes.fromhex(sample)
        with self._guard:
            if name in self._known:
                raise Eagle3Error(f"store {self.path}: sample {sample} is already in it; a sample is stored once.")
            try:
                if self._open is None:
                    self._open = _OpenShard(self._next_shard, ShardWriter(self.path / shard_name(self._next_shard), self.layout))
                    self._next_shard += 1
                row = self._open.file.add(parts["hidden"], {key: bytes(data) for key, data in parts.items() if key != "hidden"}, rows)
            except OSError as error:
                raise self._lost(self._open, error) from error
            self._known.add(name)
            self._open.names.append(name)
            self._open.records += shards.make_record(sample, self._open.number, row, rows, *sums)
            if self._open.file.size >= self.shard_bytes:
                self._seal()

    def flush(self) -> None:
        """Make every appended sample durable: shard first, then its index records."""
        with self._guard:
            self._seal()
            self._wait()

    def _seal(self) -> None:
        self._wait()
        if self._open is not None:
            self._sealing = self._open, self._sealer.submit(self._open.seal, self.path / "index.bin")
            self._open = None

    def _wait(self) -> None:
        sealing, self._sealing = self._sealing, None
        if sealing is None:
            return
        try:
            sealing[1].result()
        except OSError as error:
            raise self._lost(sealing[0], error) from error

    def _lost(self, shard: _OpenShard | None, error: OSError) -> Eagle3Error:
        """Forget a shard that the disk did not take; what the index names stays."""
        if shard is not None:
            shard.file.discard()
            self._known -= set(shard.names)
            self._open = None if shard is self._open else self._open
        return _disk_error(self.path, error)

    def close(self) -> None:
        try:
            self.flush()
        finally:
            self._release()

    def _release(self) -> None:
        self._sealer.shutdown(wait=True)
        self._lock.close()

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None or issubclass(kind, (Exception, KeyboardInterrupt)):
                self.flush()  # work already done is kept, whatever stopped us
        finally:
            self._release()


class _OpenShard:
    """The shard that is being filled, with the records to be appended once it is durable."""

    def __init__(self, number: int, file: ShardWriter):
        self.number, self.file, self.records = number, file, bytearray()
        self.names: list[bytes] = []

    def seal(self, index: Path) -> None:
        self.file.seal()
        shards.append_records(index, bytes(self.records))


class Store:
    """A store opened for reading. Opening reads the index; reading a sample touches only that sample's bytes."""

    def __init__(self, path: Path):
        self.path = Path(path)
        self.manifest = read_manifest(self.path)
        self.index = np.zeros(0, RECORD)
        self._inode = -1
        self._shards: dict[int, ShardReader] = {}
        self._reading = threading.Lock()
        self.refresh()

    @staticmethod
    def create(path: Path, manifest: dict[str, Any], shard_bytes: int = 2**30) -> Writer:
        return Writer(path, manifest, shard_bytes)

    @classmethod
    def open(cls, path: Path) -> Store:
        return cls(path)

    def refresh(self) -> int:
        """Take in what a writer has added since; returns how many samples. Their numbers follow on, those known keep theirs."""
        file = self.path / "index.bin"
        inode = file.stat().st_ino if file.is_file() else -1
        if self._inode not in (-1, inode):
            raise Eagle3Error(f"store {self.path}: its index was replaced while it was read. Open the store again.")
        records = shards.read_records(file, skip=len(self.index))
        good = shards.good_records(records)
        last = int(good.nonzero()[0][-1]) + 1 if good.any() else 0  # what follows is being written, or was torn by a crash
        if not good[:last].all():
            raise Eagle3Error(f"store {self.path}: {last - int(good[:last].sum())} of {last:,} lines of its index are damaged or doubled. "
                              "Run 02_extract again: it takes them out and asks for those samples again.")
        self.index = np.concatenate([self.index, records[:last]]) if len(self.index) else records[:last]
        self._inode = inode
        return last

    def __len__(self) -> int:
        return len(self.index)

    @property
    def ids(self) -> list[str]:
        digits = self.index["id"].tobytes().hex()
        return [digits[i : i + 32] for i in range(0, len(digits), 32)]

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, in the order of the index: int64 [N]."""
        return self.index["rows"].astype(np.int64)

    @property
    def tokens(self) -> int:
        return int(self.index["rows"].sum(dtype=np.int64))

    def read(self, i: int) -> Sample:
        """Sample i of the index, its checksums proved. Raises Eagle3Error that names sample and shard."""
        import torch

        record = self.index[i]
        parts = {name: torch.from_numpy(part) for name, part in self.read_parts(i).items()}
        return Sample(bytes(record["id"]).hex(), parts["input_ids"].view(torch.int32).long(), parts["loss_mask"].bool(),
                      self._states(parts, int(record["rows"])))

    def read_parts(self, i: int) -> dict[str, np.ndarray]:
        """The bytes of sample i as they lie on the disk, by part, their checksums proved."""
        parts = self._bytes(i, layout(self.manifest).parts(0))
        self._require_whole(i, parts)
        return parts

    def read_tokens(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """(input_ids int32 [T], loss_mask bool [T]) of sample i, their checksum proved, without reading its hidden states."""
        parts = self._bytes(i, ("input_ids", "loss_mask"))
        if _tokens_sum(parts) != self.index[i]["tokens_xxh"]:
            raise self._damaged(self.index[i], "its token ids or mask differ from the checksum taken when they were written")
        return np.frombuffer(parts["input_ids"], "<i4"), np.frombuffer(parts["loss_mask"], bool)

    def read_many(self, numbers: Sequence[int], scratch: np.ndarray | None = None) -> Stack:
        """Samples behind each other, their checksums proved. Their states lie in `scratch` (uint8) if it is large enough, so they are
        gone when it is used again: fresh memory for every batch costs more than reading it."""
        import torch

        sizes, lengths = layout(self.manifest).parts(0), self.lengths[numbers]
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        whole = {name: np.empty(total * each, np.uint8) for name, (_, _, each) in sizes.items() if name != "hidden"}
        need = total * sizes["hidden"][2]
        whole["hidden"] = np.empty(need, np.uint8) if scratch is None or len(scratch) < need else scratch[:need]
        for i, end, length in zip(numbers, ends.tolist(), lengths.tolist(), strict=True):
            parts = {name: out[(end - length) * sizes[name][2] : end * sizes[name][2]] for name, out in whole.items()}
            self._fill(i, parts)
            self._require_whole(i, parts)
        ids = [bytes(raw).hex() for raw in self.index["id"][numbers]]
        hidden = self._states({name: torch.from_numpy(out) for name, out in whole.items()}, total)
        return Stack(ids, lengths, whole["input_ids"].view("<i4"), whole["loss_mask"].view(bool), hidden)

    def _bytes(self, i: int, names: Iterable[str]) -> dict[str, np.ndarray]:
        sizes, rows = layout(self.manifest).parts(0), int(self.index[i]["rows"])
        parts = {name: np.empty(rows * sizes[name][2], np.uint8) for name in names}
        self._fill(i, parts)
        return parts

    def _fill(self, i: int, parts: dict[str, np.ndarray]) -> None:
        record = self.index[i]
        try:
            shard = self._shard(int(record["shard"]))
            for name, out in parts.items():
                shard.read(name, int(record["row"]), int(record["rows"]), out)
        except (OSError, ValueError) as error:
            raise self._damaged(record, str(error)) from None

    def _require_whole(self, i: int, parts: dict[str, np.ndarray]) -> None:
        if _hidden_sum(parts) != self.index[i]["hidden_xxh"] or _tokens_sum(parts) != self.index[i]["tokens_xxh"]:
            raise self._damaged(self.index[i], "its bytes differ from the checksum taken when it was written")

    def _states(self, parts: dict[str, torch.Tensor], rows: int) -> torch.Tensor:
        """[rows, A+1, H] in the dtype captured."""
        hidden = parts["hidden"].view(_torch_dtype(self.manifest["store_dtype"])).view(rows, self.manifest["streams"], self.manifest["hidden_size"])
        if "scale" not in parts:
            return hidden
        import torch

        from eagle3lib import fp8

        return fp8.decode(hidden, parts["scale"].view(torch.float32).view(hidden.shape[:2]), _torch_dtype(self.manifest["dtype"]))

    def __iter__(self) -> Iterator[Sample]:
        return (self.read(i) for i in range(len(self)))

    def digest(self) -> str:
        """One name for exactly these bytes: a hash of manifest and of every sample's id and checksums, order aside."""
        parts = sorted(r["id"].tobytes() + r["hidden_xxh"].tobytes() + r["tokens_xxh"].tobytes() for r in self.index)
        return xxhash.xxh3_128_hexdigest(json.dumps(self.manifest, sort_keys=True).encode() + b"".join(parts))

    def disk_bytes(self) -> int:
        return sum(f.stat().st_size for f in self.path.iterdir() if f.is_file())

    def _shard(self, number: int) -> ShardReader:
        with self._reading:
            if number not in self._shards:
                if len(self._shards) >= OPEN_SHARDS:
                    self._shards.pop(next(iter(self._shards)))
                self._shards[number] = ShardReader(self.path / shard_name(number), layout(self.manifest))
            return self._shards[number]

    def _damaged(self, record: Any, why: str) -> Eagle3Error:
        return Eagle3Error(f"store {self.path}: sample {bytes(record['id']).hex()} in {shard_name(int(record['shard']))} is damaged: {why}. "
                           f"`python -m eagle3lib store verify {self.path} --drop` takes every damaged sample out; 02_extract asks for them again.")


def _torch_dtype(name: str) -> torch.dtype:
    import torch

    return torch.float8_e4m3fn if name == FP8 else getattr(torch, name)


def _parts(sample: Sample, manifest: dict[str, Any]) -> dict[str, Any]:
    """The sample as buffers, part by part, as its shard will hold it."""
    import torch

    hidden, parts = sample.hidden, {}
    if manifest["store_dtype"] == FP8:
        from eagle3lib import fp8

        hidden, scale = fp8.encode(hidden, sample.id)
        parts["scale"] = _buffer(scale)
    others = {"input_ids": sample.input_ids.to(torch.int32), "loss_mask": sample.loss_mask.to(torch.uint8)}
    return {"hidden": _buffer(hidden), **parts, **{name: _buffer(part) for name, part in others.items()}}


def _buffer(tensor: torch.Tensor) -> memoryview:
    import torch

    array: Any = tensor.contiguous().view(torch.uint8).numpy()
    return memoryview(array).cast("B")


def _hidden_sum(parts: dict[str, Any]) -> int:
    digest = xxhash.xxh3_64(parts["hidden"])
    digest.update(parts.get("scale", b""))
    return digest.intdigest()


def _tokens_sum(parts: dict[str, Any]) -> int:
    digest = xxhash.xxh3_64(parts["input_ids"])
    digest.update(parts["loss_mask"])
    return digest.intdigest()


def _require_fits(sample: Sample, manifest: dict[str, Any]) -> None:
    tokens = len(sample.input_ids)
    wanted = (tokens, manifest["streams"], manifest["hidden_size"])
    dtype = str(sample.hidden.dtype).removeprefix("torch.")
    if tuple(sample.hidden.shape) != wanted or dtype != manifest["dtype"] or len(sample.loss_mask) != tokens or not tokens:
        raise Eagle3Error(f"sample {sample.id}: hidden states {tuple(sample.hidden.shape)} {dtype}, mask of {len(sample.loss_mask)}; "
                          f"the store takes {wanted} {manifest['dtype']}, one row or more. Nothing is cast or cut here: extract it again.")
    if sample.id != sample_id(sample.input_ids, sample.loss_mask):
        raise Eagle3Error(f"sample {sample.id}: its token ids and mask hash to {sample_id(sample.input_ids, sample.loss_mask)}; "
                          "they are another row's.")


def recover(path: Path) -> np.ndarray:
    """Remove what a crash left: torn, damaged or doubled index lines, temporary files, shards that no record names. The index is made
    before the first shard, so shards without one are no crash's: Eagle3Error, and nothing is removed. Hold the lock."""
    if not (path / "index.bin").is_file():
        if any(path.glob("shard-*.safetensors")):
            raise Eagle3Error(f"store {path}: it has shards and no index.bin, so somebody deleted it; what is in them is no longer known. Put the "
                              f"index back, or delete the store (`python -m eagle3lib store reclaim {path}`) and run 02_extract again.")
        (path / "index.bin").touch()
        fsync(path)
    records = shards.read_records(path / "index.bin")
    good = shards.good_records(records)
    torn = (path / "index.bin").stat().st_size % RECORD.itemsize
    if torn or not good.all():
        print(f"store: {len(records) - int(good.sum())} lines of the index were torn, damaged or doubled; they are taken out")
        records = records[good]
        shards.replace_records(path / "index.bin", records)
    named = {shard_name(int(n)) for n in np.unique(records["shard"])}
    for file in path.glob("shard-*"):
        if file.name not in named:
            file.unlink()
    return records


def lock(path: Path) -> Any:
    """The store's lock, held until the handle is closed or its process ends. Eagle3Error when somebody holds it."""
    handle = (path / "lock").open("a")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise Eagle3Error(f"store {path}: another extraction is writing it now. Wait for it to end, or use another run folder.") from None
    return handle


def _disk_error(path: Path, error: Exception) -> Eagle3Error:
    stat = os.statvfs(path)
    return Eagle3Error(f"store {path}: cannot write ({error}); {stat.f_bavail * stat.f_frsize / 1e9:.2f} GB are free there. "
                       "Samples in the index are safe: make room and run 02_extract again, it goes on where it was.")
