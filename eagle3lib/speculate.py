"""Draft and verify: lossless speculative decoding in plain PyTorch, a few prompts in lockstep, KV caches on both sides.

A round that starts with n known tokens (the newest one not yet seen by the target):

    draft   catches up on its true rows up to n-2, guesses there, and feeds itself further: a chain or a tree of drafts
    target  one forward over [x_{n-1}, drafts]; the drafts that it would have written itself stay, plus one token of its own
    both    forget what was rejected: its columns stay in the cache, but no later row may look at them

Prompts of a batch advance by different lengths. Whatever the draft says, at temperature 0 the tokens are the target's own
greedy ones (`proof` shows that on another path), and above it they are distributed as the target's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from eagle3lib.acceptance import Round, Shape
from eagle3lib.draft import Draft
from eagle3lib.drafter import Drafter
from eagle3lib.errors import Eagle3Error
from eagle3lib.verifier import Verifier


@dataclass
class Times:
    """Seconds of one or more loops. `total` includes what the parts leave out: Python and bookkeeping."""

    prefill: float = 0.0  # target and draft over the prompts, first guesses included
    draft: float = 0.0  # catching up and guessing, in all later rounds
    verify: float = 0.0  # target forwards of all rounds
    total: float = 0.0
    forwards: int = 0  # verifications; one serves every prompt of the batch
    rounds: int = 0
    tokens: int = 0  # emitted by rounds
    device: torch.device = torch.device("cpu")

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self.device.type == "cuda":  # kernels run behind; without this one part pays for another
            torch.cuda.synchronize(self.device)
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    def add(self, other: Times) -> None:
        for name, value in vars(other).items():
            if name != "device":
                setattr(self, name, getattr(self, name) + value)

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / max(self.total - self.prefill, 1e-9)

    @property
    def efficiency(self) -> float:
        """Speed over the speed that acceptance and step times allow: below 1 by what the loop itself costs."""
        return (self.draft + self.verify) / max(self.total - self.prefill, 1e-9)


@dataclass
class Reply:
    """`tokens` with the end-of-turn token if it came; `finish` is "eos" or "limit"."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str = ""


def end_ids(target: Any) -> set[int]:
    """The ids at which the target ends a turn, from its generation config, else its config."""
    for config in (getattr(target, "generation_config", None), target.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return set()


def generate(target: torch.nn.Module, draft: Draft, prompts: Sequence[list[int]], *, shape: Shape, max_new_tokens: int,
             ends: set[int] | None = None, temperature: float = 0.0, seed: int = 0,
             on_tokens: Callable[[int], object] = lambda n: None) -> tuple[list[Reply], Times]:
    """Answer all `prompts` at once; replies in the order of the prompts.

    A reply stops at an id of `ends` (default: the target's) or at `max_new_tokens`; a last round that the limit cut is
    marked "limit". Above `temperature` 0 target and draft both draw, from `seed`, and the shape must be a chain.
    `on_tokens` hears after each verification how many tokens it brought. Raises Eagle3Error for an empty prompt, one that
    leaves no room in the target's context, or a target or shape that cannot be run here.
    """
    if temperature < 0 or (temperature and shape.topk > 1):
        raise Eagle3Error(f"speculate: temperature {temperature} with a {shape}; above temperature 0 draft a chain, never below 0")
    for prompt in prompts:
        _require_room(target, len(prompt), max_new_tokens, shape.steps)
    loop = Loop.of(target, draft, prompts, shape, temperature, seed)
    with torch.inference_mode(), loop.times.measure("total"):
        loop.run(max_new_tokens, end_ids(target) if ends is None else ends, on_tokens)
    loop.times.rounds = sum(len(r.rounds) for r in loop.replies)
    loop.times.tokens = sum(len(r.tokens) - 1 for r in loop.replies)
    return loop.replies, loop.times


@dataclass
class Loop:
    """The rounds of one batch. `live`: the prompts whose reply goes on; the caches hold only those."""

    prompts: Sequence[list[int]]
    verifier: Verifier
    drafter: Drafter
    times: Times
    replies: list[Reply]
    live: list[int]

    @classmethod
    def of(cls, target: torch.nn.Module, draft: Draft, prompts: Sequence[list[int]], shape: Shape, temperature: float, seed: int) -> Loop:
        device, own = next(target.parameters()).device, draft.fc.weight.device
        coins = torch.Generator(device).manual_seed(seed)
        others = coins if own == device else torch.Generator(own).manual_seed(seed + 1)
        return cls(prompts, Verifier(target, draft.cfg.aux_layers, temperature, coins), Drafter(draft, shape, temperature, others),
                   Times(device=device), [Reply() for _ in prompts], list(range(len(prompts))))

    def run(self, limit: int, ends: set[int], on_tokens: Callable[[int], object]) -> None:
        with self.times.measure("prefill"):
            first, aux_BNA = self.verifier.prefill(self.prompts)
        fresh = [[*prompt[1:], token] for prompt, token in zip(self.prompts, first, strict=True)]  # each true row's next token
        for reply, token in zip(self.replies, first, strict=True):
            reply.tokens.append(token)
        while stay := [j for j, i in enumerate(self.live) if not _finish(self.replies[i], ends, limit)]:
            if len(stay) < len(self.live):
                fresh, aux_BNA = [fresh[j] for j in stay], aux_BNA[stay]
                self._select(stay)
            with self.times.measure("draft" if self.times.forwards else "prefill"):
                drafts = self.drafter.propose(aux_BNA, fresh)
            with self.times.measure("verify"):
                fresh, aux_BNA = self.verifier.verify([self.replies[i].tokens[-1] for i in self.live], drafts)
            self.times.forwards += 1
            on_tokens(sum(_emit(self.replies[i], len(self.prompts[i]), emitted, ends, limit)
                          for i, emitted in zip(self.live, fresh, strict=True)))

    def _select(self, stay: list[int]) -> None:
        self.live = [self.live[j] for j in stay]
        self.verifier.select(stay)
        self.drafter.select(stay)


def _emit(reply: Reply, prompt: int, emitted: list[int], ends: set[int], limit: int) -> int:
    """Append a round's tokens, cut behind an end of turn or at `limit` tokens in all; how many they are."""
    left, context = limit - len(reply.tokens), prompt + len(reply.tokens)
    length = next((i + 1 for i, token in enumerate(emitted) if token in ends), len(emitted))
    if length > left:
        reply.rounds.append(Round(context, left - 1, "limit", beyond=length - left))
    else:
        reply.rounds.append(Round(context, length - 1, "eos" if emitted[length - 1] in ends else ""))
    reply.tokens += emitted[: min(length, left)]
    return min(length, left)


def _finish(reply: Reply, ends: set[int], limit: int) -> str:
    reply.finish = "eos" if reply.tokens[-1] in ends else "limit" if len(reply.tokens) >= limit else ""
    return reply.finish


def _require_room(target: Any, prompt: int, new: int, steps: int) -> None:
    config = target.config.get_text_config()
    if not prompt:
        raise Eagle3Error("speculate: an empty prompt; give at least one token")
    if new < 1:
        raise Eagle3Error(f"speculate: max_new_tokens is {new}; it must be at least 1")
    if prompt + new + steps > config.max_position_embeddings:
        raise Eagle3Error(f"speculate: {prompt} prompt + {new} new + {steps} draft tokens exceed the target's context of "
                          f"{config.max_position_embeddings}; shorten the prompt or the reply")
    if other := set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        raise Eagle3Error(f"speculate: the target has layers of type {', '.join(sorted(other))}; this loop can only take back rejected "
                          "tokens of full attention. Measure the acceptance of this target in SGLang instead")
