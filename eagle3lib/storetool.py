"""Stores from the command line: what is there, is it whole, what is in it, and room made. Imports no torch.

`eagle3lib store ls|verify|stat|reclaim PATH...`. A path is a store, a run folder, or a folder of those. Nothing is deleted that
is not a store of ours, that somebody is writing, or that was not named.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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
from eagle3lib.store import Store, lock

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
    age = _age(time.time() - max(f.stat().st_mtime for f in path.iterdir()))
    try:
        store = Store.open(path)
    except Eagle3Error as error:
        return [str(path), size(_bytes(path)), "-", "-", "-", age, str(error).split(": ", 1)[-1][:60]]
    return [str(path), size(_bytes(path)), f"{len(store):,}", f"{store.tokens:,}", store.manifest["store_dtype"], age, _state(path)]


def _state(path: Path) -> str:
    return "being written" if _busy(path) else f"{len(quarantine.read(path))} in quarantine" if (path / quarantine.FILE).exists() else ""


def _busy(path: Path) -> bool:
    try:
        lock(path).close()
    except Eagle3Error:
        return True
    return False


def _bytes(path: Path) -> int:
    """Bytes on the disk, not the length of the files: a sparse file takes less."""
    return sum(f.stat().st_blocks * 512 for f in path.iterdir())


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


def audit(path: Path, threads: int = 0) -> Audit:
    """Read every byte of every sample and prove its checksums, with a bar. A reader's view: index lines that are damaged raise."""
    store = Store.open(path)
    order = np.lexsort((store.index["row"], store.index["shard"]))
    damaged: dict[int, str] = {}
    begun = time.monotonic()
    with tqdm(total=store.tokens * layout(store.manifest).row_bytes, desc="store verify", unit="B", unit_scale=True, mininterval=1) as bar, \
            ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1)) as pool:
        for part in np.array_split(order, max(1, len(order) // 1024)):  # bounds what is queued
            for i, why, count in pool.map(lambda i: _proved(store, int(i)), part):
                damaged |= {i: why} if why else {}
                bar.update(count)
    return Audit(len(store), store.tokens * layout(store.manifest).row_bytes, time.monotonic() - begun, damaged)


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
        found = audit(path)
        rate = found.bytes / max(found.seconds, 1e-9) / 1e9
        print(f"{path}: {found.samples - len(found.damaged):,} of {found.samples:,} samples are whole; {size(found.bytes)} in {found.seconds:.1f} s, "
              f"{rate:.2f} GB/s")
        for why in list(found.damaged.values())[:20]:
            print("  " + why.split(": ", 1)[-1].split(". `")[0])
        if found.damaged and drop:
            _drop(path, found.damaged)
            print(f"  {len(found.damaged)} samples were taken out of the index; 02_extract asks for them again")
        wrong += len(found.damaged)
    return int(wrong > 0)


def _drop(path: Path, damaged: dict[int, str]) -> None:
    handle = lock(path)
    try:
        records = shards.read_records(path / "index.bin")
        whole = np.ones(len(records), bool)
        whole[list(damaged)] = False
        shards.replace_records(path / "index.bin", records[whole])
    finally:
        handle.close()


# reclaim -----------------------------------------------------------------------------------------------------------


def reclaim(paths: list[Path], yes: bool) -> int:
    """Delete these stores, each named itself, after a yes; says how many bytes came free."""
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

