"""The objective and its hit rates: soft cross-entropy of every TTT step, summed with step weights.

Legend: M supervised positions of a batch, K TTT steps, R (position, step) pairs that are supervised, H hidden size,
D draft vocabulary, V target vocabulary, B documents.

    loss = sum_k decay^k * mean over supervised rows m of step k of CE(p_{m+k}, draft's step-k logits at row m)

p is the target's distribution renormalised on the draft vocabulary. Rows whose greedy target token lies outside the
draft vocabulary are left out of the loss, and are a miss in every hit rate (EAGLE-3, arXiv 2503.01840 and its code).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3lib.batches import Batch
from eagle3lib.draft import Draft
from eagle3lib.ttt import unroll

CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 256 * 2**20}  # float32 logits held at once; on a CPU about what stays in cache


@dataclass
class Outcome:
    """What a batch gave. `loss` is None when no row of it can be trained on."""

    loss: Tensor | None  # scalar, differentiable
    losses: Tensor  # [K] mean cross-entropy of each step, NaN where a step has no row
    hits: Tensor  # bool [M, K] the draft's greedy token is the target's (teacher-forced); False where not known
    known: Tensor  # bool [M, K] the row is supervised at that step


def objective(draft: Draft, batch: Batch, head: Tensor, steps: int, decay: float) -> Outcome:
    """Loss of a batch. `head` [D, H]: the target's lm_head rows of the draft vocabulary, in the draft's dtype."""
    out, target, place = _gather(draft, batch, steps)
    losses = torch.full((steps,), float("nan"), dtype=torch.float64, device=out.device)
    hits, known = _tables(batch, steps)
    if not len(target):
        return Outcome(None, losses, hits, known)
    step = place % steps
    rows = torch.bincount(step, minlength=steps)
    weight = decay ** torch.arange(steps, device=out.device, dtype=out.dtype) / rows.clamp(min=1)
    last = batch.last.to(head.dtype)
    loss, each, guess = SoftCrossEntropy.apply(
        draft.normed(out), draft.lm_head.weight, last, head, target, weight[step]
    )
    hits.view(-1)[place] = draft.to_target(guess) == batch.greedy[target]
    sums = torch.zeros_like(losses).index_add_(0, step, each.double())
    return Outcome(loss, torch.where(rows > 0, sums / rows, losses), hits, known)


@torch.no_grad()
def simulate(draft: Draft, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """Teacher-forced greedy hits: (hits, known), both bool [M, K]; see Outcome."""
    hits, known = _tables(batch, steps)
    out, target, place = _gather(draft, batch, steps)
    rows = _rows_per_chunk(draft.cfg.draft_vocab_size, out.device)
    guess = [draft.logits(part).argmax(-1) for part in out.split(rows)] if len(out) else [target]
    hits.view(-1)[place] = draft.to_target(torch.cat(guess)) == batch.greedy[target]
    return hits, known


def joint_hits(hits: Tensor, known: Tensor) -> Tensor:
    """bool [M, K]: all steps up to and including k hit. Steps that are not known are False in both."""
    return (hits & known).cumprod(dim=1).bool()


def joint_counts(batch: Batch, hits: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Joint hits and tries of each document and step, both int64 [B, K]: what acceptance.from_counts wants."""
    document = batch.document[batch.row]
    empty = torch.zeros(len(batch.ids), hits.shape[1], dtype=torch.int64, device=hits.device)
    return (empty.index_add(0, document, joint_hits(hits, known).long()), empty.index_add(0, document, known.long()))


def _tables(batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    known = batch.left.unsqueeze(1) > torch.arange(steps, device=batch.left.device)
    return torch.zeros_like(known), known


def _gather(draft: Draft, batch: Batch, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [R, H] of all steps whose target is in the draft vocabulary, ordered by target; target, place int64 [R].

    `target` indexes `batch.last`; `place` is m * K + k, the pair's place in an [M, K] table. Pairs that share a target
    lie together, so that its distribution is computed once for all steps.
    """
    inside = draft.t2d[batch.greedy]
    outs, targets, places = [batch.last.new_zeros(0, draft.cfg.hidden_size).to(draft.fc.weight.dtype)], [], []
    for k, (alive, out) in enumerate(unroll(draft, batch, steps) if len(batch) else ()):
        kept = inside[alive + k].nonzero().flatten()
        outs.append(out.index_select(0, kept))
        targets.append(alive[kept] + k)
        places.append(alive[kept] * steps + k)
    none = torch.zeros(0, dtype=torch.int64, device=batch.row.device)
    target, order = torch.cat([none, *targets]).sort(stable=True)
    return torch.cat(outs).index_select(0, order), target, torch.cat([none, *places])[order]


def _rows_per_chunk(vocab: int, device: torch.device) -> int:
    return max(64, CHUNK_BYTES[device.type] // (4 * vocab))


class SoftCrossEntropy(torch.autograd.Function):
    """sum_r weight_r * CE(softmax(head @ last[target_r]), softmax(lm_head @ x_r)), with logits of a few rows at a time.

    The gradient is softmax(logits) - p, so it is taken in the forward pass while the chunk's logits exist; neither
    logits nor distributions of a whole batch are ever held. Returns (sum, each row's CE [R], each row's guess [R]).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, lm_head: Tensor, last: Tensor, head: Tensor, target: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        each, guess = x.new_empty(len(x)), torch.empty_like(target)
        grad_x, grad_head = torch.empty_like(x), torch.zeros_like(lm_head)
        parts = target.split(_rows_per_chunk(len(lm_head), x.device))
        bounds = torch.stack([torch.stack((part[0], part[-1])) for part in parts]).tolist()  # one transfer for all
        end = 0
        for part, (first, final) in zip(parts, bounds, strict=True):
            rows = slice(end, end := end + len(part))
            p = (last[first : final + 1] @ head.t()).softmax(-1)
            p = p.index_select(0, part - first)
            logits = x[rows] @ lm_head.t()
            top, guess[rows] = logits.max(-1)
            q = logits.softmax(-1)
            lse = top - q.gather(1, guess[rows].unsqueeze(1)).squeeze(1).log()  # q's largest value is at least 1/D
            each[rows] = lse - torch.linalg.vecdot(p, logits)
            q -= p
            grad_x[rows] = (q @ lm_head) * weight[rows].unsqueeze(1)
            grad_head.addmm_(q.t(), x[rows] * weight[rows].unsqueeze(1))
        ctx.save_for_backward(grad_x, grad_head)
        ctx.mark_non_differentiable(each, guess)
        return (each * weight).sum(), each, guess

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        return grad * grad_x, grad * grad_head, None, None, None, None
