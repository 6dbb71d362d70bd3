"""Acceptance: how many tokens one target forward yields, defined once for every figure of the project.

A round is one verification: the draft proposes K tokens in a chain, the target accepts a leading part of them and adds
one token of its own. Everything here is arithmetic on counts; no torch.

Legend: P prompts, K draft tokens a round; survival[k] is the share of rounds that accept more than k drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from eagle3lib.errors import ParamError

DEFINITIONS = """\
Each round the draft proposes tokens up to K places ahead, and the target verifies them all in one forward. A chain proposes one token a
place; a tree several, and keeps the branch that the target follows. A tree accepts more than a chain of the same weights: every figure says
which it is. Temperature 0 unless said.
- accepted: leading drafts equal to the target's own greedy token. The first miss ends the round, whatever follows it;
  a target token outside the draft vocabulary is a miss. (Above temperature 0: drafts that exact rejection sampling keeps.)
- acceptance length: tokens emitted per round = accepted drafts + 1 (the target's own token), between 1 and K+1. 1 = a useless draft.
- acceptance rate: accepted drafts / K.
- survival at position k: share of rounds whose first k drafts were all accepted (joint); 1 + sum of survivals = acceptance length.
- The round in which the reply ends counts the tokens it emitted. The round that the token limit cuts counts whole: left out, it
  would take long rounds away more often than short ones.
- simulated: the joint hits of a chain, teacher-forced at every reply row. measured: counted in a real draft-and-verify loop, where rounds
  start behind misses. served: SGLang's own tokens and verify steps of each request, without the first token, which its prefill writes.
- Intervals: 95 %, bootstrap over prompts (a prompt's rounds are not independent). One prompt says nothing about others: its interval is
  everything that can be, 1 to K+1.
"""

USELESS_LENGTH = 1.05  # below this, drafting cannot pay for its own forward passes
RESAMPLES = 2000


@dataclass(frozen=True)
class Shape:
    """What is drafted in a round. `steps`: places ahead (K); `topk`: drafts a place; `tokens`: verified a round, the newest known one
    included, as engines count. A chain has topk 1 and verifies steps + 1. ParamError on a shape that cannot be."""

    steps: int
    topk: int = 1
    tokens: int = 0  # 0: a chain's steps + 1

    def __post_init__(self) -> None:
        if self.steps < 1 or self.topk < 1:
            raise ParamError(f"draft shape: {self.steps} steps and top-{self.topk}; both must be at least 1")
        most = self.topk + (self.steps - 1) * self.topk**2  # what a tree of this depth ever looks at
        tokens = self.tokens or self.steps + 1
        if self.topk == 1 and tokens != self.steps + 1:
            raise ParamError(f"draft shape: a chain of {self.steps} steps verifies {self.steps + 1} tokens, not {tokens}")
        if not self.steps + 1 <= tokens <= most + 1:
            raise ParamError(f"draft shape: a tree of {self.steps} steps, top-{self.topk}, verifies between {self.steps + 1} and {most + 1} "
                             f"tokens, not {tokens}")
        object.__setattr__(self, "tokens", tokens)

    def __str__(self) -> str:
        return f"chain of {self.steps}" if self.topk == 1 else f"tree of depth {self.steps}, top-{self.topk}, {self.tokens} tokens"


def shape(steps: int, topk: int, tokens: int) -> Shape:
    """A chain when topk is 1, whatever `tokens`; else the tree."""
    return Shape(steps) if topk == 1 else Shape(steps, topk, tokens)


class Round(NamedTuple):
    """One verification. `context` is the number of tokens known before it; `end` is "", "eos" or "limit"."""

    context: int
    accepted: int  # drafts that entered the output before the round's own last token, 0..K
    end: str = ""
    beyond: int = 0  # accepted as well, but cut off by the token limit (end is "limit")


@dataclass(frozen=True)
class Acceptance:
    """Acceptance over a set of prompts. low/high bound the length at 95 %; survival has one value per draft position."""

    prompts: int
    rounds: int  # for a simulated figure: supervised rows
    steps: int
    length: float
    low: float
    high: float
    rate: float
    survival: list[float]
    survival_low: list[float]
    survival_high: list[float]
    censored: int = 0  # rounds that the token limit cut; they count whole

    @property
    def record(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.length:.2f} [{self.low:.2f}, {self.high:.2f}]"


def measured(rounds: Sequence[Sequence[Round]], steps: int, *, seed: int = 0) -> Acceptance:
    """Acceptance of a real loop: `rounds[p]` are the rounds of prompt p, each of `steps` drafts.

    Raises ValueError for an accepted count outside 0..steps.
    """
    accepted = [np.array([r.accepted + r.beyond for r in prompt], dtype=np.int64) for prompt in rounds]
    for p, counts in enumerate(accepted):
        if counts.size and not 0 <= counts.min() <= counts.max() <= steps:
            raise ValueError(f"prompt {p}: accepted counts {counts.min()}..{counts.max()} lie outside 0..{steps}")
    survived_PK = np.array([[(counts > k).sum() for k in range(steps)] for counts in accepted]).reshape(-1, steps)
    rounds_PK = np.array([[counts.size] * steps for counts in accepted]).reshape(-1, steps)
    censored = sum(r.end == "limit" for prompt in rounds for r in prompt)
    return from_counts(survived_PK, rounds_PK, seed=seed, censored=censored)


def from_counts(hits_PK: np.ndarray, tried_PK: np.ndarray, *, seed: int = 0, censored: int = 0) -> Acceptance:
    """Acceptance from joint hits: of `tried_PK[p, k]` chains of prompt p, `hits_PK[p, k]` survive through position k.

    Both [P, K]. The length is 1 + sum_k hits/tried with the sums taken over prompts first: long replies weigh more, as
    they do in an engine's count of completion tokens per verification. A position never tried survives with share 0.
    """
    hits_PK, tried_PK = np.asarray(hits_PK, dtype=np.int64), np.asarray(tried_PK, dtype=np.int64)
    if (hits_PK > tried_PK).any() or (np.diff(hits_PK, axis=1) > 0).any():
        raise ValueError("joint hits must not exceed the tries, nor grow with the position")
    prompts, steps = hits_PK.shape
    survival_K = _share(hits_PK.sum(0), tried_PK.sum(0))
    low, high, low_K, high_K = _intervals(hits_PK, tried_PK, seed)
    return Acceptance(prompts, int(tried_PK[:, :1].sum()), steps, float(1 + survival_K.sum()), low, high,
                      float(_share(hits_PK.sum(), tried_PK.sum())), survival_K.tolist(), low_K, high_K, censored)


def counted(tokens_P: Sequence[int], rounds_P: Sequence[int], steps: int, *, seed: int = 0) -> Acceptance:
    """Acceptance from totals alone, as an engine reports them: tokens emitted by rounds, and rounds, of each prompt. No survival.

    Raises ValueError for totals that no `steps` drafts a round can give.
    """
    tokens, rounds = np.asarray(tokens_P, dtype=np.int64), np.asarray(rounds_P, dtype=np.int64)
    if (tokens < rounds).any() or (tokens > rounds * (steps + 1)).any():
        p = int(((tokens < rounds) | (tokens > rounds * (steps + 1))).argmax())
        raise ValueError(f"prompt {p}: {tokens[p]} tokens in {rounds[p]} rounds lie outside 1..{steps + 1} a round")
    low, high = float("nan"), float("nan")
    if (rounds > 0).sum() > 1:
        drawn = _drawn(len(tokens), seed)
        low, high = np.percentile(1 + _share(drawn @ (tokens - rounds), drawn @ rounds), [2.5, 97.5])
    elif len(tokens):
        low, high = 1.0, steps + 1.0
    length = float(1 + _share((tokens - rounds).sum(), rounds.sum()))
    return Acceptance(len(tokens), int(rounds.sum()), steps, length, float(low), float(high), (length - 1) / steps, [], [], [])


def _drawn(prompts: int, seed: int) -> np.ndarray:
    """[RESAMPLES, P]: how often each prompt is in each bootstrap sample."""
    return np.random.default_rng(seed).multinomial(prompts, [1 / max(prompts, 1)] * prompts, size=RESAMPLES)


def _share(hits: Any, tried: Any) -> np.ndarray:
    return np.asarray(hits / np.maximum(tried, 1))


def _intervals(hits_PK: np.ndarray, tried_PK: np.ndarray, seed: int) -> tuple[float, float, list[float], list[float]]:
    """95 % percentile bootstrap over prompts of the length and of each survival; all that can be, where fewer than two were tried."""
    prompts, steps = hits_PK.shape
    if prompts == 0:
        return float("nan"), float("nan"), [float("nan")] * steps, [float("nan")] * steps
    if tried_PK.any(axis=1).sum() < 2:
        return 1.0, steps + 1.0, [0.0] * steps, [1.0] * steps
    drawn = _drawn(prompts, seed)
    survival_BK = _share(drawn @ hits_PK, drawn @ tried_PK)
    low_K, high_K = np.percentile(survival_BK, [2.5, 97.5], axis=0)
    low, high = np.percentile(1 + survival_BK.sum(1), [2.5, 97.5])
    return float(low), float(high), low_K.tolist(), high_K.tolist()


def buckets(edges: Sequence[int]) -> list[tuple[str, int, int]]:
    """(name, low, high) of half-open buckets; `edges` are the lower bounds, the first bucket starts at 0."""
    bounds = [0, *edges, 10**9]
    return [(f"{low}+" if high == bounds[-1] else f"{low}-{high - 1}", low, high) for low, high in zip(bounds, bounds[1:], strict=False)]


def by_context(rounds: Sequence[Sequence[Round]], steps: int, edges: Sequence[int], *, seed: int = 0) -> dict[str, Acceptance]:
    """Measured acceptance in buckets of context length (see `buckets`)."""
    found: dict[str, Acceptance] = {}
    for name, low, high in buckets(edges):
        inside = [[r for r in prompt if low <= r.context < high] for prompt in rounds]
        if any(inside):
            found[name] = measured([p for p in inside if p], steps, seed=seed)
    return found


def verdict(figure: Acceptance) -> tuple[str, str]:
    """("useful" | "unclear" | "useless", one sentence). Useless: even the upper bound of the interval is no gain."""
    found = f"acceptance length {figure} over {figure.prompts} prompts and {figure.rounds:,} rounds"
    if not figure.rounds:
        return "unclear", "no complete round was measured; raise eval_tokens"
    if figure.high <= USELESS_LENGTH:
        return "useless", f"{found}: even the upper bound is not above {USELESS_LENGTH}, this draft would slow the server down"
    if figure.low <= USELESS_LENGTH:
        return "unclear", f"{found}: the interval reaches down to no gain ({USELESS_LENGTH}); measure more prompts or train longer"
    return "useful", found
