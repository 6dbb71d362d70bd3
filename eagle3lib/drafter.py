"""Drafter: the draft with its KV cache of true rows. Catches up on what the target wrote, then proposes a chain or a tree.

Legend: B prompts, n true rows of a prompt, K steps, k candidates a step (top-k), C candidates of a tree, T tree rows cached, S cached
true columns, D draft vocabulary, V target vocabulary, H hidden size, A captured layers.

Row i joins the target's states of token i with token i+1 and guesses token i+2, at RoPE position i. Guessed rows are fed the
draft's own output in place of the target's states, one position later, and are forgotten after the round.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from eagle3lib.acceptance import Shape
from eagle3lib.draft import Draft, KeyValue
from eagle3lib.verifier import Drafts, padded, sample


class Drafter:
    """`true` bool [B, S]: the column is a row of the prompt's own, no padding. Above temperature 0 it draws, by `generator`."""

    def __init__(self, draft: Draft, shape: Shape, temperature: float = 0.0, generator: torch.Generator | None = None):
        self.draft, self.shape, self.temperature, self.generator = draft, shape, temperature, generator
        self.past: KeyValue | None = None
        self.true: Tensor
        self.device = draft.fc.weight.device

    def propose(self, aux_BNA: Tensor, fresh: Sequence[list[int]]) -> Drafts:
        """Catch up on true rows, then propose.

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
        last = out_BNH[rows, counts_B1 - 1], positions_BN.gather(1, counts_B1 - 1)
        return self._tree(*last) if self.shape.topk > 1 else self._chain(*last)

    def _chain(self, out_B1H: Tensor, position_B1: Tensor) -> Drafts:
        past, seen = self.past, self.true
        tokens: list[Tensor] = []
        probs: list[Tensor] = []
        for k in range(self.shape.steps):
            if k:
                seen = torch.cat([seen, torch.ones_like(position_B1, dtype=torch.bool)], dim=1)
                out_B1H, past = self.draft.layer(self.draft.embed(tokens[-1]), out_B1H, position_B1 + k, past, seen[:, None])
            logits_B1D = self.draft.logits(out_B1H)
            if self.temperature:
                q_BD = (logits_B1D[:, 0].double() / self.temperature).softmax(-1)
                tokens.append(self.draft.to_target(sample(q_BD, self.generator))[:, None])
                probs.append(self._over_target(q_BD))
            else:
                tokens.append(self.draft.to_target(logits_B1D.argmax(-1)))
        return Drafts(torch.cat(tokens, dim=1), None, torch.stack(probs, dim=1) if probs else None)

    def _over_target(self, q_BD: Tensor) -> Tensor:
        """Probabilities over the target's vocabulary [B, V]: none outside the draft's."""
        ids_BD = self.draft.target_ids.expand(len(q_BD), -1)
        return q_BD.new_zeros(len(q_BD), self.draft.cfg.vocab_size).scatter_(1, ids_BD, q_BD)

    def _tree(self, out_B1H: Tensor, position_B1: Tensor) -> Drafts:
        """A tree as EAGLE-2 and SGLang grow it: at each depth the k best branches by cumulative probability are followed, each to its k
        best tokens; of all that were looked at the best are verified. The best of a branch never come without their ancestors."""
        k, past = self.shape.topk, self.past
        logp_BkD, out_BkH = self.draft.logits(out_B1H).float().log_softmax(-1), out_B1H
        score_Bk, draft_Bk = (t[:, 0] for t in logp_BkD.topk(k, dim=-1))
        token_Bk = self.draft.to_target(draft_Bk)
        front_Bk = torch.arange(k, device=self.device).expand(len(out_B1H), k)  # which candidates are followed
        tokens, scores, parents = [token_Bk], [score_Bk], [torch.full_like(front_Bk, -1)]
        from_Bk = torch.zeros_like(front_Bk)  # the row of the depth before that a followed branch comes from
        kin_BkT = torch.zeros(len(out_B1H), k, 0, dtype=torch.bool, device=self.device)  # its ancestors among the tree's rows
        for depth in range(1, self.shape.steps):
            out_BkH = out_BkH.gather(1, from_Bk[:, :, None].expand(-1, -1, out_BkH.shape[2]))
            kin_BkT = torch.cat([kin_BkT, torch.eye(k, dtype=torch.bool, device=self.device).expand(len(kin_BkT), k, k)], dim=2)
            seen = torch.cat([self.true[:, None].expand(-1, k, -1), kin_BkT], dim=2)
            out_BkH, past = self.draft.layer(self.draft.embed(token_Bk), out_BkH, (position_B1 + depth).expand(-1, k), past, seen)
            logp_Bkk, draft_Bkk = self.draft.logits(out_BkH).float().log_softmax(-1).topk(k, dim=-1)
            every_BC, ids_BC = (score_Bk[:, :, None] + logp_Bkk).flatten(1), self.draft.to_target(draft_Bkk).flatten(1)
            first = k + (depth - 1) * k * k  # the number of this depth's first candidate
            tokens, scores, parents = [*tokens, ids_BC], [*scores, every_BC], [*parents, front_Bk.repeat_interleave(k, dim=1)]
            score_Bk, place_Bk = every_BC.topk(k, dim=1)
            token_Bk, front_Bk, from_Bk = ids_BC.gather(1, place_Bk), first + place_Bk, place_Bk // k
            kin_BkT = kin_BkT.gather(1, from_Bk[:, :, None].expand(-1, -1, kin_BkT.shape[2]))
        return pick(torch.cat(tokens, 1), torch.cat(scores, 1), torch.cat(parents, 1), self.shape.tokens - 1)

    def select(self, rows: list[int]) -> None:
        """Keep only these prompts."""
        if self.past is not None:
            self.past, self.true = (self.past[0][rows], self.past[1][rows]), self.true[rows]


def pick(tokens_BC: Tensor, scores_BC: Tensor, parents_BC: Tensor, count: int) -> Drafts:
    """The `count` candidates of highest score, in their order; a parent is a candidate's number, -1 for the root.

    Equal scores (a branch whose last token was certain) go to the earlier candidate, so a parent always comes along.
    """
    best_BN = scores_BC.argsort(dim=1, descending=True, stable=True)[:, :count].sort(dim=1).values
    row_BC = torch.zeros_like(parents_BC).scatter_(1, best_BN, torch.arange(1, count + 1, device=best_BN.device).expand_as(best_BN))
    parents_BN = parents_BC.gather(1, best_BN)
    rows_BN = torch.where(parents_BN < 0, 0, row_BC.gather(1, parents_BN.clamp(min=0)))
    return Drafts(tokens_BC.gather(1, best_BN), rows_BN)
