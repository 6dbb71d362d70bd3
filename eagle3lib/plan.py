"""The forecast: what a dump will take, said before the first request, and what would fit when it does not.

Sizes follow from token counts alone: a token takes (A aux + 1 last) hidden vectors, four bytes of id and one of mask, a
sample 48 bytes of index, a shard 1,024 bytes of header. The time follows from a prefill rate, measured or given.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3lib import shards
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.manifest import as_captured, layout, make_manifest
from eagle3lib.shards import FP8

MARGIN = 1.1  # room demanded beyond the forecast
OTHER_FILES = 1600  # store.json and the lock, bytes


@dataclass(frozen=True)
class Forecast:
    """What a run will write. Rates in tokens a second; shm: the folder through which the engine hands its states over."""

    samples: int
    tokens: int
    bytes: int  # on disk, all files of the store
    files: int
    bytes_per_token: int
    states_bytes: int  # of it, hidden states as captured
    store_dtype: str
    shm_bytes: int  # at most at once in shared memory
    disk_free: int  # what this store has taken already counts as free
    shm_free: int
    tokens_per_s: float = 0.0  # 0: not known yet

    @property
    def fits(self) -> bool:
        return self.bytes * MARGIN <= self.disk_free and self.shm_bytes <= self.shm_free

    @property
    def hours(self) -> float:
        return self.tokens / self.tokens_per_s / 3600 if self.tokens_per_s else float("nan")

    def at(self, tokens_per_s: float) -> Forecast:
        """The same with a prefill rate."""
        return replace(self, tokens_per_s=tokens_per_s)

    def problems(self) -> list[str]:
        """What does not fit, with the numbers and what would; empty when all fits."""
        found = []
        if self.bytes * MARGIN > self.disk_free:
            fewer = int(self.disk_free / MARGIN / self.bytes_per_token)
            half = "" if self.store_dtype == FP8 else " set store_dtype: float8_e4m3 (half the bytes),"
            found.append(f"disk: the dump will take {size(self.bytes)} ({self.tokens:,} tokens of {self.bytes_per_token:,} bytes), and a tenth more "
                         f"is kept free; {size(self.disk_free)} are free. Free some, put the runs on a larger disk (EAGLE3_RUNS),{half} "
                         f"prepare at most {fewer:,} tokens, or stream: extract and train in parts of that many tokens, "
                         "deleting each store (`python -m eagle3lib store reclaim`) before the next.")
        if self.shm_bytes > self.shm_free:
            fewer = int(self.shm_free / max(1, self.shm_bytes) * 100)
            found.append(f"shared memory: prompts under way hold up to {size(self.shm_bytes)}, {size(self.shm_free)} are free there. Enlarge "
                         f"/dev/shm (docker: --shm-size), set SGLANG_HS_DUMP_DIR to a larger folder, or lower tokens_in_flight to {fewer} %.")
        return found

    def require_room(self) -> None:
        """Raise Eagle3Error when the dump does not fit, with the numbers and what would fit."""
        if found := self.problems():
            raise Eagle3Error(" ".join(found))

    def __repr__(self) -> str:
        return "forecast\n" + "\n".join(f"  {name:<15} {text}" for name, text in self._lines())

    def _lines(self) -> list[tuple[str, str]]:
        each = self.states_bytes // max(1, self.tokens)
        known = self.tokens_per_s > 0
        return [("rows", f"{self.samples:,} samples, {self.tokens:,} tokens"),
                ("hidden states", f"{size(self.states_bytes)} ({each:,} bytes a token as captured)"),
                ("on disk",
                 f"{size(self.bytes)} in {self.files:,} files ({self.store_dtype}; {self.bytes_per_token:,} bytes a token with id and mask)"),
                ("free on disk", f"{size(self.disk_free)}, {self.disk_free / max(1, self.bytes):.2f} of what it takes (wanted: {MARGIN})"),
                ("shared memory", f"up to {size(self.shm_bytes)} at once, {size(self.shm_free)} free"),
                ("time", f"{duration(self.hours)} at {self.tokens_per_s:,.0f} tokens/s" if known else
                 f"{duration(self.at(1e3).hours)} at 1,000 tokens/s, {duration(self.at(1e4).hours)} at 10,000 (02_extract measures the rate)"),
                ("verdict", "fits" if self.fits else "DOES NOT FIT. " + " ".join(self.problems()))]


def size(n: float) -> str:
    for unit, power in (("TB", 1e12), ("GB", 1e9)):
        if n >= power / 10:
            return f"{n / power:,.2f} {unit}"
    return f"{n / 1e6:,.1f} MB"


def duration(hours: float) -> str:
    return f"{hours:,.1f} hours" if hours >= 1 else f"{hours * 60:,.1f} minutes"


def forecast(manifest: dict[str, Any], *, samples: int, tokens: int, shard_mb: int, tokens_in_flight: int, store: Path,
             shm: Path) -> Forecast:
    """From counts alone. manifest: sizes and dtypes (see manifest.make_manifest). store, shm: folders, which need not exist yet."""
    if shard_mb < 1:
        raise ParamError(f"shard_mb is {shard_mb}; it must be at least 1.")
    stored = layout(manifest)
    captured = as_captured(manifest)
    each = shard_mb * 2**20 + tokens * stored.row_bytes // max(1, 2 * samples)  # a shard is full with the sample that reaches its size
    files = max(1, -(-tokens * stored.row_bytes // each))
    whole = tokens * stored.row_bytes + samples * shards.RECORD.itemsize + files * shards.HEADER_BYTES + OTHER_FILES
    return Forecast(samples=samples, tokens=tokens, bytes=whole, files=files + 3, bytes_per_token=stored.row_bytes,
                    states_bytes=tokens * captured.hidden_bytes, store_dtype=manifest["store_dtype"],
                    shm_bytes=min(tokens, tokens_in_flight) * captured.hidden_bytes,
                    disk_free=shutil.disk_usage(existing(store)).free + written(store), shm_free=shutil.disk_usage(existing(shm)).free)


def written(store: Path) -> int:
    """Bytes of the dump that are there already: an extraction that goes on needs no room for them."""
    return sum(f.stat().st_blocks * 512 for f in store.iterdir() if f.is_file()) if store.is_dir() else 0


def existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


# without a target on disk ------------------------------------------------------------------------------------------


def from_params(values: dict[str, Any], *, samples: int, tokens: int, tokens_per_s: float, store: Path, shm: Path) -> Forecast:
    """The forecast for a params file. Sizes from target_layers and target_hidden, else from the target's config."""
    if samples < 1 or tokens < samples:
        raise ParamError(f"plan: {samples:,} sequences of {tokens:,} tokens in all; every sequence has at least one token.")
    for name, least in (("target_layers", 0), ("target_hidden", 0), ("shard_mb", 1), ("tokens_in_flight", 1)):
        if values[name] < least:
            raise ParamError(f"plan: {name} is {values[name]}; it must be at least {least}.")
    if not 0 <= tokens_per_s < math.inf:
        raise ParamError(f"plan: a rate of {tokens_per_s} tokens/s; a positive number is wanted, or 0 when it is not known.")
    depth, hidden = values["target_layers"], values["target_hidden"]
    if not (depth and hidden):
        depth, hidden = _sizes_on_disk(values["target"])
    manifest = sizes(depth, hidden, values["engine_dtype"], values["store_dtype"])
    return forecast(manifest, samples=samples, tokens=tokens, shard_mb=values["shard_mb"], tokens_in_flight=values["tokens_in_flight"],
                    store=store, shm=shm).at(tokens_per_s)


def sizes(num_layers: int, hidden_size: int, dtype: str, store_dtype: str) -> dict[str, Any]:
    """A manifest that knows sizes only."""
    from eagle3lib import targets  # imports torch

    return make_manifest({}, targets.capture_layers(num_layers), hidden_size, dtype, store_dtype)


def _sizes_on_disk(target: str) -> tuple[int, int]:
    from eagle3lib import places, targets

    folder = places.located(target)
    if target != targets.SMOLLM2 and not (folder / "config.json").is_file():
        raise ParamError(f"plan: target {target!r} is not on this disk. Put target_layers and target_hidden into the params file; the forecast "
                         "needs nothing else of it.")
    config = json.loads((targets.resolve(target) / "config.json").read_text())
    config = config.get("text_config", config)
    return config["num_hidden_layers"], config["hidden_size"]
