"""Evaluate: the acceptance length that a server will show, measured and explained. What notebooks/05_evaluate.ipynb calls:

    asked = questions.choose(eval_sets, eval_prompts, chat, room=..., seed=seed)        # prompts, rendered as in training
    results = evaluate.measure(model, draft, asked, chat, steps=..., max_new_tokens=...)  # the lossless loop, proven reply by reply
    evaluate.check(stage.checks, results)                                               # lossless; replay equals measured
    evaluate.check_prompts(stage.checks, chat, stage.dir)                                # the prompts are those of training
    exported = evaluate.export_draft(draft, stage.path("draft"), target, results)       # SGLang's folder, read back
    exported.check(stage.checks)
    evaluate.judge(stage.checks, results)                                               # a useless draft is red
    stage.finish(**results.metrics(), **exported.metrics())

Legend: K draft steps, M rows of a reply (one less than its tokens), A captured layers, H hidden size, T tokens.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eagle3lib import acceptance, draftcheck, export, proof, speculate, targets
from eagle3lib.acceptance import Acceptance, Shape
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.draft import Draft
from eagle3lib.draftcheck import Problem
from eagle3lib.errors import Eagle3Error
from eagle3lib.export import RoundTrip
from eagle3lib.loss import joint_hits
from eagle3lib.prepared import ABOUT, FOLDER
from eagle3lib.preview import View
from eagle3lib.progress import tqdm
from eagle3lib.proof import Mismatch
from eagle3lib.questions import Asked, Question, follow, room
from eagle3lib.runs import read_json
from eagle3lib.speculate import Reply, Times
from eagle3lib.store import Sample
from eagle3lib.tables import table

ALL = "all"
BATCH = 16  # prompts in lockstep: weights are read once for all (SmolLM2, one core: verifying 12 took 2.6 times what one takes)
PREFILL = 4096  # tokens of a batch's prompts, padded: transformers keeps every layer's states of them for a moment
ROUND_TRIP = 1e-5  # of the logits' own size, in float32


# Measuring -----------------------------------------------------------------------------------------------------------


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


class Figure(NamedTuple):
    measured: Acceptance
    simulated: Acceptance


@dataclass
class Results:
    steps: int
    seed: int
    outcomes: list[Outcome]
    times: Times
    witness: Sample  # prompt, reply and hidden states of one question, for the round trip of the export

    @property
    def shape(self) -> Shape:
        return Shape(self.steps)

    @property
    def questions(self) -> list[Question]:
        """All that were asked, later turns behind the target's own replies included."""
        return [o.question for o in self.outcomes]

    @cached_property
    def figures(self) -> dict[str, Figure]:
        """Per set in the order asked, then "all": every prompt of every set."""
        groups: dict[str, list[Outcome]] = {}
        for outcome in self.outcomes:
            groups.setdefault(outcome.question.set, []).append(outcome)
        return {name: self._figure(group) for name, group in {**groups, ALL: self.outcomes}.items()}

    def _figure(self, group: list[Outcome]) -> Figure:
        measured = acceptance.measured([o.reply.rounds for o in group], self.steps, seed=self.seed)
        hits_PK, tried_PK = (np.array([getattr(o, name) for o in group]) for name in ("hits", "tried"))
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

    def by_context(self, edges: Sequence[int] = (64, 128, 256, 512, 1024, 2048)) -> dict[str, Acceptance]:
        """Measured acceptance by the number of tokens known before the round."""
        return acceptance.by_context([o.reply.rounds for o in self.outcomes], self.steps, edges, seed=self.seed)

    def table(self) -> View:
        """Measured and simulated acceptance length a set, with 95 % intervals, rounds and survival."""
        head = ["set", "prompts", "rounds", "measured", "simulated", "rate", *(f"pos {k + 1}" for k in range(self.steps))]
        rows = [[name, str(m.prompts), f"{m.rounds:,}", str(m), str(s), f"{m.rate:.0%}", *(f"{x:.0%}" for x in m.survival)]
                for name, (m, s) in self.figures.items()]
        return table(head, rows)

    def metrics(self) -> dict[str, Any]:
        """The numbers for `stage.finish`."""
        m, s = self.figures[ALL]
        lengths = {f"acceptance_length_measured_{name}": f.measured.length for name, f in self.figures.items() if name != ALL}
        return {
            "acceptance_length_measured": m.length, "acceptance_length_low": m.low, "acceptance_length_high": m.high,
            "acceptance_length_simulated": s.length, "acceptance_rate": m.rate, **lengths, "survival": m.survival,
            "prompts": m.prompts, "rounds": m.rounds, "rounds_cut": m.censored, "draft_steps": self.steps, "lossless": self.lossless,
            "smallest_margin": min(o.smallest_margin for o in self.outcomes), "loop_tokens_per_s": self.times.tokens_per_s,
            "loop_efficiency": self.times.efficiency, "draft_ms": 1e3 * self.times.draft / max(self.times.forwards, 1),
            "verify_ms": 1e3 * self.times.verify / max(self.times.forwards, 1), "verdict": self.verdict[0],
        }  # fmt: skip


def device(name: str = "auto") -> str:
    """"cpu" or "cuda"; "auto" takes a GPU when there is one."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def measure(model: torch.nn.Module, draft: Draft, asked: Asked, chat: Chat, *, steps: int, max_new_tokens: int, seed: int = 0,
            batch: int = BATCH) -> Results:
    """Answer every question by draft-and-verify and prove each reply; `model` is the target, in float32 to be lossless.

    Questions of like length go together. A question's later turns are asked once its reply is there. Shows progress
    and time left. `seed` draws the bootstrap. Raises Eagle3Error when there is no question.
    """
    waiting, times = sorted(asked.questions, key=lambda q: len(q.ids)), Times()
    outcomes: list[Outcome] = []
    samples: list[Sample] = []  # of the first outcome alone
    if not waiting:
        raise Eagle3Error("evaluate: no question to ask; name at least one evaluation set")
    total = max_new_tokens * sum(1 + len(q.later) for q in waiting)
    with tqdm(total=total, desc="draft and verify", unit="tok", mininterval=1) as bar:
        while waiting:
            size = _group(waiting, batch)
            group, waiting = waiting[:size], waiting[size:]
            replies, spent = speculate.generate(model, draft, [q.ids for q in group], shape=Shape(steps), max_new_tokens=max_new_tokens,
                                                ends=set(chat.stop_ids), on_tokens=bar.update)
            times.add(spent)
            for question, reply in zip(group, replies, strict=True):
                outcome, sample = _prove(model, draft, question, reply, steps)
                outcomes.append(outcome)
                samples = samples or [sample]
                waiting += follow(question, reply.tokens, chat, room(model, max_new_tokens, steps))
            bar.update(max_new_tokens * len(group) - spent.tokens)  # tokens that ended replies did not need
            so_far = acceptance.measured([o.reply.rounds for o in outcomes], steps)
            bar.set_postfix_str(f"acceptance length {so_far.length:.2f}", refresh=False)
    places = {id(q): n for n, q in enumerate(asked.questions)}
    outcomes.sort(key=lambda o: places.get(id(o.question), len(places)))
    return Results(steps, seed, outcomes, times, samples[0])


def _group(waiting: list[Question], batch: int) -> int:
    """How many of the waiting questions go together: at most `batch`, and at most PREFILL padded tokens."""
    size = 1
    while size < min(batch, len(waiting)) and (size + 1) * max(len(q.ids) for q in waiting[: size + 1]) <= PREFILL:
        size += 1
    return size


def _prove(model: torch.nn.Module, draft: Draft, question: Question, reply: Reply, steps: int) -> tuple[Outcome, Sample]:
    proved = proof.prove(model, question.ids, reply.tokens, draft.cfg.aux_layers)
    hits, known = proof.teacher_forced(draft, proved.sample, steps)
    seen = [r._replace(beyond=0) for r in reply.rounds]  # the proof ends where the reply does
    replayed = proof.replay(hits, known, len(question.ids) + 1, reply.finish) == seen
    counts = joint_hits(hits, known).sum(0).tolist(), known.sum(0).tolist()
    return Outcome(question, reply, proved.mismatch, proved.smallest_margin, *counts, replayed), proved.sample


# Checks --------------------------------------------------------------------------------------------------------------


def check(checks: Checks, results: Results) -> None:
    """Add "lossless" and "replay equals measured"."""
    wrong = [(o.question, o.mismatch) for o in results.outcomes if o.mismatch]
    first = f"; {wrong[0][0].set} {wrong[0][0].id}: {wrong[0][1]}" if wrong else ""
    tie = bool(wrong) and all(mismatch.near_tie for _, mismatch in wrong)
    checks.add("lossless", not wrong, f"{len(wrong)} of {len(results.outcomes)} replies differ{first}", 0,
               "a loop whose tokens are not the target's own: its acceptance length would be that of another model",
               "A near-tie is rounding: two kernels order all but equal logits differently. Take another seed or machine, and say so."
               if tie else "Acceptance, cache or positions are wrong in eagle3lib.verifier: do not use this figure.")
    odd = [o for o in results.outcomes if not o.replayed]
    first = f"; first: {odd[0].question.set} {odd[0].question.id}" if odd else ""
    checks.add("replay equals measured", not odd, f"{len(odd)} of {len(results.outcomes)} replies{first}", 0,
               "a draft that sees other states, tokens or positions when serving than in training",
               "Compare the rows of eagle3lib.drafter with eagle3lib.ttt for the question named; one alone may be a near-tie.")


def check_prompts(checks: Checks, chat: Chat, run: Path) -> None:
    """Add "prompts as in training": the same tokenizer, template and options as the prepared rows of this run."""
    trained = read_json(Path(run) / FOLDER / ABOUT).get("fingerprint", {})
    names = [n for n in sorted({*trained, *chat.fingerprint}) if trained.get(n) != chat.fingerprint.get(n)]
    found = "; ".join(f"{n}: trained with {trained.get(n)}, now {chat.fingerprint.get(n)}" for n in names)
    checks.add("prompts as in training", not names, found or "same target, tokenizer, template, options", "the same",
               "a draft measured on prompts of another kind than it was trained on",
               "Evaluate with the target and template options that 01_prepare used, or prepare again.")


def judge(checks: Checks, results: Results) -> None:
    """Add "draft is of use": fails when even the upper bound of the measured acceptance length is no gain."""
    word, sentence = results.verdict
    checks.add("draft is of use", word != "useless", sentence, f"upper bound above {acceptance.USELESS_LENGTH}",
               "a draft that costs time and saves none, with every stage green",
               "Train on more rows or longer; if the loss fell all the same, look at alignment and at the captured layers.")


# Export --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exported:
    folder: Path
    problems: list[Problem]
    trip: RoundTrip
    bytes: int

    def check(self, checks: Checks) -> None:
        """Add "export is complete" and "export computes the same"."""
        errors, trip = [p for p in self.problems if p.fatal], self.trip
        found = f"{len(errors)} errors, {len(self.problems) - len(errors)} warnings"
        checks.add("export is complete", not errors, found + "".join(f"; {p.where}: {p.text}" for p in errors[:3]), 0,
                   "an engine that drops or invents tensors without a word", "Run `python -m eagle3lib check-draft` on the folder.")
        limit = ROUND_TRIP * max(1.0, trip.scale)
        unread = f"; not read: {', '.join(trip.unread)}" if trip.unread else ""
        checks.add("export computes the same", trip.difference <= limit and not trip.unread,
                   f"logits differ by {trip.difference:.1e}{unread}", f"{limit:.1e} (1e-5 of the largest logit), nothing unread",
                   "a folder that loads and drafts something else than was trained",
                   "eagle3lib.export and eagle3lib.draftfile disagree about the format: compare both with SGLang's llama_eagle3.py.")

    def metrics(self) -> dict[str, Any]:
        return {"export_bytes": self.bytes, "export_difference": self.trip.difference, "export_rounding": self.trip.rounding,
                "export_agreement": self.trip.agreement}


def export_draft(draft: Draft, folder: Path, target: Path, results: Results, *, dtype: str = "bfloat16",
                 fingerprint: dict[str, Any] | None = None) -> Exported:
    """Write the draft for SGLang in the target's serving `dtype`, validate the folder, read it back and compare logits.

    `fingerprint`: what the hidden states were made with, for the model card (default: the target folder's hashes).
    """
    card = export.model_card(draft, target.name, _card_figures(results), fingerprint or targets.fingerprint(target), results.steps)
    export.export(draft, folder, dtype=dtype, card=card)
    sample = results.witness
    aux_TA, tokens = sample.hidden[:-1, :-1].flatten(1), sample.input_ids[1:].tolist()
    trip = export.round_trip(draft, folder, aux_TA, tokens, results.steps)
    size = sum(p.stat().st_size for p in folder.iterdir())
    return Exported(folder, draftcheck.check_draft(folder, target), trip, size)


def _card_figures(results: Results) -> dict[str, Any]:
    figures = {f"acceptance length, {name}": f"{f.measured} ({f.measured.rounds:,} rounds; simulated {f.simulated.length:.2f})"
               for name, f in results.figures.items()}
    return {"draft steps (chain)": results.steps, **figures}


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
