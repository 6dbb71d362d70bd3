"""Training: batches of the store, the EAGLE-3 objective, AdamW, metrics a step, acceptance on held-out rows, exact resumption.

    <run>/metrics.jsonl      one line a step; at each measurement one with the held-out acceptance
    <run>/training/          states to go on from (see checkpoint)
    <run>/checkpoint/        the draft with the best simulated acceptance on the held-out rows

Nothing is drawn at random but the order of the samples, and that from seed and epoch alone, so a run that was killed
and started again goes through the same batches and ends in the same weights.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from eagle3lib import checkpoint, heldout, initial, memory, parallel, step, targets
from eagle3lib.acceptance import Acceptance
from eagle3lib.batches import Batch, Reader, plan
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.feed import Fed, Feed
from eagle3lib.parallel import Group
from eagle3lib.precision import fast_products
from eagle3lib.progress import tqdm
from eagle3lib.recipe import Recipe, schedule
from eagle3lib.steplog import Board, MetricsLog, Record, Window
from eagle3lib.store import Store, compare

MIN_COVERAGE = 0.9  # share of supervised tokens that the draft can say at all
OnRecord = Callable[[Record], None]


@dataclass(frozen=True)
class Result:
    steps: int  # optimizer steps of the whole run
    tokens: int  # tokens gone through, each position counted once an epoch
    tokens_per_s: float  # of this call: without held-out evaluation and checkpoints
    loss_first: float
    loss_last: float  # means over the first and last twentieth of the steps
    heldout: Acceptance | None  # simulated, of the best measurement; None without held-out rows
    best_epoch: int
    draft: Path  # folder of the best draft
    wait_share: float = 0.0  # of the time of this call's steps: the device stood still for want of data, at most
    buckets: dict[str, Any] | None = None  # the best measurement by length of context and of reply (see heldout)


def train(
    run: Path,
    store: Store,
    target: Path,
    d2t: Tensor,
    t2d: Tensor,
    recipe: Recipe,
    *,
    heldout: set[str] = frozenset(),  # type: ignore[assignment]
    on_record: OnRecord | None = None,
    device: str = "cpu",
    shape: Mapping[str, Any] | None = None,
    start_from: Path | None = None,
    tensorboard: bool = False,
    on_start: Callable[[Group, int, int], None] | None = None,
) -> Result:
    """Train a draft for the model folder `target` on all samples of `store` but those whose id is in `heldout`.

    d2t, t2d: the draft vocabulary (see vocab). `shape`: sizes and options of DraftConfig that are not the target's own. `start_from`:
    a draft folder to go on from, whose vocabulary and sizes these must be. `on_record` gets every line of metrics.jsonl,
    those of an earlier part of the run first; `on_start` the processes, the steps done and all steps. Goes on from the last whole
    state of the same run. Under torchrun every process
    calls this, and one of them writes. Raises Eagle3Error without a passing verdict for exactly these bytes, for a store of
    another target, without supervised rows, when it cannot fit into memory, and for a loss or gradient that is not finite.
    """
    from eagle3lib.verify import require_verdict

    require_verdict(run, store)
    initial.require_target(store, target)
    group, device = parallel.join(device)
    try:
        with fast_products():
            job = Job(run, store, target, d2t, t2d, recipe, heldout, device, group, shape or {}, start_from, tensorboard)
            return job.run(on_record or (lambda record: None), on_start or (lambda group, step, total: None))
    finally:
        parallel.leave()


class Job:
    """One training run: what stays fixed, and the state that moves."""

    def __init__(
        self, run: Path, store: Store, target: Path, d2t: Tensor, t2d: Tensor, recipe: Recipe, heldout: set[str], device: str,
        group: Group, shape: Mapping[str, Any], start_from: Path | None, tensorboard: bool,
    ) -> None:
        self.folder, self.recipe, self.device, self.group = run, recipe, device, group
        self.lengths, ids = store.lengths, store.ids
        self.heldout = [i for i, sample in enumerate(ids) if sample in heldout]
        self.samples = np.setdiff1d(np.arange(len(store)), self.heldout)
        if not len(self.samples):
            raise Eagle3Error(f"store {store.path}: no sample to train on ({len(store)} in it, {len(self.heldout)} held out).")
        draft, whence = initial.start(store, target, d2t, t2d, recipe.seed, shape, start_from, self.samples)
        head = targets.head_weights(target)[0]
        head = head if device != "cpu" and head.dtype == torch.bfloat16 else head.float()
        self.forecast = memory.of(draft.cfg, recipe.ttt_steps, self._most_tokens(), len(head), device)
        self.forecast.require(device, say=group.main)
        checkpoint.require_room(run / "training", draft)
        self.reader = Reader(store, head, device)
        self.draft = draft.to(device)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.draft.parameters() if p.requires_grad], lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True,
            capturable=device != "cpu",
        )
        tokens = max(1, recipe.batch_tokens // group.size)
        self.stepper = step.make(self.draft, head[draft.target_ids.cpu()].to(device), self.optimizer, recipe, group, tokens)
        self.plans = [plan(self.lengths, self.samples, recipe.batch_tokens, recipe.seed, e) for e in range(recipe.epochs)]
        self.ends = list(accumulate(map(len, self.plans)))  # the step that ends each epoch
        self.total = self.ends[-1]
        self.about = {"target": str(target), "store": store.digest(), "recipe": asdict(recipe), "draft": self.draft.cfg.to_dict(), **whence}
        self.about["draft_vocab"] = xxhash.xxh3_128_hexdigest(d2t.numpy().tobytes())
        order = [ids[i] for i in self.samples] + ["held out"] + [ids[i] for i in self.heldout]  # the digest does not know the order
        self.about["samples"] = xxhash.xxh3_128_hexdigest("|".join(order).encode())
        self.log, self._tensorboard = MetricsLog(run / "metrics.jsonl"), tensorboard
        self.board: Board | None = None
        self.window = Window(group, device, recipe.ttt_steps)
        self.step, self.best, self.supervised = 0, dict[str, Any](acceptance_length=0.0, epoch=-1), 0
        self.seen: dict[int, list[int]] = {}  # samples of the steps whose numbers are not fetched yet

    def _most_tokens(self) -> int:
        """Tokens of the largest batch that one process can get."""
        return max(self.recipe.batch_tokens // self.group.size, int(self.lengths.max()))

    # Driving -----------------------------------------------------------------------------------------------------------

    def run(self, on_record: OnRecord, on_start: Callable[[Group, int, int], None]) -> Result:
        self._resume()
        for record in self.log.cut(self.step) if self.group.main else []:
            on_record(record)
        on_start(self.group, self.step, self.total)
        todo = [(epoch, samples) for epoch, batches in enumerate(self.plans) for samples in batches][self.step :]
        mine = [self.group.deal(samples, self.lengths) for _, samples in todo]
        self.board = Board(self.folder / "tensorboard", self.step) if self._tensorboard and self.group.main else None
        clock = {"tokens": 0.0, "seconds": 0.0, "waited": 0.0}
        bar = tqdm(total=self.total, initial=self.step, desc="train", unit="step", mininterval=1, disable=parallel.started_by_torchrun())
        with interruptible() as interrupted, bar, Feed(self.reader, mine, self.stepper.send, self.draft.t2d, self.recipe.ttt_steps) as feed:
            def tell(record: Record) -> None:
                self._require_finite(record)
                clock["tokens"], clock["seconds"] = clock["tokens"] + record["tokens"], clock["seconds"] + record["seconds"]
                clock["waited"] += record["wait_share"] * record["seconds"]
                self._write(record, on_record)
                bar.update()
                bar.set_postfix_str(f"loss {record['loss'] or 0:.2f}, {record['tokens_per_s']:.0f} tok/s", refresh=False)

            for (epoch, samples), fed in zip(todo, feed, strict=True):
                stop = self._take(epoch, samples, fed, interrupted())
                ended = self.step == self.ends[epoch]
                if self.window.full or ended or stop or self._due():
                    self.window.fetch(tell)
                self._maybe_save(epoch, ended, stop, on_record)
        if self.board:
            self.board.close()
        return self._result(clock["tokens"], clock["seconds"], clock["waited"])

    def _write(self, record: Record, on_record: OnRecord) -> None:
        if self.group.main:
            on_record(self.log.add(record))
            if self.board:
                self.board.add(record)

    def _due(self) -> bool:
        every = self.recipe.eval_steps
        return self.step % self.recipe.save_steps == 0 or bool(every) and self.step % every == 0

    def _maybe_save(self, epoch: int, ended: bool, stop: bool, on_record: OnRecord) -> None:
        """At an epoch's end, and when due, measure acceptance and keep the best draft; write a state when one is due."""
        if ended and not self.supervised:
            raise Eagle3Error(
                "no supervised row in a whole epoch: every reply is shorter than two tokens or outside the draft vocabulary. "
                "Look at the loss masks that 01_prepare shows, and raise draft_vocab."
            )
        every = self.recipe.eval_steps
        if ended or (every and self.step % every == 0):  # asked to stop or not: nobody comes back to this step
            self._write(self._measure(epoch), on_record)
        if ended or stop or self.step % self.recipe.save_steps == 0:
            if self.group.main:
                state = {"step": self.step, "best": self.best, "supervised": self.supervised, "about": self.about}
                checkpoint.save_state(self.folder / "training", self.draft, self.optimizer, state)
            self.group.wait()
        if stop:
            raise KeyboardInterrupt
        if ended or self._due():
            self.window.restart()

    def _resume(self) -> None:
        """Go on from the last whole state of this run; every process reads the same one."""
        found = checkpoint.last_state(self.folder / "training", say=self.group.main)
        if found is None:
            return
        path, state = found
        if differences := compare(state["about"], json.loads(json.dumps(self.about))):
            self.group.wait()  # until all have looked
            if self.group.main:
                print(f"{path} is of a run with other settings; starting afresh\n" + "\n".join(f"  {line}" for line in differences), flush=True)
                checkpoint.discard_states(self.folder / "training")
            return
        checkpoint.load_state(path, self.draft, self.optimizer)
        self.step, self.best, self.supervised = state["step"], state["best"], state["supervised"]
        if self.group.main:
            print(f"going on from step {self.step} of {self.total} ({path})", flush=True)

    # One step ----------------------------------------------------------------------------------------------------------

    def _take(self, epoch: int, samples: list[int], fed: Fed, interrupted: bool) -> bool:
        """An optimizer step on the global batch; True when any process was asked to stop."""
        *rows, supervised, stops = self.group.sum(torch.tensor([*fed.rows.tolist(), fed.positions, int(interrupted)])).tolist()
        lr = self.recipe.lr * schedule(self.step, self.total, self.recipe.warmup_share, self.recipe.schedule)
        # Without a row in any process nothing happens, in none of them.
        outcome, norm = self.stepper.take(fed.sent, torch.tensor(rows), lr) if any(rows) else (None, None)
        self.step += 1
        self.supervised += supervised if any(rows) else 0
        self.seen[self.step] = samples
        record = {"step": self.step, "epoch": epoch, "lr": lr, "tokens": int(self.lengths[samples].sum()), "supervised": supervised,
                  "waited": fed.waited, "rows": rows, "left": self.total - self.step}
        self.window.add(record, outcome, norm)
        return bool(stops)

    def _require_finite(self, record: Record) -> None:
        samples = self.seen.pop(record["step"])
        if any(record[name] is not None and not math.isfinite(record[name]) for name in ("loss", "grad_norm")):
            raise _not_finite([self.reader.batch([i]) for i in samples], record)

    # Acceptance --------------------------------------------------------------------------------------------------------

    def _measure(self, epoch: int) -> Record:
        self.stepper.settle()
        parts = plan(self.lengths, np.array(self.heldout, dtype=np.int64), self.recipe.batch_tokens, 0, 0)
        found = heldout.measure(self.draft, self.reader, parts, self.recipe.ttt_steps, self.device, self.group)
        figure = found.total if found else None
        record: Record = {"step": self.step, "epoch": epoch, "heldout": None, "buckets": None, "acceptance_length": None}
        if found and figure:
            record |= {"heldout": figure.record, "buckets": found.buckets, "acceptance_length": figure.length}
        if figure is None or figure.length > self.best["acceptance_length"]:
            kept = {name: record[name] for name in ("heldout", "buckets")}
            self.best = {"epoch": epoch, "acceptance_length": figure.length if figure else 0.0, **kept}
            if self.group.main:
                checkpoint.save(self.folder / "checkpoint", self.draft, {**self.about, "step": self.step, **self.best})
        return record

    def _result(self, tokens: float, seconds: float, waited: float) -> Result:
        self.group.wait()
        losses = [r["loss"] for r in self.log.read() if r.get("loss") is not None]
        ends = max(1, len(losses) // 20)
        figure = Acceptance(**self.best["heldout"]) if self.best.get("heldout") else None
        return Result(
            self.total, int(self.lengths[self.samples].sum()) * self.recipe.epochs, tokens / seconds if seconds else 0.0,
            float(np.mean(losses[:ends])), float(np.mean(losses[-ends:])), figure, self.best["epoch"], self.folder / "checkpoint",
            waited / seconds if seconds else 0.0, self.best.get("buckets"),
        )  # fmt: skip


# Stopping ---------------------------------------------------------------------------------------------------------------


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within it SIGINT and SIGTERM only raise a flag (the value of the yielded function), to be acted on between steps."""
    seen: list[int] = []
    before = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, lambda got, _: seen.append(got))
    except ValueError:  # not the main thread: signals go elsewhere
        pass
    try:
        yield lambda: bool(seen)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _not_finite(documents: list[Batch], record: Record) -> Eagle3Error:
    """Name the samples whose states are not finite; if all are, every sample of the batch. `documents`: one a sample."""
    kept = [one for one in documents if len(one)]
    bad = [one.ids[0] for one in kept if not (one.aux.isfinite().all() and one.last.isfinite().all())]
    ids = bad or [one.ids[0] for one in kept]
    why = "their hidden states are not finite; extract them again" if bad else "their states are finite; lower lr or grad_clip"
    found = f"loss {record['loss']}, gradient norm {record['grad_norm']}"
    return Eagle3Error(f"training step {record['step']}: {found}. Samples: {', '.join(ids[:8])}: {why}.")


# What the notebook shows --------------------------------------------------------------------------------------------


def device(name: str) -> str:
    """ "auto" becomes "cuda" where torch sees a GPU, else "cpu". Eagle3Error when "cuda" is asked for and there is none."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and found == "cpu":
        raise Eagle3Error('train_device is "cuda", but torch sees no GPU here. Set it to "auto" or "cpu".')
    return found if name == "auto" else name


def check(checks: Checks, result: Result, coverage: float) -> None:
    """Add the stage's checks: the loss fell, the draft is of some use on held-out rows, the vocabulary covers the text."""
    checks.add(
        "loss fell", result.loss_last < result.loss_first, result.loss_last, f"below {result.loss_first:.4g}",
        "a learning rate or a target that is off", "Lower lr; if that does not help, look at 03_verify's figures.",
    )  # fmt: skip
    if result.heldout:
        checks.add(
            "held-out acceptance above 1", result.heldout.length > 1.0, result.heldout.length, "above 1.0",
            "a draft that learned its rows by heart, or labels shifted by one",
            "Train on more rows; see whether the hit rate on training rows rose.",
        )  # fmt: skip
    checks.add(
        "draft vocabulary coverage", coverage >= MIN_COVERAGE, coverage, MIN_COVERAGE,
        "a vocabulary that makes every tenth token a miss", "Raise draft_vocab.",
    )  # fmt: skip


def metrics(result: Result) -> dict[str, Any]:
    """The numbers for `stage.finish`."""
    found = {"steps": result.steps, "tokens": result.tokens, "tokens_per_s": result.tokens_per_s, "loss_first": result.loss_first,
             "loss_last": result.loss_last, "best_epoch": result.best_epoch, "wait_share": result.wait_share}
    return found | ({"acceptance_length_heldout": result.heldout.length} if result.heldout else {})
