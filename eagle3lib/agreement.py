"""Agreement: simulated, measured and served acceptance side by side; when they part, the known causes, each tested where it can be.

    agreed = agreement.compare(results, serving, exported, model, draft)
    print(agreed.headline)          # the verdict, one line, three figures
    agreed.table()                  # a set a line
    agreed.causes()                 # what was tested, and what it showed
    agreed.check(stage.checks)

The sharpest test: the served replies are teacher-forced through the trainer's own draft. That predicts, for this very text,
how many verify steps the server must have needed; other text (bf16 orders near-ties otherwise) then explains nothing away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from eagle3lib import draftcheck, proof
from eagle3lib.acceptance import RESAMPLES, Acceptance
from eagle3lib.checks import Checks
from eagle3lib.draft import Draft
from eagle3lib.progress import tqdm
from eagle3lib.served import Arm, Serving
from eagle3lib.tables import View, table

if TYPE_CHECKING:
    from eagle3lib.evaluate import Exported
    from eagle3lib.results import Results

REPLAY = 0.03  # of the verify steps: room for bf16 beside float32


@dataclass(frozen=True)
class Replay:
    """Verify steps of the served replies: those counted by the server over those that the trained draft predicts for the same text."""

    replies: int
    ratio: float
    low: float
    high: float

    @property
    def same(self) -> bool:
        return abs(self.ratio - 1) <= REPLAY or self.low <= 1 <= self.high

    def __str__(self) -> str:
        return f"{self.ratio:.3f} [{self.low:.3f}, {self.high:.3f}] over {self.replies} replies"


@dataclass(frozen=True)
class Cause:
    """A known reason why figures part. `guilty`: None when it could not be told."""

    name: str
    tested: str
    found: str
    guilty: bool | None

    @property
    def word(self) -> str:
        return {True: "LOOK HERE", False: "no", None: "not tested"}[self.guilty]


@dataclass
class Agreement:
    results: Results
    serving: Serving
    replay: Replay | None = None
    listed: list[Cause] = field(default_factory=list)

    @property
    def headline(self) -> str:
        """The verdict in one line, with the three figures."""
        figure, served = self.results.figures["all"], self.serving.figures.get("all")
        word = self.results.verdict[0] if not self.serving.slower else "slower than no draft"
        shown = f"served {served} ({self.serving.shape})" if served else "served: not measured"
        return (f"{word.upper()}: acceptance length simulated {figure.simulated}, measured {figure.measured} "
                f"({self.results.shape}), {shown}; {figure.measured.prompts} prompts, {figure.measured.rounds:,} rounds")

    def words(self) -> dict[str, str]:
        """For each set: do measured and served agree? Empty when nothing was served, or another shape than measured."""
        if self.serving.shape != self.results.shape:
            return {}
        return {name: relation(self.results.figures[name].measured, f) for name, f in self.serving.figures.items()}

    @property
    def parted(self) -> list[str]:
        return [name for name, word in self.words().items() if word == DIFFER]

    def table(self) -> View:
        """The three figures of each set, with 95 % intervals, and whether they agree."""
        head = ["set", "simulated (chain)", f"measured ({self.results.shape})", f"served ({self.serving.shape})", "measured and served"]
        words, served = self.words(), self.serving.figures
        rows = [[name, str(f.simulated), str(f.measured), str(served.get(name, "-")), words.get(name, "-")]
                for name, f in self.results.figures.items()]
        return table(head, rows)

    def bars(self) -> dict[str, dict[str, float]]:
        """What plots.acceptance_bars draws: measured and simulated, and served where it was the same shape."""
        served = self.serving.figures if self.words() else {}
        return {name: bar | ({"served": served[name].length, "served_low": served[name].low, "served_high": served[name].high}
                             if name in served else {}) for name, bar in self.results.bars().items()}

    def causes(self) -> View:
        """The known causes, what was tested of each, and what it showed."""
        if not self.listed:
            return View("nothing was served, so there is nothing to explain", "<p>Nothing was served, so there is nothing to explain.</p>")
        return table(["known cause", "tested", "found", "guilty?"], [[c.name, c.tested, c.found, c.word] for c in self.listed])

    def check(self, checks: Checks) -> None:
        """Add "served draft is the trained one" and "measured and served agree"; nothing when nothing was served."""
        if self.replay is None:
            return
        suspects = ", ".join(c.name for c in self.listed if c.guilty) or "none of the tested causes; see the table of causes"
        checks.add("served draft is the trained one", self.replay.same, f"verify steps served / predicted: {self.replay}",
                   f"1 within {REPLAY:.0%}, or within the interval", "a server that drafts with other tensors, layers, ids or positions",
                   f"Look at: {suspects}.")
        found = ", ".join(f"{name}: {word}" for name, word in self.words().items()) or "another shape was served than measured"
        checks.add("measured and served agree", not self.parted, found, "intervals that meet",
                   "an offline figure that does not survive serving", f"Look at: {suspects}.")

    def metrics(self) -> dict[str, Any]:
        return {} if self.replay is None else {"served_over_predicted": self.replay.ratio, "sets_parted": self.parted}


AGREE, MEET, DIFFER, FEW = "agree: each in the other's interval", "intervals meet", "DIFFER", "too few prompts to tell"
LEAST = 5  # prompts; below that a bootstrap interval says nothing


def relation(a: Acceptance, b: Acceptance) -> str:
    """How two figures of one set stand to each other."""
    if min(a.prompts, b.prompts) < LEAST:
        return FEW
    if a.low <= b.length <= a.high and b.low <= a.length <= b.high:
        return AGREE
    return MEET if a.low <= b.high and b.low <= a.high else DIFFER


def compare(results: Results, serving: Serving, exported: Exported, model: torch.nn.Module, draft: Draft) -> Agreement:
    """Put the figures together; when something was served, replay it and test the causes. `model`: the target in float32."""
    if not serving.arms or serving.shape.topk > 1:
        return Agreement(results, serving)
    arm = serving.arm(True, lone=False)
    replayed = replay(model, draft, arm, serving.shape.steps, serving.seed)
    return Agreement(results, serving, replayed, _causes(results, serving, exported, draft, arm, replayed))


def replay(model: torch.nn.Module, draft: Draft, arm: Arm, steps: int, seed: int = 0) -> Replay:
    """Teacher-force every served reply and hold the predicted verify steps against the counted ones, paired, by bootstrap."""
    counted, predicted = [], []
    for question, reply in tqdm(arm.pairs, desc="replaying what was served", unit="reply", mininterval=1):
        sample = proof.prove(model, question.ids, reply.output_ids, draft.cfg.aux_layers).sample
        finish = "eos" if reply.finish_reason == "stop" else "limit"
        predicted.append(len(proof.replay(*proof.teacher_forced(draft, sample, steps), len(question.ids) + 1, finish)))
        counted.append(reply.verify_steps)
    c, p = np.array(counted), np.array(predicted)
    drawn = np.random.default_rng(seed).multinomial(len(c), [1 / len(c)] * len(c), size=RESAMPLES)
    low, high = np.percentile(drawn @ c / np.maximum(drawn @ p, 1), [2.5, 97.5])
    return Replay(len(c), float(c.sum() / max(p.sum(), 1)), float(low), float(high))


def _causes(results: Results, serving: Serving, exported: Exported, draft: Draft, arm: Arm, replayed: Replay) -> list[Cause]:
    held = next(c for c in serving.checks if c.name == "draft tensors are loaded")
    errors = [p for p in exported.problems if p.fatal]
    ids = draftcheck.read_config(exported.folder)["eagle_config"][draftcheck.AUX_IDS]
    loop = {(o.question.set, o.question.id): o.reply.tokens for o in results.outcomes}
    same = [loop.get((q.set, q.id)) == r.output_ids for q, r in arm.pairs]
    outside = [_outside(draft, [r.output_ids for r in arm.replies]), _outside(draft, [o.reply.tokens for o in results.outcomes])]
    return [
        Cause("draft computes something else in the server", "served text replayed through the trained draft: verify steps served / predicted",
              str(replayed), not replayed.same),
        Cause("tensors not loaded", "the server's checksum of every draft tensor against the file's", str(held.measured),
              None if "not compared" in str(held.measured) else not held.passed),
        Cause("d2t, names or shapes in the folder", "check-draft on the exported folder", f"{len(errors)} errors", bool(errors)),
        Cause("other layers captured", "layer ids of config.json, plus one, against those of training", f"{ids} and {list(draft.cfg.aux_layers)}",
              [i + 1 for i in ids] != list(draft.cfg.aux_layers)),
        Cause("dtype", "guesses that rounding the weights leaves as they were", f"{exported.trip.agreement:.0%}", exported.trip.agreement < 0.8),
        Cause("other prompts", "token ids are sent, never text: those of the loop", f"{len(arm.questions)} prompts, the same ids", False),
        Cause("other replies", "served replies that are the loop's, token by token (bf16 near-ties part them)",
              f"{sum(same)} of {len(same)}", sum(same) < len(same) / 4),
        Cause("vocabulary", "reply tokens outside the draft vocabulary, served and measured", f"{outside[0]:.1%} and {outside[1]:.1%}",
              abs(outside[0] - outside[1]) > 0.05),
    ]  # fmt: skip


def _outside(draft: Draft, replies: Sequence[list[int]]) -> float:
    ids = torch.tensor([token for reply in replies for token in reply])
    return float((~draft.get_buffer("t2d").cpu()[ids]).float().mean())
