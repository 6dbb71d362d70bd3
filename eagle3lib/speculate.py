"""Draft and verify: lossless greedy speculative decoding in plain PyTorch, a few prompts in lockstep, KV caches on both sides.

Legend: B prompts, n tokens known so far of a prompt, K drafts a round, N rows of one forward, S cached columns,
A captured layers, H hidden size, V vocabulary.

Row i of the draft joins the target's states of token i with token i+1 and guesses token i+2, at RoPE position i. So a
round that starts with n known tokens (the newest one not yet seen by the target):

    draft   catches up on its true rows up to n-2, guesses d_1 there, and feeds itself K-1 times for d_2 .. d_K
    target  one forward over [x_{n-1}, d_1 .. d_K]; the leading d that equal its own argmax are accepted, plus one token of its own
    both    forget what was rejected: its columns stay in the cache, but no later row may look at them

Prompts of a batch advance by different lengths; columns that hold nothing true for a prompt are masked, and positions
are given explicitly, so each prompt sees what it would see alone. Whatever the draft says, the tokens are the target's
own greedy ones; `prove` shows that on another path.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache

from eagle3lib.acceptance import Round
from eagle3lib.batches import document
from eagle3lib.draft import Draft, KeyValue
from eagle3lib.errors import Eagle3Error
from eagle3lib.loss import simulate
from eagle3lib.store import Sample, sample_id

NEAR_TIE = 1e-3  # nats; logits closer than this may swap between two float32 kernels


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

    @contextmanager
    def measure(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        setattr(self, part, getattr(self, part) + time.perf_counter() - start)

    def add(self, other: Times) -> None:
        for name, value in vars(other).items():
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


def end_ids(target: torch.nn.Module) -> set[int]:
    """The ids at which the target ends a turn, from its generation config, else its config."""
    for config in (getattr(target, "generation_config", None), target.config):
        ids = getattr(config, "eos_token_id", None)
        if ids is not None:
            return {ids} if isinstance(ids, int) else set(ids)
    return set()


def generate(target: torch.nn.Module, draft: Draft, prompts: Sequence[list[int]], *, steps: int, max_new_tokens: int,
             ends: set[int] | None = None, on_tokens: Callable[[int], object] = lambda n: None) -> tuple[list[Reply], Times]:
    """Answer all `prompts` at once, greedily, with chains of `steps` drafts; replies in the order of the prompts.

    A reply stops at an id of `ends` (default: the target's) or at `max_new_tokens`; a last round that the limit cut is
    marked "limit". `on_tokens` hears after each verification how many tokens it brought. Raises Eagle3Error for an empty
    prompt, or one that leaves no room in the target's context.
    """
    for prompt in prompts:
        _require_room(target, len(prompt), max_new_tokens, steps)
    times = Times()
    with torch.inference_mode(), times.measure("total"):
        replies = _loop(target, draft, prompts, steps, max_new_tokens, end_ids(target) if ends is None else ends, times, on_tokens)
    times.rounds = sum(len(r.rounds) for r in replies)
    times.tokens = sum(len(r.tokens) - 1 for r in replies)
    return replies, times


def _loop(target: torch.nn.Module, draft: Draft, prompts: Sequence[list[int]], steps: int, limit: int, ends: set[int],
          times: Times, on_tokens: Callable[[int], object]) -> list[Reply]:
    verifier, drafter = Verifier(target, draft.cfg.aux_layers), Drafter(draft)
    replies, live = [Reply() for _ in prompts], list(range(len(prompts)))
    with times.measure("prefill"):
        first, aux_BNA = verifier.prefill(prompts)
    fresh = [[*prompt[1:], token] for prompt, token in zip(prompts, first, strict=True)]  # each true row's next token
    for reply, token in zip(replies, first, strict=True):
        reply.tokens.append(token)
    while True:
        stay = [j for j, i in enumerate(live) if not _finish(replies[i], ends, limit)]
        if not stay:
            return replies
        if len(stay) < len(live):
            live, fresh, aux_BNA = [live[j] for j in stay], [fresh[j] for j in stay], aux_BNA[stay]
            verifier.select(stay)
            drafter.select(stay)
        with times.measure("draft" if times.forwards else "prefill"):
            guesses_BK = drafter.propose(aux_BNA, fresh, steps)
        with times.measure("verify"):
            newest = [replies[i].tokens[-1] for i in live]
            own_BN, accepted, aux_BNA = verifier.verify(newest, guesses_BK)
        times.forwards += 1
        fresh = [own_BN[j][: a + 1] for j, a in enumerate(accepted)]
        on_tokens(sum(_emit(replies[i], len(prompts[i]), emitted, ends, limit) for i, emitted in zip(live, fresh, strict=True)))


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


def _require_room(target: torch.nn.Module, prompt: int, new: int, steps: int) -> None:
    config = target.config.get_text_config()
    if not prompt:
        raise Eagle3Error("speculate: an empty prompt; give at least one token")
    if new < 1 or steps < 1:
        raise Eagle3Error(f"speculate: max_new_tokens {new} and draft steps {steps} must be at least 1")
    if prompt + new + steps > config.max_position_embeddings:
        raise Eagle3Error(f"speculate: {prompt} prompt + {new} new + {steps} draft tokens exceed the target's context of "
                          f"{config.max_position_embeddings}; shorten the prompt or the reply")
    if other := set(getattr(config, "layer_types", None) or []) - {"full_attention"}:
        raise Eagle3Error(f"speculate: the target has layers of type {', '.join(sorted(other))}; this loop can only take back rejected "
                          "tokens of full attention. Measure the acceptance of this target in SGLang instead")


class Verifier:
    """The target with its cache. `true` bool [B, S]: the column holds a token that belongs to the prompt's text."""

    def __init__(self, target: torch.nn.Module, layers: Sequence[int]):
        self.target, self.layers, self.cache = target, tuple(layers), DynamicCache()
        self.device = next(target.parameters()).device

    def prefill(self, prompts: Sequence[list[int]]) -> tuple[list[int], Tensor]:
        """The first token of each reply, and aux [B, N, A*H] of the prompts (right-padded, so padding is never seen)."""
        lengths = [len(p) for p in prompts]
        ends, place = torch.tensor(lengths).unique(return_inverse=True)  # lm_head only where some prompt ends
        ids_BN = padded(prompts).to(self.device)
        logits, aux_BNA, _ = states(self.target, ids_BN, self.layers, cache=self.cache, keep=(ends - 1).to(self.device))
        self.true = (torch.arange(ids_BN.shape[1]) < torch.tensor(lengths)[:, None]).to(self.device)
        return logits[torch.arange(len(prompts)), place].argmax(-1).tolist(), aux_BNA

    def verify(self, newest: list[int], guesses_BK: Tensor) -> tuple[list[list[int]], list[int], Tensor]:
        """The target's own tokens [B, K+1] behind each prefix, how many guesses they accept [B], aux [B, K+1, A*H]."""
        ids_BN = torch.cat([torch.tensor(newest, device=self.device)[:, None], guesses_BK.to(self.device)], dim=1)
        n = ids_BN.shape[1]
        chain = torch.ones(n, n, dtype=torch.bool, device=self.device).tril().expand(len(newest), n, n)
        seen_BNS = torch.cat([self.true[:, None].expand(-1, n, -1), chain], dim=2)
        positions_BN = self.true.sum(1, keepdim=True) + torch.arange(n, device=self.device)
        logits, aux_BNA, _ = states(self.target, ids_BN, self.layers, cache=self.cache, positions=positions_BN, seen=seen_BNS, keep=n)
        own_BN = logits.argmax(-1)
        accepted_B = (own_BN[:, :-1] == ids_BN[:, 1:]).cumprod(1).sum(1)
        self.true = torch.cat([self.true, torch.arange(n, device=self.device) <= accepted_B[:, None]], dim=1)
        self._squeeze()
        return own_BN.tolist(), accepted_B.tolist(), aux_BNA

    def select(self, rows: list[int]) -> None:
        """Keep only these prompts."""
        self.cache.batch_select_indices(torch.tensor(rows, device=self.device))
        self.true = self.true[rows]

    def _squeeze(self) -> None:
        """Move true columns together once most of the cache is rejected drafts."""
        longest = int(self.true.sum(1).max())
        if self.true.shape[1] < 2 * longest + 64:
            return
        order_BS = self.true.int().argsort(dim=1, descending=True, stable=True)[:, :longest]
        self.true = self.true.gather(1, order_BS)
        for layer in self.cache.layers:
            index = order_BS[:, None, :, None].expand(-1, layer.keys.shape[1], -1, layer.keys.shape[3])
            layer.keys, layer.values = layer.keys.gather(2, index), layer.values.gather(2, index)


class Drafter:
    """The draft with its cache of true rows. `true` bool [B, S]: the column is a row of the prompt's own, no padding."""

    def __init__(self, draft: Draft):
        self.draft, self.past = draft, None
        self.device = draft.fc.weight.device

    def propose(self, aux_BNA: Tensor, fresh: Sequence[list[int]], steps: int) -> Tensor:
        """Catch up on true rows, then guess: target ids [B, K].

        fresh[b]: the tokens after the new true rows of prompt b; its states are the first len(fresh[b]) of aux_BNA [B, N, A*H].
        """
        counts_B1 = torch.tensor([[len(f)] for f in fresh], device=self.device)
        ids_BN = padded(fresh).to(self.device)
        batch, n = ids_BN.shape
        old = torch.zeros(batch, 0, dtype=torch.bool, device=self.device) if self.past is None else self.true
        positions_BN = old.sum(1, keepdim=True) + torch.arange(n, device=self.device)
        self.true = torch.cat([old, torch.arange(n, device=self.device) < counts_B1], dim=1)
        # Padding sits behind the true rows, so causality hides it from them; it sees itself and stays finite.
        seen_BNS = torch.cat([old[:, None].expand(-1, n, -1), torch.ones(batch, n, n, dtype=torch.bool, device=self.device)], dim=2)
        hidden_BNH = self.draft.fuse(aux_BNA[:, :n].to(self.device, self.draft.fc.weight.dtype))
        out_BNH, self.past = self.draft.layer(self.draft.embed(ids_BN), hidden_BNH, positions_BN, self.past, seen_BNS)
        rows = torch.arange(batch, device=self.device)[:, None]
        return self._chain(out_BNH[rows, counts_B1 - 1], positions_BN.gather(1, counts_B1 - 1), steps)

    def _chain(self, out_B1H: Tensor, position_B1: Tensor, steps: int) -> Tensor:
        past: KeyValue = self.past
        guesses, seen = [], self.true
        for k in range(steps):
            if k:
                seen = torch.cat([seen, torch.ones_like(position_B1, dtype=torch.bool)], dim=1)
                out_B1H, past = self.draft.layer(self.draft.embed(guesses[-1]), out_B1H, position_B1 + k, past, seen[:, None])
            guesses.append(self.draft.to_target(self.draft.logits(out_B1H).argmax(-1)))
        return torch.cat(guesses, dim=1)

    def select(self, rows: list[int]) -> None:
        """Keep only these prompts."""
        if self.past is not None:
            self.past, self.true = (self.past[0][rows], self.past[1][rows]), self.true[rows]


def padded(lists: Sequence[list[int]]) -> Tensor:
    """int64 [B, N], zeros behind the shorter ones."""
    longest = max(map(len, lists))
    return torch.tensor([[*x, *[0] * (longest - len(x))] for x in lists])


def states(target: torch.nn.Module, ids_BN: Tensor, layers: Sequence[int], *, cache: DynamicCache | None = None, keep: int | Tensor = 1,
           positions: Tensor | None = None, seen: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """One target forward: logits [B, keep, V] (of the last `keep` rows, or of the listed ones), aux [B, N, A*H], last hidden [B, N, H].

    aux are the residual streams r_k that enter the `layers` k, in their order (transformers: hidden_states[k], k < L).
    `seen` bool [B, N, S+N] says which columns a row attends to; causal when None.
    """
    mask = None
    if seen is not None:  # additive, which every attention implementation of transformers takes
        dtype = next(target.parameters()).dtype
        mask = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[:, None]
    seen_by = target(ids_BN, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=cache is not None,
                     output_hidden_states=True, logits_to_keep=keep)
    return seen_by.logits, torch.cat([seen_by.hidden_states[k] for k in layers], dim=-1), seen_by.hidden_states[-1]


# Proof -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mismatch:
    """The first reply token that is not the target's own. `margin`: by how many nats the target prefers its own."""

    position: int  # within the reply
    found: int
    expected: int
    margin: float

    @property
    def near_tie(self) -> bool:
        return self.margin < NEAR_TIE

    def __str__(self) -> str:
        kind = "a numerical near-tie" if self.near_tie else "no near-tie: a real difference"
        return f"reply token {self.position} is {self.found}, the target alone says {self.expected}, by {self.margin:.2g} nats ({kind})"


@dataclass(frozen=True)
class Proof:
    """What one cacheless forward over prompt + reply shows. `sample.hidden` is [T, A+1, H] in the target's dtype."""

    sample: Sample
    mismatch: Mismatch | None
    smallest_margin: float  # nats between the target's first and second choice, over the reply


@torch.inference_mode()
def prove(target: torch.nn.Module, prompt: list[int], reply: list[int], layers: Sequence[int]) -> Proof:
    """Is `reply` the target's own greedy answer? One forward over everything, without cache, drafts, batch or mask.

    If each token is the argmax behind all tokens before it, the reply is the greedy one, by induction. The forward's
    hidden states come along as a sample, so teacher-forced figures cost nothing more.
    """
    ids = torch.tensor(prompt + reply)
    device = next(target.parameters()).device
    logits, aux, last = (t[0].cpu() for t in states(target, ids[None].to(device), layers, keep=len(reply) + 1))
    top = logits[:-1].topk(2, dim=-1)
    wrong = (top.indices[:, 0] != torch.tensor(reply)).nonzero().flatten().tolist()
    mismatch = None
    if wrong:
        i = wrong[0]
        mismatch = Mismatch(i, reply[i], int(top.indices[i, 0]), float(top.values[i, 0] - logits[i, reply[i]]))
    mask = torch.arange(len(ids)) >= len(prompt)
    hidden = torch.cat([aux.unflatten(-1, (len(layers), -1)), last[:, None]], dim=1)
    return Proof(Sample(sample_id(ids, mask), ids, mask, hidden), mismatch, float((top.values[:, 0] - top.values[:, 1]).min()))


@torch.inference_mode()
def teacher_forced(draft: Draft, sample: Sample, steps: int) -> tuple[Tensor, Tensor]:
    """(hits, known), bool [M, K], over the rows of a proven reply; M is one less than its tokens (see loss.simulate)."""
    batch = document(sample)
    if not len(batch):
        return torch.zeros(0, steps, dtype=torch.bool), torch.zeros(0, steps, dtype=torch.bool)
    batch.greedy = sample.input_ids[batch.row + 2]  # proven: the next token is the target's own choice
    hits, known = simulate(draft, batch.to(draft.fc.weight.device), steps)
    return hits.cpu(), known.cpu()


def replay(hits: Tensor, known: Tensor, context: int, finish: str) -> list[Round]:
    """The rounds that teacher-forced hits [M, K] predict: start at the first row, jump by what is accepted plus one.

    `context`: tokens known before the first round (prompt + 1). Must equal the measured rounds: the draft then saw the
    same states, and every proposal and rejection fell as training counts them.
    """
    accepted_M = (hits & known).cumprod(1).sum(1).tolist()
    rounds, m = [], 0
    while m < len(accepted_M):
        left = len(accepted_M) - m
        ends = finish if accepted_M[m] >= left else "eos" if finish == "eos" and accepted_M[m] + 1 == left else ""
        rounds.append(Round(context + m, min(accepted_M[m], left - 1), ends))
        m += accepted_M[m] + 1
    return rounds
