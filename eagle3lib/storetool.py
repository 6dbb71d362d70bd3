"""Stores from the command line: what is there, is it whole, what is in it, and room made. Imports no torch.

`eagle3lib store ls|verify|stat|reclaim PATH...`. A path is a store, a run folder, or a folder of those. Nothing is deleted that
is not a store of ours, that somebody is writing, or that was not named.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from eagle3lib import quarantine, shards
from eagle3lib.errors import Eagle3Error
from eagle3lib.manifest import layout
from eagle3lib.plan import size
from eagle3lib.progress import tqdm
from eagle3lib.store import Store, lock, recover

OURS = re.compile(r"store\.json|index\.bin|lock|quarantine\.jsonl|index\.tmp|store\.tmp|shard-\d{5,}\.(safetensors|tmp)")


def find(paths: list[Path]) -> list[Path]:
    """The stores at or below these paths (three levels). Eagle3Error for a path that has none."""
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise Eagle3Error(f"{path}: no such folder.")
        here = [p.parent for pattern in ("", "*/", "*/*/", "*/*/*/") for p in sorted(path.glob(f"{pattern}store.json"))]
        if not here:
            raise Eagle3Error(f"{path}: no store there, nor in the folders below it (a store has a store.json).")
        found += here
    once: dict[Path, Path] = {}
    for path in found:  # runs/latest is a link to a run that is listed already
        once.setdefault(path.resolve(), path)
    return list(once.values())


# ls, stat ----------------------------------------------------------------------------------------------------------


def ls(paths: list[Path]) -> int:
    rows = [["store", "size", "samples", "tokens", "dtype", "age", "state"], *(_line(path) for path in find(paths))]
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(w) if c in (0, 4, 6) else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths, strict=True))).rstrip())
    return 0


def _line(path: Path) -> list[str]:
    try:
        age = _age(time.time() - max(f.lstat().st_mtime for f in path.iterdir()))
        store = Store.open(path)
    except (Eagle3Error, OSError) as error:
        return [str(path), size(_bytes(path)), "-", "-", "-", "-", str(error).split(": ", 1)[-1][:60]]
    return [str(path), size(_bytes(path)), f"{len(store):,}", f"{store.tokens:,}", store.manifest["store_dtype"], age, _state(path)]


def _state(path: Path) -> str:
    with _quiet(path) as quiet:
        if not quiet:
            return "being written"
    try:
        return f"{len(quarantine.read(path))} in quarantine" if (path / quarantine.FILE).exists() else ""
    except (Eagle3Error, OSError):
        return f"{quarantine.FILE} is damaged"


@contextmanager
def _quiet(path: Path) -> Iterator[bool]:
    """Whether nobody is writing; if so, writers are kept out meanwhile. Creates no file: a looker need not be allowed to."""
    with ExitStack() as stack:
        try:
            fcntl.flock(stack.enter_context((path / "lock").open("rb")), fcntl.LOCK_SH | fcntl.LOCK_NB)
            quiet = True
        except FileNotFoundError:
            quiet = True
        except OSError:
            quiet = False
        yield quiet


def _bytes(path: Path) -> int:
    """Bytes on the disk, not the length of the files: a sparse file takes less."""
    return sum(f.lstat().st_blocks * 512 for f in path.iterdir())


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def stat(paths: list[Path]) -> int:
    """Everything known without reading a sample: what the states are, lengths, shards, fingerprint."""
    for path in find(paths):
        store = Store.open(path)
        lengths = np.sort(store.lengths)
        about = {"samples": len(store), "tokens": store.tokens, "bytes": store.disk_bytes(), "bytes_per_token": layout(store.manifest).row_bytes,
                 "shards": len(np.unique(store.index["shard"])), "quarantined": len(quarantine.read(path)),
                 "tokens_a_sample": {name: int(lengths[int(q * (len(lengths) - 1))]) for name, q in
                                     (("least", 0), ("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("most", 1))} if len(lengths) else {},
                 "written": datetime.fromtimestamp((path / "index.bin").stat().st_mtime).isoformat(" ", "seconds") if len(store) else None,
                 "digest": store.digest(), **store.manifest}
        print(f"{path}\n{json.dumps(about, indent=1)}")
    return 0


# verify ------------------------------------------------------------------------------------------------------------


@dataclass
class Audit:
    samples: int
    bytes: int
    seconds: float
    damaged: dict[int, str]  # number in the index -> why
    records: np.ndarray  # the index lines of those, as they were read
    lost: list[str]  # what is wrong with the index and the files as a whole; not looked at while somebody writes


def audit(path: Path, threads: int = 0) -> Audit:
    """Read every byte of every sample and prove its checksums, with a bar. A reader's view: index lines that are damaged raise."""
    with _quiet(path) as quiet:
        store = Store.open(path)
        lost = _lost(store) if quiet else []
    order = np.lexsort((store.index["row"], store.index["shard"]))
    damaged: dict[int, str] = {}
    begun = time.monotonic()
    with tqdm(total=store.tokens * layout(store.manifest).row_bytes, desc="store verify", unit="B", unit_scale=True, mininterval=1) as bar, \
            ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        for part in np.array_split(order, max(1, len(order) // 1024)):  # bounds what is queued
            for i, why, count in pool.map(lambda i: _proved(store, int(i)), part):
                damaged |= {i: why} if why else {}
                bar.update(count)
    size_read = store.tokens * layout(store.manifest).row_bytes
    return Audit(len(store), size_read, time.monotonic() - begun, damaged, store.index[list(damaged)], lost)


def _lost(store: Store) -> list[str]:
    """Index lines behind those that a reader takes, and shards that no line names. Store.open raises for damage between."""
    index = store.path / "index.bin"
    there = {file.name for file in store.path.glob("shard-*.safetensors")}
    if not index.is_file():
        return [f"index.bin is missing, and {len(there)} shards are there"] if there else []
    strangers = sorted(there - {shards.shard_name(int(n)) for n in np.unique(store.index["shard"])})
    over = index.stat().st_size - len(store) * shards.RECORD.itemsize
    found = [f"index.bin: {-(-over // shards.RECORD.itemsize)} lines at its end are damaged or torn"] if over else []
    return found + [f"{name}: no line of the index names it" for name in strangers]


def _proved(store: Store, i: int) -> tuple[int, str, int]:
    try:
        parts = store.read_parts(i)
    except Eagle3Error as error:
        return i, str(error), 0
    return i, "", sum(map(len, parts.values()))


def verify(paths: list[Path], drop: bool = False) -> int:
    """Audit each store; 1 when anything is damaged. drop: take damaged samples out of the index, so that 02_extract asks for them again."""
    wrong = 0
    for path in find(paths):
        try:
            wrong += _verify(path, drop)
        except Eagle3Error as error:
            print(f"{path}: {error}")
            wrong += 1
    return int(wrong > 0)


def _verify(path: Path, drop: bool) -> int:
    found = audit(path)
    rate = found.bytes / max(found.seconds, 1e-9) / 1e9
    print(f"{path}: {found.samples - len(found.damaged):,} of {found.samples:,} samples are whole; {size(found.bytes)} in {found.seconds:.1f} s, "
          f"{rate:.2f} GB/s")
    for why in [*found.lost, *(said.split(": ", 1)[-1].split(". `")[0] for said in list(found.damaged.values())[:20])]:
        print(f"  {why}")
    wrong = len(found.damaged) + len(found.lost)
    if wrong and drop:
        print(f"  {_drop(path, found.records)} samples were taken out of the index; 02_extract asks for them again")
    return wrong


def _drop(path: Path, damaged: np.ndarray) -> int:
    """Take out these very lines, wherever they are by now, and what else a writer would remove. How many."""
    handle = lock(path)
    try:
        before, gone = shards.read_records(path / "index.bin"), {record.tobytes() for record in damaged}
        whole = np.array([record.tobytes() not in gone for record in before], bool)
        if not whole.all():
            shards.replace_records(path / "index.bin", before[whole])
        return len(before) - len(recover(path))
    finally:
        handle.close()


# reclaim -----------------------------------------------------------------------------------------------------------


def reclaim(paths: list[Path], yes: bool) -> int:
    """Delete these stores, each named itself, after a yes; says how many bytes came free."""
    paths = list({path.resolve(): path for path in reversed(paths)}.values())[::-1]
    for path in paths:
        _require_ours(path)
    total = sum(map(_bytes, paths))
    for path in paths:
        print(f"  {path}  {size(_bytes(path))}")
    if not yes and not _agreed(f"Delete {len(paths)} store{'s' * (len(paths) > 1)}, {size(total)}? [y/N] "):
        print("Nothing was deleted.")
        return 1
    for path in paths:
        _delete(path)
    print(f"{size(total)} ({total:,} bytes) are free again.")
    return 0


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise Eagle3Error("store reclaim: nobody is there to be asked; say --yes. Nothing was deleted.")
    return input(question).strip().lower() in ("y", "yes")


def _require_ours(path: Path) -> None:
    if path.is_symlink() or not path.is_dir():
        raise Eagle3Error(f"{path}: no folder. Name the store's folder itself. Nothing was deleted.")
    if not (path / "store.json").is_file() or not _says_ours(path):
        raise Eagle3Error(f"{path}: no store of ours (it has no store.json that says so). Nothing was deleted.")
    if strangers := sorted(f.name for f in path.iterdir() if f.is_symlink() or not f.is_file() or not OURS.fullmatch(f.name)):
        raise Eagle3Error(f"{path}: it holds what no store of ours has: {', '.join(strangers[:5])}. Move that away first. Nothing was deleted.")
    lock(path).close()


def _says_ours(path: Path) -> bool:
    """A manifest of this or of another format."""
    try:
        content: Any = json.loads((path / "store.json").read_text())
        return isinstance(content, dict) and {"format", "fingerprint", "layers", "streams"} <= content.keys()
    except ValueError:
        return False


def _delete(path: Path) -> None:
    """Index first: a deletion that is cut short leaves no sample that seems to be there."""
    handle = lock(path)
    try:
        for file in sorted(_files(path), key=lambda f: (f.name == "store.json", f.name != "index.bin")):
            file.unlink()
        (path / "lock").unlink()
        path.rmdir()
    finally:
        handle.close()


def _files(path: Path) -> Iterator[Path]:
    return (f for f in path.iterdir() if f.name != "lock")

