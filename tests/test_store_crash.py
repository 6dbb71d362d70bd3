"""Whatever ends an extraction, and whenever: the next one leaves the store of an uninterrupted one, sample for sample.

A child process extracts with the scripted engine and is killed at random instants; a power cut also takes what was not
synced: file tails, and names that only an unsynced folder knows.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_target, make_rows

from eagle3lib import extract
from eagle3lib.errors import Eagle3Error
from eagle3lib.progress import tqdm
from eagle3lib.store import RECORD, Store

ROWS = make_rows(80, 30, seed=5)
FORK = multiprocessing.get_context("fork")
SHARD_BYTES = 20_000


def extraction(folder: Path, seconds: float = 0.0, engine: Any = None) -> Store:
    """One pass over ROWS into folder/store, in shards of a few samples."""
    target = fake_target(folder / "target")
    engine = engine or FakeEngine(folder / "shm", seconds_a_batch=seconds)
    with Store.create(folder / "store", extract._manifest(target, "bfloat16", "", engine.fingerprint), SHARD_BYTES) as writer:
        extract._Run([engine], ROWS, writer, 400, 0.01).go()
    return Store.open(folder / "store")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return extraction(tmp_path_factory.mktemp("whole"))


def checksums(store: Store) -> dict[str, tuple[int, int]]:
    return {bytes(r["id"]).hex(): (int(r["hidden_xxh"]), int(r["tokens_xxh"])) for r in store.index}


def assert_same(store: Store, whole: Store) -> None:
    assert checksums(store) == checksums(whole) and len(store) == len(whole) == len(ROWS)
    assert store.digest() == whole.digest()
    assert [sample.id for sample in store] == store.ids  # every byte read, every checksum proved
    named = {f"shard-{int(n):05d}.safetensors" for n in store.index["shard"]}
    assert {f.name for f in store.path.iterdir()} == named | {"store.json", "index.bin", "lock"}  # no garbage either


def start_child(folder: Path, prepare: Callable[[], None] = lambda: None) -> Any:
    def work() -> None:
        tqdm.set_lock(threading.RLock())  # tqdm's own is shared with the parent, who would wait for ever for a child killed with it
        prepare()
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        extraction(folder, seconds=0.004)
        os._exit(0)

    child = FORK.Process(target=work)
    child.start()
    return child


def kill_at(child: Any, instant: float) -> None:
    time.sleep(instant)
    os.kill(child.pid, signal.SIGKILL)
    child.join()


def test_killed_at_fifty_random_instants_the_store_ends_up_the_same(tmp_path: Path, whole: Store) -> None:
    """A store is killed several times before it is left to end; only deaths in the midst of work count."""
    dice, deaths, started = random.Random(1), 0, 0
    while deaths < 50:
        started += 1
        folder = tmp_path / str(started)
        for _ in range(6):
            child = start_child(folder)
            kill_at(child, dice.uniform(0.02, 0.2))
            deaths += child.exitcode == -9 and (not (folder / "store" / "index.bin").exists() or len(Store.open(folder / "store")) < len(ROWS))
        assert_same(extraction(folder), whole)
    assert started >= 9


# ---- power cuts ----


class Disk:
    """Notes what is durable: the length of each synced file, by inode, and the names that a synced folder holds."""

    def __init__(self, note: Path):
        self.note = note

    def watch(self) -> None:
        """In the child: every fsync is noted once it has been done."""
        real = os.fsync
        descriptor = os.open(self.note, os.O_CREAT | os.O_WRONLY | os.O_APPEND)

        def noting(file: int) -> None:
            real(file)
            about = os.fstat(file)
            names = {name: os.stat(name, dir_fd=file).st_ino for name in os.listdir(file)} if os.path.isdir(f"/proc/self/fd/{file}") else None
            os.write(descriptor, json.dumps([about.st_ino, about.st_size, names]).encode() + b"\n")

        os.fsync = noting

    def cut_power(self, store: Path, dice: random.Random) -> None:
        """Take away what need not have survived: any part of each unsynced tail, any name that no synced folder holds."""
        lengths: dict[int, int] = {}
        names: dict[str, int] = {}
        for line in self.note.read_text().splitlines() if self.note.exists() else []:
            inode, length, listing = json.loads(line)
            lengths[inode] = length
            names = names if listing is None else listing
        for file in list(store.iterdir()):
            about = file.stat()
            if names.get(file.name) != about.st_ino and dice.random() < 0.5:
                file.unlink()
                continue
            durable = min(lengths.get(about.st_ino, 0), about.st_size)
            os.truncate(file, dice.randint(durable, about.st_size))


def test_a_power_cut_at_fifty_random_instants_loses_nothing_that_was_durable(tmp_path: Path, whole: Store) -> None:
    dice, cut, kept = random.Random(2), 0, 0
    for n in range(50):
        folder = tmp_path / str(n)
        disk = Disk(tmp_path / f"{n}.fsyncs")
        kill_at(start_child(folder, disk.watch), dice.uniform(0.02, 0.4))
        if not (folder / "store").exists():
            continue
        before = durable_samples(disk.note, folder / "store")
        disk.cut_power(folder / "store", dice)
        if (folder / "store" / "store.json").exists() and (folder / "store" / "store.json").stat().st_size:
            survivors = checksums(Store.open(folder / "store"))
            assert len(survivors) >= before and survivors.items() <= checksums(whole).items()
            kept += len(survivors)
        cut += 1
        assert_same(extraction(folder), whole)
    assert cut >= 40 and kept > 100


def durable_samples(note: Path, store: Path) -> int:
    """Records of the index that had been synced when the power went."""
    if not note.exists() or not (store / "index.bin").exists():
        return 0
    inode, named = (store / "index.bin").stat().st_ino, False
    length = 0
    for line in note.read_text().splitlines():
        of, size, names = json.loads(line)
        length = size if of == inode else length
        named = named or bool(names) and names.get("index.bin") == inode
    return length // RECORD.itemsize if named else 0


# ---- the index, damaged ----


def harm_lost(records: list[bytes]) -> list[bytes]:
    return records[:10] + records[13:]


def harm_doubled(records: list[bytes]) -> list[bytes]:
    return records[:20] + records[5:8] + records[20:] + records[:2]


def harm_flipped(records: list[bytes]) -> list[bytes]:
    return [bytes([r[0] ^ 1]) + r[1:] if n in (0, 30) else r for n, r in enumerate(records)]


def harm_torn(records: list[bytes]) -> list[bytes]:
    return [*records[:-3], records[-3][:11]]


@pytest.mark.parametrize("harm", [harm_lost, harm_doubled, harm_flipped, harm_torn, lambda records: []])
def test_index_lines_lost_doubled_or_damaged_are_mended_by_the_next_extraction(tmp_path: Path, whole: Store, harm: Any) -> None:
    index = extraction(tmp_path).path / "index.bin"
    data = index.read_bytes()
    index.write_bytes(b"".join(harm([data[i : i + 48] for i in range(0, len(data), 48)])))
    if harm in (harm_doubled, harm_flipped):
        with pytest.raises(Eagle3Error, match="damaged or doubled"):
            Store.open(index.parent)
    store = extraction(tmp_path)
    assert checksums(store) == checksums(whole) and len(store) == len(ROWS)
    assert [sample.id for sample in store] == store.ids


def test_two_extractions_at_once_are_refused_and_a_killed_one_holds_nothing(tmp_path: Path, whole: Store) -> None:
    child = start_child(tmp_path)
    deadline = time.monotonic() + 20
    while not (tmp_path / "store" / "index.bin").exists():
        assert time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(Eagle3Error, match="another extraction is writing it now"):
        extraction(tmp_path)
    kill_at(child, 0)
    assert_same(extraction(tmp_path), whole)


@pytest.mark.parametrize("room", [0, 500, 1500, 20_000, 30_000, 47_000])
def test_a_disk_that_fills_up_in_the_middle_of_a_shard_stops_the_stage_and_loses_nothing(
        tmp_path: Path, whole: Store, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """After `room` bytes the disk takes half of what is written, and then nothing."""
    left = [room]

    def limited(file: Any, data: Any) -> None:
        view = memoryview(data).cast("B") if len(data) else memoryview(b"")
        taken = min(len(view), left[0])
        file.write(view[:taken])
        left[0] -= taken
        if taken < len(view):
            raise OSError(28, "No space left on device")

    monkeypatch.setattr("eagle3lib.shards.write_all", limited)
    with pytest.raises(Eagle3Error, match=r"cannot write.*No space left.*GB are free there"):
        extraction(tmp_path)
    assert checksums(Store.open(tmp_path / "store")).items() <= checksums(whole).items()
    assert not list((tmp_path / "store").glob("*.tmp"))  # what could not be finished takes no room either
    monkeypatch.undo()
    assert_same(extraction(tmp_path), whole)
