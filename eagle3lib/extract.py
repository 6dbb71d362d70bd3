"""Extraction: prepared rows through one or several running SGLang with our capture, into the store.

    rows -> batches -> one HTTP request each -> one dump a row in shared memory -> checked -> appended to a shard

Each engine is served by a few threads that take batches from the common work (see work); a thread reads, checks and
stores what its request brought before it takes more, so what lies in shared memory is bounded, and while one waits the
others keep the engine busy. A row counts only when its bytes are in the store's index, so stopping at any moment and
starting again goes on where it was.
"""

from __future__ import annotations

import itertools
import shutil
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from eagle3lib import capture, preflight, quarantine, targets
from eagle3lib import plan as planning
from eagle3lib.arrivals import Norms
from eagle3lib.checks import Checks
from eagle3lib.client import STALL_S
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.inbox import REFUSED, Inbox
from eagle3lib.manifest import as_captured, make_manifest
from eagle3lib.plan import Forecast
from eagle3lib.progress import tqdm
from eagle3lib.store import Store, Writer
from eagle3lib.work import Task, Work

ATTEMPTS = 3  # times a row is asked for before it goes into quarantine
REFUSALS = 3  # rows that the engine may refuse before anything is stored, although others come after them
REQUESTS = 4  # HTTP requests under way for each engine; together they hold tokens_in_flight
LOOK_S = 0.5  # between two looks at the engines
ABORT_S = 10.0  # for requests under way to end when the run stops; then their server is ended
GROUP_BYTES = 2**25  # of hidden states that a thread checks at once: larger ones leave the processor's cache
TOP_LOGPROBS = 5
WARM_UP_S, WARM_UP_TOKENS = 1.0, 65536


def plan(rows: Any, target: Path, store: Path, *, dtype: str, shard_mb: int, tokens_in_flight: int = 32768, store_dtype: str = "") -> Forecast:
    """The forecast for these prepared rows. The store's folder need not exist yet."""
    lengths = np.asarray(rows["n_tokens"], np.int64)
    return planning.forecast(_manifest(target, dtype, store_dtype, {}), samples=len(lengths), tokens=int(lengths.sum()), shard_mb=shard_mb,
                             tokens_in_flight=tokens_in_flight, store=store, shm=preflight.dump_base())


def _manifest(target: Path, dtype: str, store_dtype: str, fingerprint: dict[str, Any]) -> dict[str, Any]:
    config = targets.text_config(target)
    return make_manifest(fingerprint, targets.capture_layers(config.num_hidden_layers), config.hidden_size, dtype, store_dtype)


def require_sizes(target: Path, layers: int, hidden: int) -> None:
    """Sizes given for the forecast must be the target's own; 0: not given."""
    config = targets.text_config(target)
    for name, given, found in (("target_layers", layers, config.num_hidden_layers), ("target_hidden", hidden, config.hidden_size)):
        if given and given != found:
            raise ParamError(f"{name}: {given} was given, target {target} has {found}. Correct the params file, or leave it out.")


@dataclass
class Extraction:
    """What happened: counts, and the course of the run for figures."""

    samples: int = 0
    tokens: int = 0
    retried: int = 0
    quarantined: list[dict[str, Any]] = field(default_factory=list)  # sample_id, tokens, reasons
    lost_engines: list[str] = field(default_factory=list)  # why
    seconds: float = 0.0
    course: list[tuple[float, int, float]] = field(default_factory=list)  # (seconds since start, tokens stored, shared memory in use 0..1)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)


def extract(engines: Any, rows: Any, path: Path, target: Path, *, shard_mb: int, tokens_in_flight: int, store_dtype: str = "",
            quarantine_share: float = quarantine.SHARE) -> Extraction:
    """Dump every row that is not in the store yet. engines: one or several; rows: a Dataset, or a list of dictionaries, with
    sample_id, input_ids, loss_mask.

    A row whose dump does not check out is asked for again, alone; after ATTEMPTS failures it goes into the store's
    quarantine with its reasons, and above `quarantine_share` of all rows the stage stops. What was stored stays.
    """
    engines = list(engines) if isinstance(engines, Sequence) else [engines]
    manifest = _manifest(target, engines[0].settings.dtype, store_dtype, engines[0].fingerprint)
    _require_alike(engines)
    with Store.create(path, manifest, shard_mb * 2**20) as writer:
        return _Run(engines, rows, writer, tokens_in_flight, quarantine_share).go()


def _require_alike(engines: Sequence[Any]) -> None:
    from eagle3lib.manifest import compare

    for other in engines[1:]:
        if differences := compare(engines[0].fingerprint, other.fingerprint):
            raise Eagle3Error("extraction: two engines would not compute the same states; hidden states are never mixed.\n"
                              + "\n".join(f"  {line}" for line in differences))


class _Run:
    """One extraction under way."""

    def __init__(self, engines: Sequence[Any], rows: Any, writer: Writer, tokens_in_flight: int, quarantine_share: float):
        self.engines, self.rows, self.writer = engines, rows, writer
        self.result, self.norms = Extraction(), Norms([*(f"r_{k}" for k in writer.manifest["layers"]), "last"])
        todo = np.array([i for i, name in enumerate(_column(rows, "sample_id")) if name not in writer], np.int64)
        lengths = _lengths(rows)[todo]
        self.work = Work(todo, lengths, max(1, tokens_in_flight // REQUESTS), REQUESTS * len(engines))
        self.tokens, self.most_bad = int(lengths.sum()), int(quarantine_share * len(rows))
        self.bytes_per_token, self.capture_bytes = writer.layout.row_bytes, as_captured(writer.manifest).hidden_bytes
        self.guard = threading.Lock()
        self.progress, self.moved, self.restarting = 0, time.monotonic(), set[Any]()
        quarantine.clear(writer.path)
        print(f"extract: {len(todo):,} rows to do, {len(writer):,} are in the store already")

    def go(self) -> Extraction:
        began = time.monotonic()
        bar = tqdm(total=self.tokens, desc="extract", unit="tok", unit_scale=True, mininterval=1, smoothing=0.05)
        served: list[Future[None]] = []
        with ThreadPoolExecutor(len(self.engines), thread_name_prefix="engine") as pool:
            try:
                served += [pool.submit(self._serve, engine) for engine in self.engines]
                while not all(future.done() for future in served):
                    self._look(began, bar)
                    self._require_progress()
                    time.sleep(0.05 if time.monotonic() - began < 2 else LOOK_S)
                for future in served:
                    future.result()
                self.writer.flush()
            except BaseException:
                self._stop()
                self._end_stuck(served)
                raise
            finally:
                self._look(began, bar)
                bar.close()
        self.result.seconds = time.monotonic() - began
        if self.work.remaining:
            raise Eagle3Error(f"extraction: no engine is left. {'; '.join(self.result.lost_engines)} What was stored stays; run 02_extract again.")
        self._require_few_bad()
        return self.result

    def _look(self, began: float, bar: Any) -> None:
        """Note where we are, for the bar and the figures; one thing bad ends the whole."""
        disk = shutil.disk_usage(planning.existing(Path(self.engines[0].dump_dir)))
        level, seconds = disk.used / disk.total, time.monotonic() - began
        if not self.result.course or seconds - self.result.course[-1][0] >= 1 or not self.work.remaining:
            self.result.course.append((seconds, self.result.tokens, level))
        bar.set_postfix_str(f"{self.result.samples:,} samples, {self.result.tokens * self.bytes_per_token / 1e9:.2f} GB, "
                            f"shared memory {level:.0%}", refresh=False)
        bar.update(self.result.tokens - bar.n)

    def _require_progress(self) -> None:
        now = self.result.samples + len(self.result.quarantined)
        if now != self.progress or self.restarting:
            self.progress, self.moved = now, time.monotonic()
        elif time.monotonic() - self.moved > STALL_S:
            raise Eagle3Error(f"extraction: no row came for {STALL_S:.0f} s; the server is alive but stuck. What was stored stays; see engine.log, "
                              "and run 02_extract again, with lower tokens_in_flight if memory was short.")

    def _end_stuck(self, served: list[Future[None]]) -> None:
        """A server that heeds no abort would let its threads wait for as long as a request may take: if it is ours, it is ended."""
        stuck = wait(served, timeout=ABORT_S).not_done
        for future, engine in zip(served, self.engines, strict=False):
            if future in stuck and hasattr(engine, "stop"):
                engine.stop()

    def _stop(self) -> None:
        self.work.stop()
        for engine in self.engines:
            engine.client.abort_all()

    def _serve(self, engine: Any) -> None:
        """Keep one engine busy until nothing is left. When it dies it is started again, as often as it may; then the others go on."""
        while True:
            with ThreadPoolExecutor(REQUESTS, thread_name_prefix="dump") as pool:
                ends = [future.result() for future in [pool.submit(self._take_batches, engine) for _ in range(REQUESTS)]]
            death = next(filter(None, ends), None)
            if death is None or self.work.stopped:
                return
            try:
                self.restarting.add(engine)
                if not hasattr(engine, "restart"):
                    raise death
                engine.restart(str(death))
            except Eagle3Error as error:
                self.result.lost_engines.append(str(error))
                return
            finally:
                self.restarting.discard(engine)

    def _take_batches(self, engine: Any) -> Eagle3Error | None:
        """Batch after batch; returns why the engine is dead, or None when all is done. Any other trouble stops the run."""
        torch.set_num_threads(1)  # of this thread: the batches are the parallelism
        inbox = Inbox(self.writer.manifest, self.norms)
        try:
            while batch := self.work.take():
                try:
                    self._do(engine, batch, inbox)
                except _Dead as death:
                    self.work.give_back(batch)
                    return death.why
            return None
        except BaseException:
            self._stop()
            raise

    def _do(self, engine: Any, batch: list[Task], inbox: Inbox) -> None:
        """Ask for a batch, store what checks out, hand the rest back to the work or into quarantine."""
        rows = self._read([task.row for task in batch])
        rids = [engine.rid(f"{row['sample_id']}-{len(task.reasons)}") for task, row in zip(batch, rows, strict=True)]
        dump_dir, failed = engine.dump_dir, []
        try:
            replies = self._ask(engine, [row["input_ids"] for row in rows], rids)
            for group in self._groups(batch):
                bad = dict.fromkeys(range(len(group)), replies) if isinstance(replies, str) else \
                    inbox.receive(engine, [replies[n] for n in group], [rows[n] for n in group], self._store)
                failed += [(batch[group[n]], rows[group[n]], why) for n, why in bad.items()]
            if failed:
                self._require_alive(engine)
        finally:
            if Path(dump_dir).is_dir():
                capture.delete_dumps(dump_dir, rids)
        again = []
        for task, row, why in failed:
            task.reasons.append(why)
            if not self._given_up(task, row):
                again.append(task)
        self.work.done(again)

    def _groups(self, batch: list[Task]) -> Iterator[list[int]]:
        """Numbers of the batch's rows in groups of at most GROUP_BYTES, at least one row each: what a thread holds at once."""
        ends = np.cumsum([task.tokens for task in batch]) * self.capture_bytes // GROUP_BYTES
        for _, group in itertools.groupby(range(len(batch)), key=lambda n: int(ends[n])):
            yield list(group)

    def _ask(self, engine: Any, prompts: list[list[int]], rids: list[str]) -> Any:
        """The replies, or as text why there are none."""
        try:
            return engine.client.prefill(prompts, rids)
        except Eagle3Error as error:
            self._require_alive(engine)
            return str(error)

    def _require_alive(self, engine: Any) -> None:
        try:
            engine.require_alive()
        except Eagle3Error as death:
            raise _Dead(death) from None

    def _store(self, row: dict[str, Any], parts: dict[str, Any]) -> None:
        if row["sample_id"] in self.writer:  # its batch came back after the engine had died in the middle of it
            return
        self.writer.append_parts(row["sample_id"], len(row["input_ids"]), parts)
        with self.guard:
            self.result.samples += 1
            self.result.tokens += len(row["input_ids"])

    def _given_up(self, task: Task, row: dict[str, Any]) -> bool:
        """True when the row has failed too often: it is then in quarantine. Too many of them stop the stage."""
        with self.guard:
            if len(task.reasons) < ATTEMPTS:
                self.result.retried += 1
                return False
            entry = {"sample_id": row["sample_id"], "tokens": task.tokens, "reasons": task.reasons}
            self.result.quarantined.append(entry)
            quarantine.add(self.writer.path, entry)
            count = len(self.result.quarantined)
        # A row that is too long says nothing about the engine, and the longest come first: go() judges it when the others are done.
        if not (task.reasons[-1].startswith(REFUSED) and not len(self.writer) and count <= max(self.most_bad, REFUSALS)):
            self._require_few_bad()
        return True

    def _require_few_bad(self) -> None:
        count, limit = len(self.result.quarantined), self.most_bad if len(self.writer) else 0  # nothing good in the store: one is enough
        if count > limit:
            last = self.result.quarantined[-1]
            raise Eagle3Error(f"extraction: {count} of {len(self.rows):,} rows failed {ATTEMPTS} times, and {limit} is the limit "
                              f"(quarantine_share); the last is {last['sample_id']}: {last['reasons'][-1]} Nothing wrong was stored; "
                              "see engine.log, mend the cause, and run 02_extract again.")

    def _read(self, numbers: list[int]) -> list[dict[str, Any]]:
        if not hasattr(self.rows, "column_names"):
            return [self.rows[i] for i in numbers]
        with self.guard:
            columns = self.rows[numbers]
        return [{name: columns[name][n] for name in ("sample_id", "input_ids", "loss_mask")} for n in range(len(numbers))]


class _Dead(Exception):
    """The engine that was asked is dead."""

    def __init__(self, why: Eagle3Error):
        super().__init__(str(why))
        self.why = why


def _column(rows: Any, name: str) -> Any:
    return rows[name] if hasattr(rows, "column_names") else [row[name] for row in rows]


def _lengths(rows: Any) -> np.ndarray:
    lengths = rows["n_tokens"] if hasattr(rows, "column_names") else [len(row["input_ids"]) for row in rows]
    return np.asarray(lengths, np.int64)


def warm_up(engines: Any, rows: Any) -> float:
    """The prefill rate of all engines together in tokens a second, from a second or two of these rows; their dumps are not taken.

    The amount doubles until it takes WARM_UP_S, since a GPU is not busy with a handful. Engines are asked at the same time."""
    engines = list(engines) if isinstance(engines, Sequence) else [engines]
    with ThreadPoolExecutor(len(engines)) as pool:
        return sum(pool.map(lambda engine: _warm(engine, rows), engines))


def _warm(engine: Any, rows: Any) -> float:
    lengths, tokens = _lengths(rows), 512
    order = np.argsort(np.abs(lengths - np.median(lengths)), kind="stable")
    while True:
        count = max(1, int(np.searchsorted(np.cumsum(lengths[order]), tokens)))
        prompts = [rows[int(i)]["input_ids"] for i in order[:count]]
        began = time.monotonic()
        engine.client.prefill(prompts, [f"eagle3-warm-{tokens}-{n}" for n in range(len(prompts))])
        seconds = time.monotonic() - began
        if seconds >= WARM_UP_S or tokens >= WARM_UP_TOKENS or count == len(lengths):
            return sum(map(len, prompts)) / seconds
        tokens *= 2


def record(engine: Any, forecast: Forecast, result: Extraction) -> dict[str, Any]:
    """What 03_verify and a later reader want to know of the server that wrote the dump, as plain data."""
    kept = ("version", "model_path", "served_model_name", "dtype", "quantization", "attention_backend", "chunked_prefill_size", "tp_size",
            "disable_radix_cache", "disable_cuda_graph", "speculative_algorithm")
    return {"nonce": engine.nonce, "handshake": engine.handshake, "server": {k: engine.server_info.get(k) for k in kept},
            "proved": engine.checks.records, "start_seconds": engine.seconds, "fingerprint": engine.fingerprint,
            "forecast": asdict(forecast), "samples": result.samples, "tokens": result.tokens, "seconds": result.seconds,
            "retried": result.retried, "quarantined": len(result.quarantined), "lost_engines": result.lost_engines}


def living(engines: Sequence[Any]) -> Any:
    """The first engine that lives; when none does the first, which may still be one that starts itself again."""
    for engine in engines:
        try:
            engine.require_alive()
        except Eagle3Error:
            continue
        return engine
    return engines[0]


def probe(engine: Any, store: Store, path: Path, count: int) -> None:
    """Ask the engine for its own log-probabilities at every position of `count` rows; 03_verify rebuilds them.

    The longest, the shortest and rows between, so that chunked prefill is among them. Written as safetensors:
    "<sample id>.logprobs" float32 [T, k] and "<sample id>.ids" int32 [T, k] for the engine's k likeliest tokens.
    """
    lengths = store.lengths
    order = np.argsort(lengths, kind="stable")
    chosen = {int(order[round(n * (len(order) - 1) / max(count - 1, 1))]) for n in range(count)}
    tensors: dict[str, torch.Tensor] = {}
    for i in sorted(chosen):
        sample = store.read(i)
        logprobs, ids = engine.logprobs(sample.input_ids.tolist(), TOP_LOGPROBS)
        tensors |= {f"{sample.id}.logprobs": logprobs.float().contiguous(), f"{sample.id}.ids": ids.to(torch.int32).contiguous()}
    temporary = path.with_suffix(".tmp")
    save_file(tensors, temporary)
    temporary.replace(path)


def log_excerpt(log: Path, nonce: str, lines: int = 4) -> str:
    """The capture's own lines of this server, and the last batches that it computed."""
    text = log.read_text(errors="replace").splitlines() if log.exists() else []
    start = next((i for i, line in enumerate(text) if nonce in line), 0)
    ours = [line for line in text[start:] if "HS_DUMP" in line]
    batches = [line for line in text[start:] if "Prefill batch" in line]
    return "\n".join([*ours, "...", *(line[:200] for line in batches[-lines:])])


def check(checks: Checks, rows: Any, store: Store, forecast: Forecast) -> None:
    """The dump is whole by count, and as large as was foretold."""
    bad = len(quarantine.read(store.path))
    checks.add("all rows stored or in quarantine", len(store) + bad == len(rows), len(store) + bad, len(rows),
               "a stage that stops early and says nothing", "Run 02_extract again: it asks only for what is missing.")
    off = abs(store.disk_bytes() / forecast.bytes - 1)
    missing = bad / max(1, len(rows))  # rows in quarantine take no room
    checks.add("size as forecast", off <= 0.01 + missing or abs(store.disk_bytes() - forecast.bytes) < 8192, off, 0.01,
               "padding, doubled shards or a wrong dtype on disk", "Compare the shards with the forecast; look for foreign files in store/.")
