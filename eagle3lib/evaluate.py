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

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3lib import acceptance, curves, draftcheck, export, proof, speculate, targets
from eagle3lib.acceptance import Shape
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.draft import Draft
from eagle3lib.draftcheck import Problem
from eagle3lib.errors import Eagle3Error
from eagle3lib.export import RoundTrip
from eagle3lib.loss import joint_hits
from eagle3lib.prepared import ABOUT, FOLDER
from eagle3lib.progress import tqdm
from eagle3lib.questions import Asked, Question, follow, room, talks, trained_tail
from eagle3lib.results import ALL, Outcome, Results, Variant
from eagle3lib.runs import read_json
from eagle3lib.speculate import Reply, Times
from eagle3lib.store import Sample

BATCH = 16  # prompts in lockstep: weights are read once for all (SmolLM2, one core: verifying 12 took 2.6 times what one takes)
PREFILL = 4096  # tokens of a batch's prompts, padded: transformers keeps every layer's states of them for a moment
ROUND_TRIP = 1e-5  # of the logits' own size, in float32


# Measuring -----------------------------------------------------------------------------------------------------------


def device(name: str = "auto") -> str:
    """"cpu" or "cuda"; "auto" takes a GPU when there is one."""
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def measure(model: torch.nn.Module, draft: Draft, asked: Asked, chat: Chat, *, steps: int, max_new_tokens: int, seed: int = 0,
            batch: int = BATCH) -> Results:
    """Answer every question by drafting chains of `steps`, and prove each reply; `model` is the target, in float32 to be lossless.

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
    return Results(Shape(steps), seed, outcomes, times, samples[0])


def vary(model: torch.nn.Module, draft: Draft, results: Results, chat: Chat, *, max_new_tokens: int, shape: Shape | None = None,
         temperature: float = 0.0, batch: int = BATCH) -> None:
    """Answer the same questions with another `shape`, or at a `temperature`, and keep the figures in `results.variants`.

    The measured shape at temperature 0 again is no variant, and nothing happens.
    """
    shape = shape or results.shape
    if (shape, temperature) == (results.shape, 0.0):
        return
    waiting, times = sorted(results.outcomes, key=lambda o: len(o.question.ids)), Times()
    found: list[tuple[Outcome, Reply]] = []
    label = f"{shape}, temperature {temperature:g}"
    with tqdm(total=len(waiting), desc=label, unit="reply", mininterval=1) as bar:
        while waiting:
            size = _group([o.question for o in waiting], batch)
            group, waiting = waiting[:size], waiting[size:]
            replies, spent = speculate.generate(model, draft, [o.question.ids for o in group], shape=shape, max_new_tokens=max_new_tokens,
                                                ends=set(chat.stop_ids), temperature=temperature, seed=results.seed + len(waiting))
            times.add(spent)
            found += zip(group, replies, strict=True)
            bar.update(size)
    figures = {}
    for name in results.figures:
        grouped = talks((o.question, r.rounds) for o, r in found if name in (ALL, o.question.set))
        figures[name] = acceptance.measured([sum(talk, []) for talk in grouped], shape.steps, seed=results.seed)
    differing = [f"{o.question.set} {o.question.id}" for o, r in found if not temperature and r.tokens != o.reply.tokens]
    results.variants.append(Variant(shape, temperature, figures, differing, times))


def _group(waiting: Sequence[Question], batch: int) -> int:
    """How many of the waiting questions go together: at most `batch`, and at most PREFILL padded tokens."""
    size = 1
    while size < min(batch, len(waiting)) and (size + 1) * max(len(q.ids) for q in waiting[: size + 1]) <= PREFILL:
        size += 1
    return size


def _prove(model: torch.nn.Module, draft: Draft, question: Question, reply: Reply, steps: int) -> tuple[Outcome, Sample]:
    proved = proof.prove(model, question.ids, reply.tokens, draft.cfg.aux_layers)
    hits, known = proof.teacher_forced(draft, proved.sample, steps)
    parted = proof.parting(reply.rounds, proof.replay(hits, known, len(question.ids) + 1, reply.finish))
    margin = proof.draft_margin(draft, proved.sample, *parted) if parted else None
    counts = joint_hits(hits, known).sum(0).tolist(), known.sum(0).tolist()
    return Outcome(question, reply, proved.mismatch, proved.smallest_margin, *counts, parted is None, margin), proved.sample


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
    for variant in results.variants:
        if not variant.temperature:
            checks.add(f"lossless, {variant.shape}", not variant.differing, f"{len(variant.differing)} of {len(results.outcomes)} replies differ"
                       + f": {', '.join(variant.differing[:3])}" * bool(variant.differing), 0, "a tree that lets the draft's own tokens through",
                       "The chain's replies are proved; if its smallest margin is a near-tie, take another seed or machine, and say so.")
    _check_replay(checks, results)


def _check_replay(checks: Checks, results: Results) -> None:
    odd = [o for o in results.outcomes if not o.replayed]
    real = [o for o in odd if o.replay_margin is None or o.replay_margin >= proof.NEAR_TIE]
    first = f"; first: {real[0].question.set} {real[0].question.id}, where the draft is sure by {real[0].replay_margin} nats" if real else ""
    ties = f"; {len(odd) - len(real)} more part at a near-tie of the draft's two best tokens" if len(odd) > len(real) else ""
    checks.add("replay equals measured", not real, f"{len(real)} of {len(results.outcomes)} replies{first}{ties}", 0,
               "a draft that sees other states, tokens or positions when serving than in training",
               "Compare the rows of eagle3lib.drafter with eagle3lib.ttt for the question named.")


def check_prompts(checks: Checks, chat: Chat, run: Path) -> None:
    """Add "prompts as in training": the same tokenizer, template and options as the prepared rows of this run, and the same end."""
    trained = read_json(Path(run) / FOLDER / ABOUT).get("fingerprint", {})
    names = [n for n in sorted({*trained, *chat.fingerprint}) if trained.get(n) != chat.fingerprint.get(n)]
    tails = [chat.tokenizer.decode(ids) for ids in (trained_tail(run, len(chat.generation_prompt)), chat.generation_prompt)]
    found = [f"{n}: trained with {trained.get(n)}, now {chat.fingerprint.get(n)}" for n in names]
    shown = f"prompts end in {tails[0]!r} in training and in {tails[1]!r} here"
    checks.add("prompts as in training", not names and tails[0] == tails[1], "; ".join([*found, shown]), "the same",
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
    export.export(draft, folder, dtype=dtype, card=card, images=curves.png(folder.parent))
    sample = results.witness
    aux_TA, tokens = sample.hidden[:-1, :-1].flatten(1), sample.input_ids[1:].tolist()
    trip = export.round_trip(draft, folder, aux_TA, tokens, results.steps)
    size = sum(p.stat().st_size for p in folder.iterdir())
    return Exported(folder, draftcheck.check_draft(folder, target), trip, size)


def _card_figures(results: Results) -> dict[str, Any]:
    figures = {f"acceptance length, {name}": f"{f.measured} ({f.measured.rounds:,} rounds; simulated {f.simulated.length:.2f})"
               for name, f in results.figures.items()}
    return {"draft steps (chain)": results.steps, **figures}
