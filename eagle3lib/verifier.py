"""Verifier: the target with its KV cache. One forward over a round's drafts, a chain or a tree of them, accepts and rejects.

Legend: B prompts, N drafts of a round, R = N + 1 rows of the forward (row 0 is the newest known token, which the target has not
seen yet), S cached columns, A captured layers, H hidden size, V vocabulary.

A draft's parent is a row before it; a row attends to what is known, to its ancestors and to itself. Columns that hold
nothing true for a prompt stay masked, and positions are given explicitly, so each prompt sees what it would see alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass
class Drafts:
    """What a draft proposes for a round."""

    tokens_BN: Tensor  # int64 target ids
    parents_BN: Tensor | None = None  # int64 row of each draft's parent, below its own (0: the newest known token); None: a chain
    probs_BNV: Tensor | None = None  # the distribution each was drawn from, over the target's vocabulary; None: greedy

    def family(self) -> tuple[Tensor, Tensor]:
        """(parent row [B, R], ancestors and self bool [B, R, R]); row 0 is its own parent."""
        batch, n = self.tokens_BN.shape
        device = self.tokens_BN.device
        parents_BN = torch.arange(n, device=device).expand(batch, n) if self.parents_BN is None else self.parents_BN
        parents_BR = torch.cat([parents_BN.new_zeros(batch, 1), parents_BN], dim=1)
        if self.parents_BN is None:
            return parents_BR, torch.ones(n + 1, n + 1, dtype=torch.bool, device=device).tril().expand(batch, -1, -1)
        kin_BRR = torch.eye(n + 1, device=device).expand(batch, -1, -1)
        step_BRR = torch.zeros(batch, n + 1, n + 1, device=device).scatter_(2, parents_BR[:, :, None], 1.0)
        reach = 1
        while reach <= n:  # who can be reached in up to `reach` steps towards row 0; doubles
            kin_BRR = (kin_BRR + kin_BRR @ step_BRR).clamp(max=1)
            step_BRR, reach = step_BRR @ step_BRR, 2 * reach
        return parents_BR, kin_BRR.bool()


class Verifier:
    """`true` bool [B, S]: the column holds a token that belongs to the prompt's text.

    temperature 0: greedy. Above: exact rejection sampling of chains (Leviathan et al., arXiv 2211.17192), by `generator`.
    """

    def __init__(self, target: torch.nn.Module, layers: Sequence[int], temperature: float = 0.0, generator: torch.Generator | None = None):
        self.target, self.layers, self.cache = target, tuple(layers), DynamicCache()
        self.temperature, self.generator = temperature, generator
        self.device = next(target.parameters()).device

    def prefill(self, prompts: Sequence[list[int]]) -> tuple[list[int], Tensor]:
        """The first token of each reply, and aux [B, N, A*H] of the prompts (right-padded, so padding is never seen)."""
        lengths = [len(p) for p in prompts]
        ends, place = torch.tensor(lengths).unique(return_inverse=True)  # lm_head only where some prompt ends
        ids_BN = padded(prompts).to(self.device)
        logits, aux_BNA, _ = states(self.target, ids_BN, self.layers, cache=self.cache, keep=(ends - 1).to(self.device))
        self.true = (torch.arange(ids_BN.shape[1]) < torch.tensor(lengths)[:, None]).to(self.device)
        last_BV = logits[torch.arange(len(prompts)), place]
        first_B = sample(self.probabilities(last_BV), self.generator) if self.temperature else last_BV.argmax(-1)
        return first_B.tolist(), aux_BNA

    def verify(self, newest: list[int], drafts: Drafts) -> tuple[list[list[int]], Tensor]:
        """Each prompt's accepted drafts and the target's own token behind them, and aux [B, P, A*H] of newest and accepted ones."""
        ids_BR = torch.cat([torch.tensor(newest, device=self.device)[:, None], drafts.tokens_BN.to(self.device)], dim=1)
        parents_BR, kin_BRR = (t.to(self.device) for t in drafts.family())
        rows = ids_BR.shape[1]
        seen_BRS = torch.cat([self.true[:, None].expand(-1, rows, -1), kin_BRR], dim=2)
        positions_BR = self.true.sum(1, keepdim=True) + kin_BRR.sum(2) - 1
        logits, aux_BRA, _ = states(self.target, ids_BR, self.layers, cache=self.cache, positions=positions_BR, seen=seen_BRS, keep=rows)
        own_BR, kept_BR = self._judge(logits, ids_BR, parents_BR, kin_BRR, drafts)
        self.true = torch.cat([self.true, kept_BR], dim=1)
        self._squeeze()
        counts_B = kept_BR.sum(1)
        path_BP = kept_BR.int().argsort(dim=1, descending=True, stable=True)[:, : int(counts_B.max())]
        tokens = [t[:n] for t, n in zip(own_BR.gather(1, path_BP).tolist(), counts_B.tolist(), strict=True)]
        return tokens, aux_BRA.gather(1, path_BP[:, :, None].expand(-1, -1, aux_BRA.shape[2]))

    def _judge(self, logits_BRV: Tensor, ids_BR: Tensor, parents_BR: Tensor, kin_BRR: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """(the token behind each row [B, R], rows that stay bool [B, R]). Behind a row that stays stands the next one that stays,
        or the target's own token."""
        if self.temperature:
            return self._sample(logits_BRV, ids_BR, drafts)
        own_BR = logits_BRV.argmax(-1)
        wrong_BR = own_BR.gather(1, parents_BR) != ids_BR
        wrong_BR[:, 0] = False
        return own_BR, ~(kin_BRR & wrong_BR[:, None]).any(2)  # a row stays if neither it nor an ancestor is wrong

    def _sample(self, logits_BRV: Tensor, ids_BR: Tensor, drafts: Drafts) -> tuple[Tensor, Tensor]:
        """A draft x of a chain, drawn from q, stays with probability min(1, p(x) / q(x)); behind the last that stays comes a token
        drawn from max(p - q, 0), or from p when all stayed. The tokens are then distributed as the target's own."""
        if drafts.probs_BNV is None or drafts.parents_BN is not None:
            raise ValueError("above temperature 0 the drafts must be a chain that was drawn, with its distributions")
        p_BRV, q_BNV = self.probabilities(logits_BRV), drafts.probs_BNV.to(self.device)
        drawn_BN1 = ids_BR[:, 1:, None]
        p_BN, q_BN = p_BRV[:, :-1].gather(2, drawn_BN1)[:, :, 0], q_BNV.gather(2, drawn_BN1)[:, :, 0]
        coins_BN = torch.rand(p_BN.shape, device=self.device, dtype=p_BN.dtype, generator=self.generator)
        stays_BN = (coins_BN * q_BN < p_BN).cumprod(1).bool()
        accepted_B1 = stays_BN.sum(1, keepdim=True)
        q_BRV = torch.cat([q_BNV, torch.zeros_like(q_BNV[:, :1])], dim=1)  # behind the last draft nothing was proposed
        at_B1V = accepted_B1[:, :, None].expand(-1, -1, p_BRV.shape[2])
        p_BV, q_BV = p_BRV.gather(1, at_B1V)[:, 0], q_BRV.gather(1, at_B1V)[:, 0]
        own_B = sample(residual(p_BV, q_BV), self.generator)
        own_BR = torch.cat([ids_BR[:, 1:], ids_BR[:, :1]], dim=1).scatter(1, accepted_B1, own_B[:, None])
        return own_BR, torch.cat([torch.ones_like(stays_BN[:, :1]), stays_BN], dim=1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """float64, so that sums over a large vocabulary do not decide who stays."""
        return (logits.double() / self.temperature).softmax(-1)

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
            cached: Any = layer
            index = order_BS[:, None, :, None].expand(-1, cached.keys.shape[1], -1, cached.keys.shape[3])
            cached.keys, cached.values = cached.keys.gather(2, index), cached.values.gather(2, index)


def residual(p_BV: Tensor, q_BV: Tensor) -> Tensor:
    """What a token behind a rejected draft is drawn from: the share of p that drafts drawn from q cannot have brought. Not normalised."""
    rest_BV = (p_BV - q_BV).clamp(min=0)
    return torch.where(rest_BV.sum(1, keepdim=True) > 0, rest_BV, p_BV)  # p = q to the bit: nothing is rejected then


def sample(probs_BV: Tensor, generator: torch.Generator | None) -> Tensor:
    """One id a row, drawn from (unnormalised) probabilities: int64 [B]."""
    return torch.multinomial(probs_BV, 1, generator=generator)[:, 0]


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
