"""Extraction: prepared rows through a running SGLang with our capture, into the store.

    rows -> engine.generate(token ids, one new token) -> one dump a row in shared memory -> checked -> appended to a shard

A row counts only when its bytes are in the store's index, so stopping at any moment and starting again goes on where
it was. Memory is bounded by one shard; shared memory by the requests in flight.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3lib import preflight, targets
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import RECORD, Sample, Store, Writer, bytes_per_token, make_manifest

MARGIN = 1.1  # room demanded beyond the forecast
ATTEMPTS = 3  # times a row is asked for before the stage stops
TOP_LOGPROBS = 5


@dataclass(frozen=True)
class Forecast:
    """What the run will write, computed from token counts before the first request."""

    samples: int
    tokens: int
    bytes: int  # on disk, all files of the store
    bytes_per_token: int
    shm_bytes: int  # at most at once in shared memory
    disk_free: int
    shm_free: int

    def require_room(self) -> None:
        """Raise Eagle3Error when the dump does not fit, with the numbers and what would fit."""
        if self.bytes * MARGIN > self.disk_free:
            fits = int(self.disk_free / MARGIN / self.bytes_per_token)
            raise Eagle3Error(f"disk: the dump will take {_gb(self.bytes)} ({self.tokens:,} tokens of {self.bytes_per_token:,} bytes), "
                              f"{_gb(self.disk_free)} are free. "
                              f"Free some, put the runs on a larger disk (EAGLE3_RUNS), or prepare at most {fits:,} tokens.")
        if self.shm_bytes > self.shm_free:
            raise Eagle3Error(f"shared memory: requests in flight hold up to {_gb(self.shm_bytes)}, {_gb(self.shm_free)} are free there. "
                              "Enlarge /dev/shm (docker: --shm-size), set SGLANG_HS_DUMP_DIR to a larger folder, or lower extract_concurrency.")

    def __repr__(self) -> str:
        return (f"forecast: {self.samples:,} samples, {self.tokens:,} tokens x {self.bytes_per_token:,} bytes = {_gb(self.bytes)} on disk "
                f"({_gb(self.disk_free)} free); up to {_gb(self.shm_bytes)} at once in shared memory ({_gb(self.shm_free)} free)")


def _gb(n: float) -> str:
    return f"{n / 1e9:,.2f} GB" if n >= 1e8 else f"{n / 1e6:,.1f} MB"


def plan(rows: Any, target: Path, store: Path, *, dtype: str, shard_mb: int, concurrency: int) -> Forecast:
    """The forecast for these prepared rows. The store's folder need not exist yet."""
    manifest = _sizes(target, dtype)
    lengths = sorted(rows["n_tokens"], reverse=True)
    tokens, each = sum(lengths), bytes_per_token(manifest)
    shards = max(1, round(tokens * each / (shard_mb * 2**20)))
    return Forecast(samples=len(lengths), tokens=tokens, bytes=tokens * each + len(lengths) * RECORD.itemsize + shards * 330 + 1100,
                    bytes_per_token=each, shm_bytes=sum(lengths[:concurrency]) * each,
                    disk_free=shutil.disk_usage(_existing(store)).free, shm_free=shutil.disk_usage(_existing(preflight.dump_base())).free)


def _sizes(target: Path, dtype: str, fingerprint: dict[str, Any] | None = None) -> dict[str, Any]:
    config = targets.text_config(target)
    return make_manifest(fingerprint or {}, targets.capture_layers(config.num_hidden_layers), config.hidden_size, dtype)


def _existing(path: Path) -> Path:
    return next(p for p in (path, *path.parents) if p.exists())


@dataclass
class Extraction:
    """What happened: counts, and the course of the run for a figure."""

    samples: int = 0
    tokens: int = 0
    retried: int = 0
    seconds: float = 0.0
    course: list[tuple[float, int]] = field(default_factory=list)  # (seconds since start, tokens stored)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def extract(engine: Any, rows: Iterable[dict[str, Any]], path: Path, target: Path, *, shard_mb: int, concurrency: int) -> Extraction:
    """Dump every row that is not in the store yet. Rows: dictionaries with sample_id, input_ids, loss_mask.

    A dump that does not check out is asked for again; a row that fails ATTEMPTS times stops the stage with its reason.
    What was stored until then stays.
    """
    manifest = _sizes(target, engine.settings.dtype, engine.fingerprint)
    result = Extraction()
    with Store.create(path, manifest, shard_mb * 2**20) as writer:
        todo = sorted((r for r in rows if r["sample_id"] not in writer.ids), key=lambda r: -len(r["input_ids"]))
        print(f"extract: {len(todo):,} rows to do, {len(writer.ids):,} are in the store already")
        for attempt in range(ATTEMPTS):
            failures = _one_pass(engine, todo, writer, result, attempt, concurrency)
            todo = [row for row, _ in failures]
            if not todo:
                return result
            result.retried += len(todo)
    row, why = failures[0]
    raise Eagle3Error(f"extraction: {len(failures)} rows failed {ATTEMPTS} times, first {row['sample_id']}: {why} "
                      "Nothing wrong was stored; see engine.log, mend the cause, and run 02_extract again.")


def _one_pass(engine: Any, todo: Sequence[dict[str, Any]], writer: Writer, result: Extraction, attempt: int,
              concurrency: int) -> list[tuple[dict[str, Any], str]]:
    """Send all rows once; store what checks out; return the others with the reason."""
    rids = [engine.rid(f"{row['sample_id']}-{attempt}") for row in todo]
    failures: list[tuple[dict[str, Any], str]] = []
    began = time.monotonic()

    def arrived(i: int, reply: Any) -> None:
        row = todo[i]
        try:
            if reply.finish_reason == "refused":
                raise Eagle3Error(f"the engine refused it ({reply.error}).")
            hidden = engine.read_dump(reply.rid, row["input_ids"])
        except Eagle3Error as error:
            failures.append((row, str(error)))
            return
        finally:
            engine.delete_dump(reply.rid)
        writer.append(Sample(row["sample_id"], torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"], dtype=torch.bool), hidden))
        result.samples += 1
        result.tokens += len(hidden)
        result.course.append((time.monotonic() - began, result.tokens))

    engine.generate([row["input_ids"] for row in todo], rids=rids, max_new_tokens=1, concurrency=concurrency,
                    progress="extract" if attempt == 0 else "extract again", on_result=arrived)
    result.seconds += time.monotonic() - began
    return failures


def record(engine: Any, forecast: Forecast, result: Extraction) -> dict[str, Any]:
    """What 03_verify and a later reader want to know of the server that wrote the dump, as plain data."""
    kept = ("version", "model_path", "served_model_name", "dtype", "quantization", "attention_backend", "chunked_prefill_size", "tp_size",
            "disable_radix_cache", "disable_cuda_graph", "speculative_algorithm")
    return {"nonce": engine.nonce, "handshake": engine.handshake, "server": {k: engine.server_info.get(k) for k in kept},
            "proved": engine.checks.records, "start_seconds": engine.seconds, "fingerprint": engine.fingerprint,
            "forecast": asdict(forecast), "samples": result.samples, "tokens": result.tokens, "seconds": result.seconds, "retried": result.retried}


def probe(engine: Any, store: Store, path: Path, count: int) -> None:
    """Ask the engine for its own log-probabilities at every position of `count` rows; 03_verify rebuilds them.

    The longest, the shortest and rows between, so that chunked prefill is among them. Written as safetensors:
    "<sample id>.logprobs" float32 [T, k] and "<sample id>.ids" int32 [T, k] for the engine's k likeliest tokens.
    """
    order = sorted(range(len(store)), key=lambda i: int(store.lengths[i]))
    chosen = {order[round(n * (len(order) - 1) / max(count - 1, 1))] for n in range(count)}
    tensors: dict[str, torch.Tensor] = {}
    for i in sorted(chosen):
        sample = store.read(i)
        logprobs, ids = engine.logprobs(sample.input_ids.tolist(), TOP_LOGPROBS)
        tensors |= {f"{sample.id}.logprobs": logprobs.float().contiguous(), f"{sample.id}.ids": ids.to(torch.int32).contiguous()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def course(result: Extraction, store: Store) -> tuple[list[float], list[int]]:
    """(seconds, tokens stored) for the throughput figure; a run that had nothing left to do shows one point."""
    points = result.course or [(0.0, store.tokens)]
    return [t for t, _ in points], [n for _, n in points]


def log_excerpt(log: Path, nonce: str, lines: int = 4) -> str:
    """The capture's own lines of this server, and the last batches that it computed."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    start = next((i for i, line in enumerate(text) if nonce in line), 0)
    ours = [line for line in text[start:] if "HS_DUMP" in line]
    batches = [line for line in text[start:] if "Prefill batch" in line]
    return "\n".join([*ours, "...", *(line[:200] for line in batches[-lines:])])


def check(checks: Checks, rows: Any, store: Store, forecast: Forecast) -> None:
    """The dump is whole by count, and as large as was foretold."""
    remedy = "Run 02_extract again: it asks only for what is missing."
    checks.add("all rows stored", len(store) == len(rows), len(store), len(rows), "a stage that stops early and says nothing", remedy)
    off = abs(store.disk_bytes() / forecast.bytes - 1)
    checks.add("size as forecast", off <= 0.01 or abs(store.disk_bytes() - forecast.bytes) < 8192, off, 0.01,
               "padding, doubled shards or a wrong dtype on disk", "Compare the shards with the forecast; look for foreign files in store/.")
