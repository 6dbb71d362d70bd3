"""Served: what SGLang itself makes of the exported draft. Needs a GPU: on a CPU SGLang 0.5.14 cannot speculate.

    serving = served.serve(folder, target, questions, Shape(3), stage.dir / "serving", max_new_tokens=..., stop_ids=chat.stop_ids)
    serving.table()                                  # acceptance a set; tokens/s with and without the draft
    serving.check(stage.checks)                      # loaded, active, outputs equal, faster
    stage.finish(**serving.metrics())

The same prompts go to two servers that differ in the draft alone, one request at a time and a working batch at a time.
Acceptance is counted from each reply's own figures; the average in `/server_info` is over the server's life.

Legend: an arm is one server at one batch size; V verify steps of a reply.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from eagle3lib import acceptance, loaded
from eagle3lib.acceptance import Acceptance, Shape
from eagle3lib.checks import Checks
from eagle3lib.client import Reply
from eagle3lib.engine import Engine
from eagle3lib.errors import Eagle3Error
from eagle3lib.questions import Question, talks
from eagle3lib.tables import View, table

BATCH = 32  # requests in flight of the working batch
LONE = 12  # prompts asked one at a time
WARM_TOKENS = 16  # of a reply before the clock starts: kernels are compiled at first use
TOP = 20  # alternatives among which the other token of a difference is looked for
NEAR_TIE = 1.0  # nats. bf16 moved single log-probabilities by up to 0.5 between batches (docs/benchmarks.md); two of them part by twice that
NO_GPU = "no GPU here, and SGLang cannot speculate on a CPU: simulated and measured figures stand alone"


@dataclass(frozen=True)
class Arm:
    """One server, one batch size. Replies in the order of the questions; `seconds` from first request to last reply.
    overran: replies that came with tokens behind their end of turn, and were cut there (see `cut`)."""

    drafting: bool
    batch: int
    questions: list[Question]
    replies: list[Reply]
    seconds: float
    overran: int = 0

    @property
    def pairs(self) -> list[tuple[Question, Reply]]:
        return list(zip(self.questions, self.replies, strict=True))

    @property
    def tokens_per_s(self) -> float:
        return sum(len(r.output_ids) for r in self.replies) / max(self.seconds, 1e-9)


@dataclass(frozen=True)
class Difference:
    """The first token at which two arms part. margin: nats by which the server without draft prefers its own token there;
    None when the other token is not among its first TOP."""

    set: str
    id: str
    position: int  # within the reply
    found: int | None  # None: the reply had ended
    expected: int | None
    margin: float | None

    @property
    def near_tie(self) -> bool:
        return self.margin is not None and self.margin <= NEAR_TIE

    def __str__(self) -> str:
        by = f"more than its {TOP} first choices" if self.margin is None else f"{self.margin:.2g} nats"
        return f"{self.set} {self.id}: reply token {self.position} is {self.found}, without draft {self.expected}, preferred by {by}"


@dataclass
class Serving:
    """What was served. `reason` says why nothing was; then there are no arms, no checks and no figures."""

    shape: Shape
    seed: int = 0
    reason: str = ""
    arms: list[Arm] = field(default_factory=list)
    checks: Checks = field(default_factory=Checks)
    differences: list[Difference] = field(default_factory=list)  # with against without the draft, working batch
    control: list[Difference] = field(default_factory=list)  # without draft: one at a time against the working batch

    def arm(self, drafting: bool, lone: bool) -> Arm:
        return next(a for a in self.arms if a.drafting is drafting and (a.batch == 1) is lone)

    @property
    def figures(self) -> dict[str, Acceptance]:
        """Per set in the order asked, then "all": the working batch with the draft. Empty when nothing was served."""
        if not self.arms:
            return {}
        pairs = self.arm(True, lone=False).pairs
        groups = {q.set: [(p, r) for p, r in pairs if p.set == q.set] for q, _ in pairs}
        return {name: figure(group, self.shape, self.seed) for name, group in {**groups, "all": pairs}.items()}

    def speed_up(self, lone: bool) -> float:
        """Tokens/s with the draft over tokens/s without."""
        return self.arm(True, lone).tokens_per_s / self.arm(False, lone).tokens_per_s

    @property
    def slower(self) -> bool:
        """Served, and no faster than without the draft at either batch size."""
        return bool(self.arms) and max(self.speed_up(True), self.speed_up(False)) <= 1.0

    def table(self) -> View:
        """Acceptance a set with its interval, then speed; or why there is none."""
        if self.reason:
            return View(self.reason, f"<p>{self.reason}</p>")
        head = ["served", "prompts", "verify steps", f"acceptance length ({self.shape})", "tokens/s without", "with draft", "speed-up"]
        rows = [[name, str(f.prompts), f"{f.rounds:,}", str(f), "", "", ""] for name, f in self.figures.items()]
        for lone in (True, False):
            without, with_draft = self.arm(False, lone), self.arm(True, lone)
            rows.append([f"batch {with_draft.batch}", str(len(with_draft.replies)), "", str(figure(with_draft.pairs, self.shape, self.seed)),
                         f"{without.tokens_per_s:,.0f}", f"{with_draft.tokens_per_s:,.0f}", f"{self.speed_up(lone):.2f} x"])
        return table(head, rows)

    def metrics(self) -> dict[str, Any]:
        """The numbers for `stage.finish`."""
        if self.reason:
            return {"served": self.reason}
        found: dict[str, Any] = {"served": str(self.shape), "outputs_differ": len(self.differences), "outputs_differ_control": len(self.control)}
        for name, f in self.figures.items():
            end = "" if name == "all" else f"_{name}"
            found |= {f"acceptance_length_served{end}": f.length, f"acceptance_length_served_low{end}": f.low,
                      f"acceptance_length_served_high{end}": f.high}
        for lone, name in ((True, "1"), (False, str(self.arm(True, False).batch))):
            found |= {f"served_tokens_per_s_batch_{name}": self.arm(True, lone).tokens_per_s,
                      f"plain_tokens_per_s_batch_{name}": self.arm(False, lone).tokens_per_s, f"speed_up_batch_{name}": self.speed_up(lone)}
        return found

    def check(self, checks: Checks) -> None:
        """Add what was proved while serving, and what the replies say; nothing when nothing was served."""
        if self.reason:
            return
        checks.extend(self.checks)
        _check_alarm(checks, self.figures["all"])
        _check_outputs(checks, self)
        _check_speed(checks, self)


# Serving -------------------------------------------------------------------------------------------------------------


def serve(folder: Path, target: Path, questions: Sequence[Question], shape: Shape, run_dir: Path, *, max_new_tokens: int,
          stop_ids: Collection[int], batch: int = BATCH, seed: int = 0, dtype: str = "bfloat16", cuda_graphs: bool = True, python: str = "",
          start_timeout_s: float = 600, idle: Sequence[torch.nn.Module] = (), wanted: bool = True) -> Serving:
    """Serve the draft in `folder` to all `questions`, then the target alone; without a GPU, or when not `wanted`, say so.

    `idle`: modules that leave the GPU meanwhile. `cuda_graphs`: False starts in a third of the time, and no speed-up means
    anything then. Raises Eagle3Error when a server does not start, refuses a prompt, or does not speculate at all.
    """
    if not wanted or not torch.cuda.is_available():
        return Serving(shape, seed, NO_GPU if wanted else "not asked for: simulated and measured figures stand alone")
    serving, extra = Serving(shape, seed), _arguments(batch, cuda_graphs)
    order = sorted(questions, key=lambda q: q.id.endswith("+"))  # first turns first, so that the lone arm spreads over the sets
    with parked(idle):
        for drafting in (True, False):
            arguments = [*extra, *(_speculation(folder, shape) if drafting else [])]
            with Engine.start(target, Path(run_dir), device="cuda", dtype=dtype, python=python, start_timeout_s=start_timeout_s,
                              max_restarts=0, extra_args=arguments) as engine:  # a restart would stand in the middle of a timing
                if drafting:
                    _check_server(serving.checks, engine, folder, shape, dtype)
                serving.arms += _arms(engine, drafting, list(questions), _spread(order, LONE), batch, max_new_tokens, stop_ids)
                if not drafting:
                    _compare(serving, engine)
    return serving


def _arguments(batch: int, cuda_graphs: bool) -> list[str]:
    """Both servers: no prefix is shared between requests or arms, and the batch is as large as asked."""
    graphs = ["--cuda-graph-max-bs-decode", str(batch)] if cuda_graphs else ["--disable-cuda-graph"]
    return ["--disable-radix-cache", "--max-running-requests", str(batch), *graphs]


def _speculation(folder: Path, shape: Shape) -> list[str]:
    return [word for name, value in _settings(folder, shape).items() for word in (f"--{name.replace('_', '-')}", str(value))]


def _settings(folder: Path, shape: Shape) -> dict[str, Any]:
    """As /server_info shows them."""
    return {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(Path(folder).resolve()),
            "speculative_num_steps": shape.steps, "speculative_eagle_topk": shape.topk, "speculative_num_draft_tokens": shape.tokens}


@contextmanager
def parked(modules: Sequence[torch.nn.Module]) -> Iterator[None]:
    """Modules on the CPU for a while, so that a server finds the GPU free."""
    places = [next(m.parameters()).device for m in modules]
    for m in modules:
        m.to("cpu")
    torch.cuda.empty_cache()
    try:
        yield
    finally:
        for m, place in zip(modules, places, strict=True):
            m.to(place)


def _spread(questions: list[Question], count: int) -> list[Question]:
    """`count` questions, taken from the sets in turn."""
    sets = {q.set: [p for p in questions if p.set == q.set] for q in questions}
    longest = max(map(len, sets.values()))
    return [qs[i] for i in range(longest) for qs in sets.values() if i < len(qs)][:count]


def _arms(engine: Engine, drafting: bool, questions: list[Question], lone: list[Question], batch: int, max_new_tokens: int,
          stop_ids: Collection[int]) -> list[Arm]:
    arms = []
    for asked, at_once in ((lone, 1), (questions, batch)):
        _ask(engine, (asked * at_once)[:at_once], at_once, WARM_TOKENS, stop_ids, None)
        begun = time.perf_counter()
        replies = _ask(engine, asked, at_once, max_new_tokens, stop_ids, f"{'with' if drafting else 'without'} draft, batch {at_once}")
        seconds, whole = time.perf_counter() - begun, [cut(r, stop_ids) for r in replies]
        arms.append(Arm(drafting, at_once, asked, whole, seconds, sum(a != b for a, b in zip(whole, replies, strict=True))))
        if drafting:
            _require_speculation(arms[-1])
    return arms


def _ask(engine: Engine, questions: list[Question], at_once: int, max_new_tokens: int, stop_ids: Collection[int], label: str | None) -> list[Reply]:
    replies = engine.generate([q.ids for q in questions], max_new_tokens=max_new_tokens, concurrency=at_once, stop_token_ids=sorted(stop_ids),
                              progress=label)
    for question, reply in zip(questions, replies, strict=True):
        if reply.finish_reason == "refused":
            raise Eagle3Error(f"served: {question.set} {question.id} ({len(question.ids)} tokens) was refused: {reply.error}")
    return replies


def _require_speculation(arm: Arm) -> None:
    for question, reply in arm.pairs:
        if len(reply.output_ids) > 1 and not reply.verify_steps:
            raise Eagle3Error(f"served: the reply to {question.set} {question.id} has {len(reply.output_ids)} tokens and no verify step: the "
                              "server does not speculate. See its log; was it started with other arguments?")


def cut(reply: Reply, stop_ids: Collection[int]) -> Reply:
    """The reply up to its end of turn. SGLang 0.5.14 looks at the token limit before it looks for a stop token, so a verify step that
    passes the limit can bring an end of turn and tokens behind it (managers/schedule_batch.py, update_finish_state)."""
    end = next((i + 1 for i, token in enumerate(reply.output_ids) if token in stop_ids), len(reply.output_ids))
    return reply if end == len(reply.output_ids) else replace(reply, output_ids=reply.output_ids[:end], finish_reason="stop")


def figure(pairs: Sequence[tuple[Question, Reply]], shape: Shape, seed: int = 0) -> Acceptance:
    """Acceptance of these replies (see `emitted`), with its interval over conversations. Eagle3Error when the counts cannot be."""
    for question, reply in pairs:
        if not reply.verify_steps <= emitted(reply) <= reply.verify_steps * (shape.steps + 1):
            raise Eagle3Error(f"served: {question.set} {question.id}: {emitted(reply)} tokens in {reply.verify_steps} verify steps cannot come from "
                              f"a {shape}. Was the request retracted, or the server started with other arguments? See its log.")
    grouped = talks(pairs)
    return acceptance.counted([sum(map(emitted, talk)) for talk in grouped], [sum(r.verify_steps for r in talk) for talk in grouped], shape.steps,
                              seed=seed)


def emitted(reply: Reply) -> int:
    """Tokens that the verify steps of a reply brought: all but the first, which is the prefill's. (SGLang's own spec_accept_length
    counts that one too.) A reply that the token limit cut counts its last step whole, as acceptance.DEFINITIONS says."""
    if not reply.verify_steps:
        return 0
    return reply.accepted_drafts + reply.verify_steps if reply.finish_reason == "length" else len(reply.output_ids) - 1


# Comparing outputs ---------------------------------------------------------------------------------------------------


def _compare(serving: Serving, engine: Engine) -> None:
    """Find where the draft, and the batch size alone, changed a reply; `engine` is the server without draft."""
    plain = serving.arm(False, lone=False)
    serving.differences = differences(engine, serving.arm(True, lone=False), plain)
    serving.control = differences(engine, serving.arm(False, lone=True), plain)


def differences(engine: Engine, found: Arm, expected: Arm) -> list[Difference]:
    """The first difference of every reply that is not the same in both arms, for the questions of `found`."""
    own = {(q.set, q.id): r.output_ids for q, r in expected.pairs}
    pairs = [(q, r.output_ids, own[q.set, q.id]) for q, r in found.pairs]
    return [_difference(engine, q, a, b) for q, a, b in pairs if a != b]


def _difference(engine: Engine, question: Question, found: list[int], expected: list[int]) -> Difference:
    at = next((i for i, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected)))
    a, b = (ids[at] if at < len(ids) else None for ids in (found, expected))
    values, ids = engine.logprobs(question.ids + expected[:at], top_k=TOP)
    by_id = dict(zip(ids[-1].tolist(), values[-1].tolist(), strict=True))
    # two that part only in length cannot come from rounding: the same tokens were followed by an end and by none
    margin = None if a is None or b is None or not {a, b} <= by_id.keys() else by_id[b] - by_id[a]
    return Difference(question.set, question.id, at, a, b, margin)


# Checks --------------------------------------------------------------------------------------------------------------


def _check_server(checks: Checks, engine: Engine, folder: Path, shape: Shape, dtype: str) -> None:
    wanted = _settings(folder, shape)
    wrong = {name: engine.server_info.get(name) for name, value in wanted.items() if engine.server_info.get(name) != value}
    checks.add("server drafts as asked", not wrong, wrong or str(shape), {n: wanted[n] for n in wrong} or str(shape),
               "a server that resolved the draft or its shape to something else", "See the first lines of the server's log.")
    loaded.check(checks, engine.client.ask("/weights_checker", {"action": "checksum"}), folder, dtype)


def _check_alarm(checks: Checks, overall: Acceptance) -> None:
    checks.add("the served draft is alive", overall.length > 1.0, f"{overall} over {overall.rounds:,} verify steps", "above 1.00",
               "a draft with a random head or embeddings: not one token accepted, and the server healthy",
               "Not one draft was accepted. Compare the checksums above, d2t (offsets), the layer ids in config.json, and the measured figure.")


def _check_outputs(checks: Checks, serving: Serving) -> None:
    real = [d for d in serving.differences if not d.near_tie]
    worst = max((d.margin for d in serving.differences if d.margin is not None), default=0.0)
    asked = len(serving.arm(True, lone=False).replies)
    found = f"{len(serving.differences)} of {asked} replies part somewhere, {len(real)} of them at no near-tie, margin up to {worst:.2g} nats"
    control = f"; without a draft, batch size alone parts {len(serving.control)} of {len(serving.arm(False, lone=True).replies)}"
    overran = serving.arm(True, lone=False).overran
    control += f"; {overran} ran on behind their end of turn into the token limit, as SGLang's do, and were cut" if overran else ""
    checks.add("served outputs are the target's", not real, found + control + (f"; first: {real[0]}" if real else ""),
               f"margins up to {NEAR_TIE} nats", "verification that lets the draft's own tokens through",
               "A bf16 server orders near-ties by batch; a larger margin is a real difference: report it to SGLang with the prompt named.")


def _check_speed(checks: Checks, serving: Serving) -> None:
    gains = {f"batch {serving.arm(True, lone).batch}": serving.speed_up(lone) for lone in (True, False)}
    found = ", ".join(f"{gain:.2f} x at {name}" for name, gain in gains.items())
    checks.add("served faster than without", not serving.slower, found, "above 1.00 x at one of them",
               "a draft that is accepted now and then and still slows the server down",
               "Shorter chains cost less; a longer training accepts more. With CUDA graphs off the figure means nothing.")
