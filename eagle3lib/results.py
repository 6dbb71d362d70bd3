"""Results: what the loop did on every question, and the figures, tables and examples that a reader sees of it.

Legend: K draft steps, M rows of a reply.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from eagle3lib import acceptance
from eagle3lib.acceptance import Acceptance, Round, Shape
from eagle3lib.preview import View
from eagle3lib.proof import Mismatch
from eagle3lib.questions import Question, talks
from eagle3lib.speculate import Reply, Times
from eagle3lib.store import Sample
from eagle3lib.tables import table

ALL = "all"
CONTEXTS = (64, 128, 256, 512, 1024, 2048)  # bounds of buckets [tokens]
REPLIES = (17, 33, 65, 129, 257, 513)


@dataclass(frozen=True)
class Outcome:
    """One reply: what the loop did, what the proof and the teacher-forced draft say about it."""

    question: Question
    reply: Reply
    mismatch: Mismatch | None
    smallest_margin: float  # nats
    hits: list[int]  # [K] rows whose chain survives through each position, teacher-forced
    tried: list[int]  # [K] rows supervised at each position
    replayed: bool  # the teacher-forced hits predict exactly the measured rounds
    replay_margin: float | None = None  # nats between the draft's two best tokens where they first do not


class Figure(NamedTuple):
    measured: Acceptance
    simulated: Acceptance


@dataclass(frozen=True)
class Variant:
    """The same questions answered with another shape, or at a temperature. differing: replies whose tokens are not those proved (only
    at temperature 0, where they must be)."""

    shape: Shape
    temperature: float
    figures: dict[str, Acceptance]
    differing: list[str]
    times: Times

    @property
    def label(self) -> str:
        return f"{self.shape} at temperature {self.temperature:g}" if self.temperature else str(self.shape)

    @property
    def name(self) -> str:
        """For metrics."""
        return "sampled" if self.temperature else "tree" if self.shape.topk > 1 else f"chain_{self.shape.steps}"


def by_set(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    """Per set in the order asked, then "all"."""
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.question.set, []).append(outcome)
    return {**groups, ALL: list(outcomes)}


@dataclass
class Results:
    shape: Shape
    seed: int
    outcomes: list[Outcome]
    times: Times
    witness: Sample  # prompt, reply and hidden states of one question, for the round trip of the export
    variants: list[Variant] = field(default_factory=list)  # the same questions with a tree, or sampled

    @property
    def steps(self) -> int:
        return self.shape.steps

    @property
    def questions(self) -> list[Question]:
        """All that were asked, later turns behind the target's own replies included."""
        return [o.question for o in self.outcomes]

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Per set in the order asked, then "all": every prompt of every set."""
        return {name: self._figure(group) for name, group in by_set(self.outcomes).items()}

    def _figure(self, group: list[Outcome]) -> Figure:
        grouped = talks((o.question, o) for o in group)
        measured = acceptance.measured([[r for o in talk for r in o.reply.rounds] for talk in grouped], self.steps, seed=self.seed)
        hits_PK, tried_PK = (np.array([np.sum([getattr(o, name) for o in talk], axis=0) for talk in grouped]) for name in ("hits", "tried"))
        return Figure(measured, acceptance.from_counts(hits_PK, tried_PK, seed=self.seed))

    @property
    def lossless(self) -> bool:
        return all(o.mismatch is None for o in self.outcomes)

    @property
    def verdict(self) -> tuple[str, str]:
        """("useful" | "unclear" | "useless", one sentence), over all sets."""
        return acceptance.verdict(self.figures[ALL].measured)

    def bars(self) -> dict[str, dict[str, float]]:
        """What plots.acceptance_bars draws, a set each."""
        return {name: {"measured": f.measured.length, "low": f.measured.low, "high": f.measured.high, "simulated": f.simulated.length,
                       "rounds": f.measured.rounds} for name, f in self.figures.items() if name != ALL}

    def survival(self) -> dict[str, list[float]]:
        """What plots.survival draws: measured survival at positions 1..K, a set each."""
        return {name: f.measured.survival for name, f in self.figures.items() if name != ALL}

    def survival_intervals(self) -> dict[str, tuple[list[float], list[float]]]:
        """(low, high) of `survival`, 95 % over prompts."""
        return {name: (f.measured.survival_low, f.measured.survival_high) for name, f in self.figures.items() if name != ALL}

    def _rounds(self, outcomes: Iterable[Outcome]) -> list[list[Round]]:
        return [[r for o in talk for r in o.reply.rounds] for talk in talks((o.question, o) for o in outcomes)]

    def by_context(self, edges: Sequence[int] = CONTEXTS) -> dict[str, Acceptance]:
        """Measured acceptance by the number of tokens known before the round."""
        return acceptance.by_context(self._rounds(self.outcomes), self.steps, edges, seed=self.seed)

    def by_reply(self, edges: Sequence[int] = REPLIES) -> dict[str, Acceptance]:
        """Measured acceptance by the length of the whole reply [tokens]."""
        inside = {name: [o for o in self.outcomes if low <= len(o.reply.tokens) < high] for name, low, high in acceptance.buckets(edges)}
        return {name: acceptance.measured(self._rounds(found), self.steps, seed=self.seed) for name, found in inside.items() if found}

    def lengths(self) -> View:
        """Measured acceptance by context and by reply length."""
        both = (("context", self.by_context()), ("reply", self.by_reply()))
        rows = [[f"{what} of {name} tokens", str(f), f"{f.rounds:,}", str(f.prompts)] for what, found in both for name, f in found.items()]
        return table(["", f"measured ({self.shape})", "rounds", "prompts"], rows)

    def table(self) -> View:
        """Measured and simulated acceptance length a set, with 95 % intervals, rounds and survival."""
        head = ["set", "prompts", "rounds", f"measured ({self.shape})", "simulated (chain)", "rate", *(f"pos {k + 1}" for k in range(self.steps)),
                *(f"measured ({v.label})" for v in self.variants)]
        rows = [[name, str(m.prompts), f"{m.rounds:,}", str(m), str(s), f"{m.rate:.0%}", *(f"{x:.0%}" for x in m.survival),
                 *(str(v.figures[name]) for v in self.variants)] for name, (m, s) in self.figures.items()]
        return table(head, rows)

    def metrics(self) -> dict[str, Any]:
        """The numbers for `stage.finish`."""
        m, s = self.figures[ALL]
        lengths = {f"acceptance_length_measured_{name}": f.measured.length for name, f in self.figures.items() if name != ALL}
        return {
            "acceptance_length_measured": m.length, "acceptance_length_low": m.low, "acceptance_length_high": m.high,
            "acceptance_length_simulated": s.length, "acceptance_rate": m.rate, **lengths, "survival": m.survival,
            **{f"acceptance_length_{v.name}": v.figures[ALL].length for v in self.variants}, "shape": str(self.shape),
            "prompts": m.prompts, "rounds": m.rounds, "rounds_cut": m.censored, "draft_steps": self.steps, "lossless": self.lossless,
            "smallest_margin": min(o.smallest_margin for o in self.outcomes), "loop_tokens_per_s": self.times.tokens_per_s,
            "loop_efficiency": self.times.efficiency, "draft_ms": 1e3 * self.times.draft / max(self.times.forwards, 1),
            "verify_ms": 1e3 * self.times.verify / max(self.times.forwards, 1), "verdict": self.verdict[0],
        }  # fmt: skip


# Showing -------------------------------------------------------------------------------------------------------------


_MARK = "background:#cfe6f5;border-bottom:3px solid #0072B2"


def example(outcome: Outcome, decode: Callable[[list[int]], str]) -> View:
    """One reply with the drafted tokens marked: they came without a target forward of their own."""
    tokens, at = outcome.reply.tokens, 1
    pieces = [(False, decode(tokens[:1]))]
    for r in outcome.reply.rounds:
        pieces += [(True, decode(tokens[at : at + r.accepted]))] if r.accepted else []
        pieces.append((False, decode(tokens[at + r.accepted : at + r.accepted + 1])))
        at += r.accepted + 1
    drafted = sum(r.accepted for r in outcome.reply.rounds)
    head = (f"{outcome.question.set} {outcome.question.id}: {drafted} of {len(tokens)} tokens were drafted, "
            f"{len(outcome.reply.rounds)} target forwards instead of {len(tokens) - 1}")
    text = head + "\n" + "".join(f"\u27e6{piece}\u27e7" if mark else piece for mark, piece in pieces)
    spans = "".join(f"<span style='{_MARK}'>{html.escape(piece)}</span>" if mark else html.escape(piece) for mark, piece in pieces)
    box = "white-space:pre-wrap;word-break:break-word;font-family:monospace;border:1px solid #bbb;padding:0.6em"
    return View(text, f"<p>{html.escape(head)}</p><div style='{box}'>{spans}</div>")


def drafted(outcome: Outcome) -> int:
    """Tokens of a reply that the draft proposed and the target kept."""
    return sum(r.accepted for r in outcome.reply.rounds)
