"""Training: batches of the store, the EAGLE-3 objective, AdamW, metrics a step, acceptance an epoch, exact resumption.

    <run>/metrics.jsonl      one line a step; at the end of an epoch one with the held-out acceptance
    <run>/training/          states to go on from (see checkpoint)
    <run>/checkpoint/        the draft with the best simulated acceptance on the held-out rows

Nothing is drawn at random but the order of the samples, and that from seed and epoch alone, so a run that was killed
and started again goes through the same batches and ends in the same weights.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from tqdm import tqdm

from eagle3lib import acceptance, checkpoint, initial, targets
from eagle3lib.acceptance import Acceptance
from eagle3lib.batches import Batch, Reader, plan
from eagle3lib.checks import Checks
from eagle3lib.draft import DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.loss import Outcome, joint_counts, joint_hits, objective, simulate
from eagle3lib.precision import fast_products
from eagle3lib.store import Store, compare

MIN_COVERAGE = 0.9  # share of supervised tokens that the draft can say at all
OnRecord = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Recipe:
    """How to train. Two runs with the same recipe, store and draft vocabulary are the same run."""

    ttt_steps: int = 5
    step_decay: float = 0.8  # loss weight of step k is step_decay ** k
    epochs: int = 3
    lr: float = 1e-3  # peak
    batch_tokens: int = 1024  # tokens of the samples in a batch, supervised or not
    warmup_share: float = 0.05  # of all optimizer steps
    grad_clip: float = 1.0  # norm of all gradients together
    seed: int = 0
    save_steps: int = 200  # optimizer steps between two states; one is written at each end of an epoch as well


@dataclass(frozen=True)
class Result:
    steps: int  # optimizer steps of the whole run
    tokens: int  # tokens gone through, each position counted once an epoch
    tokens_per_s: float  # of this call: without held-out evaluation and checkpoints
    loss_first: float
    loss_last: float  # means over the first and last twentieth of the steps
    heldout: Acceptance | None  # simulated, of the best epoch; None without held-out rows
    best_epoch: int
    draft: Path  # folder of the best draft


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
) -> Result:
    """Train a draft for the model folder `target` on all samples of `store` but those whose id is in `heldout`.

    d2t, t2d: the draft vocabulary (see vocab). `on_record` gets every line of metrics.jsonl as it is written. Goes on
    from the last whole state of the same run. Raises Eagle3Error without a passing verdict for exactly these bytes,
    for a store of another target, without supervised rows, and for a loss or gradient that is not finite.
    """
    from eagle3lib.verify import require_verdict

    require_verdict(run, store)
    with fast_products():
        job = Job(run, store, target, d2t, t2d, recipe, heldout, device)
        return job.run(on_record or (lambda record: None))


class Job:
    """One training run: what stays fixed, and the state that moves."""

    def __init__(
        self, run: Path, store: Store, target: Path, d2t: Tensor, t2d: Tensor, recipe: Recipe, heldout: set[str], device: str
    ) -> None:
        self.folder, self.recipe, self.device = run, recipe, device
        cfg = _config(store, target, t2d, len(d2t))
        self.lengths = store.lengths
        self.heldout = [i for i, sample in enumerate(store.ids) if sample in heldout]
        self.samples = np.setdiff1d(np.arange(len(store)), self.heldout)
        if not len(self.samples):
            raise Eagle3Error(f"store {store.path}: no sample to train on ({len(store)} in it, {len(self.heldout)} held out).")
        head = targets.head_weights(target)[0].float()
        self.reader = Reader(store, head.to(device))
        self.draft = initial.new_draft(cfg, d2t, t2d, target, store, self.samples, recipe.seed).to(device)
        self.head = head[self.draft.target_ids.cpu()].to(device)
        self.optimizer = torch.optim.AdamW(
            [p for p in self.draft.parameters() if p.requires_grad], lr=recipe.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.plans = [plan(self.lengths, self.samples, recipe.batch_tokens, recipe.seed, e) for e in range(recipe.epochs)]
        self.total = sum(map(len, self.plans))
        self.about = {"target": str(target), "store": store.digest(), "recipe": asdict(recipe), "draft": self.draft.cfg.to_dict()}
        self.about["draft_vocab"] = xxhash.xxh3_128_hexdigest(d2t.numpy().tobytes())
        self.log = MetricsLog(run / "metrics.jsonl")
        self.step, self.best, self.supervised = 0, {"acceptance_length": 0.0, "epoch": -1}, 0

    # Driving -----------------------------------------------------------------------------------------------------------

    def run(self, on_record: OnRecord) -> Result:
        self._resume()
        self.log.cut(self.step)
        tokens, seconds = 0, 0.0
        with interruptible() as interrupted, tqdm(total=self.total, initial=self.step, desc="train", unit="step", mininterval=1) as bar:
            for epoch, batches in enumerate(self.plans):
                done = self.step - sum(map(len, self.plans[:epoch]))
                for samples in batches[max(done, 0) :] if done < len(batches) else []:
                    record = self._record(epoch, samples)
                    tokens, seconds = tokens + record["tokens"], seconds + record["seconds"]
                    on_record(self.log.add(record))
                    bar.update()
                    bar.set_postfix_str(f"loss {record['loss'] or 0:.2f}, {record['tokens_per_s']:.0f} tok/s", refresh=False)
                    self._maybe_save(epoch, on_record, interrupted())
        return self._result(tokens, seconds)

    def _maybe_save(self, epoch: int, on_record: OnRecord, stop: bool) -> None:
        """At an epoch's end measure acceptance and keep the best draft; write a state when one is due."""
        ended = self.step == sum(map(len, self.plans[: epoch + 1]))
        if ended:
            if not self.supervised:
                raise Eagle3Error(
                    "no supervised row in a whole epoch: every reply is shorter than two tokens or outside the draft vocabulary. "
                    "Look at the loss masks that 01_prepare shows, and raise draft_vocab."
                )
            on_record(self.log.add(self._end_epoch(epoch)))
        if ended or stop or self.step % self.recipe.save_steps == 0:
            state = {"step": self.step, "best": self.best, "supervised": self.supervised, "about": self.about}
            checkpoint.save_state(self.folder / "training", self.draft, self.optimizer, state)
        if stop:
            raise KeyboardInterrupt

    def _resume(self) -> None:
        found = checkpoint.last_state(self.folder / "training")
        if found is None:
            return
        path, state = found
        if differences := compare(state["about"], json.loads(json.dumps(self.about))):
            print(f"{path} is of a run with other settings; starting afresh\n" + "\n".join(f"  {line}" for line in differences), flush=True)
            checkpoint.discard_states(self.folder / "training")
            return
        checkpoint.load_state(path, self.draft, self.optimizer)
        self.step, self.best, self.supervised = state["step"], state["best"], state["supervised"]
        print(f"going on from step {self.step} of {self.total} ({path})", flush=True)

    # One step ----------------------------------------------------------------------------------------------------------

    def _record(self, epoch: int, samples: list[int]) -> dict[str, Any]:
        """Read a batch, take an optimizer step, and say how it went."""
        start = time.perf_counter()
        batch = self.reader.batch(samples).to(self.device)
        lr = self.recipe.lr * schedule(self.step, self.total, self.recipe.warmup_share)
        outcome, norm = self._update(batch, lr)
        self.step += 1
        self.supervised += int(outcome.known[:, 0].sum()) if outcome.loss is not None else 0
        tokens, seconds = int(self.lengths[samples].sum()), time.perf_counter() - start
        return {
            "step": self.step, "epoch": epoch, "loss": None if outcome.loss is None else float(outcome.loss.detach()),
            "losses": _rounded(outcome.losses), "hits": _rounded(_rate(outcome.hits, outcome.known)),
            "joint": _rounded(_rate(joint_hits(outcome.hits, outcome.known), outcome.known)), "lr": lr, "grad_norm": norm,
            "tokens": tokens, "supervised": len(batch), "seconds": round(seconds, 4), "tokens_per_s": round(tokens / seconds, 1),
        }  # fmt: skip

    def _update(self, batch: Batch, lr: float) -> tuple[Outcome, float | None]:
        outcome = objective(self.draft, batch, self.head, self.recipe.ttt_steps, self.recipe.step_decay)
        if outcome.loss is None:
            return outcome, None
        self.optimizer.zero_grad(set_to_none=True)
        outcome.loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], self.recipe.grad_clip)
        if not (torch.isfinite(outcome.loss) and torch.isfinite(norm)):
            raise _not_finite(batch, self.step + 1, float(outcome.loss.detach()), float(norm))
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return outcome, float(norm)

    # Acceptance --------------------------------------------------------------------------------------------------------

    def _end_epoch(self, epoch: int) -> dict[str, Any]:
        figure = self.measure()
        record = {"step": self.step, "epoch": epoch, "heldout": None if figure is None else figure.record}
        record["acceptance_length"] = None if figure is None else figure.length
        if figure is None or figure.length > self.best["acceptance_length"]:
            self.best = {"epoch": epoch, "acceptance_length": figure.length if figure else 0.0, "heldout": record["heldout"]}
            checkpoint.save(self.folder / "checkpoint", self.draft, {**self.about, "step": self.step, **self.best})
        return record

    def measure(self) -> Acceptance | None:
        """Simulated acceptance on the held-out rows (teacher-forced, joint); None without any."""
        counts = [(np.zeros((0, self.recipe.ttt_steps)),) * 2]
        for samples in plan(self.lengths, np.array(self.heldout, dtype=np.int64), self.recipe.batch_tokens, 0, 0):
            batch = self.reader.batch(samples).to(self.device)
            if len(batch):
                counts.append(tuple(t.cpu().numpy() for t in joint_counts(batch, *simulate(self.draft, batch, self.recipe.ttt_steps))))
        hits, tried = (np.concatenate(t) for t in zip(*counts, strict=True))
        return acceptance.from_counts(hits, tried) if len(hits) else None

    def _result(self, tokens: int, seconds: float) -> Result:
        losses = [r["loss"] for r in self.log.read() if r.get("loss") is not None]
        ends = max(1, len(losses) // 20)
        figure = Acceptance(**self.best["heldout"]) if self.best.get("heldout") else None
        return Result(
            self.total, int(self.lengths[self.samples].sum()) * self.recipe.epochs, tokens / seconds if seconds else 0.0,
            float(np.mean(losses[:ends])), float(np.mean(losses[-ends:])), figure, self.best["epoch"], self.folder / "checkpoint",
        )  # fmt: skip


class MetricsLog:
    """metrics.jsonl: appended line by line; after a crash, lines behind the state gone back to are dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def read(self) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def cut(self, step: int) -> None:
        kept = [r for r in self.read() if r["step"] <= step]
        self.path.write_text("".join(json.dumps(r) + "\n" for r in kept))


def _config(store: Store, target: Path, t2d: Tensor, drafted: int) -> DraftConfig:
    """Sizes of the draft; Eagle3Error when store, vocabulary and target do not belong together."""
    config = targets.text_config(target)
    width = store.manifest["hidden_size"]
    if (width, len(t2d)) != (config.hidden_size, config.vocab_size):
        raise Eagle3Error(
            f"store {store.path} holds states of width {width} and the draft vocabulary is cut from {len(t2d)} tokens; target {target} "
            f"has width {config.hidden_size} and {config.vocab_size} tokens. Extract with this target."
        )
    return DraftConfig.from_target(config, drafted, store.manifest["layers"])


def schedule(step: int, total: int, warmup_share: float) -> float:
    """Learning rate factor of optimizer step `step` (from 0): linear warm-up, then half a cosine down to zero."""
    warmup = max(1, round(total * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


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


def _not_finite(batch: Batch, step: int, loss: float, norm: float) -> Eagle3Error:
    """Name the samples whose states are not finite; if all are, every sample of the batch."""
    bad_rows = ~torch.isfinite(batch.aux).all(1)
    bad = set(batch.document[bad_rows].tolist()) | set(batch.document[batch.row[~torch.isfinite(batch.last).all(1)]].tolist())
    ids = [batch.ids[i] for i in sorted(bad)] or batch.ids
    why = "their hidden states are not finite; extract them again" if bad else "their states are finite; lower lr or grad_clip"
    return Eagle3Error(f"training step {step}: loss {loss}, gradient norm {norm}. Samples: {', '.join(ids[:8])}: {why}.")


def _rate(hits: Tensor, known: Tensor) -> Tensor:
    return hits.sum(0) / known.sum(0).clamp(min=1)


def _rounded(values: Tensor) -> list[float | None]:
    return [None if math.isnan(v) else round(v, 5) for v in values.tolist()]


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
             "loss_last": result.loss_last, "best_epoch": result.best_epoch}
    return found | ({"acceptance_length_heldout": result.heldout.length} if result.heldout else {})
