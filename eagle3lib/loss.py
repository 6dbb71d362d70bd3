"""The objective and its hit rates: how far every TTT step's distribution is from the target's, summed with step weights.

Legend: M supervised positions of a batch, K TTT steps, H hidden size, D draft vocabulary, V target vocabulary, B documents.

    loss = sum_k decay^k * mean over supervised rows m of step k of distance(p_{m+k}, q: softmax of the draft's step-k logits at m)

p is the target's distribution renormalised on the draft vocabulary. Rows whose greedy target token lies outside the
draft vocabulary are left out of the loss, and are a miss in every hit rate (EAGLE-3, arXiv 2503.01840 and its code).
Distances: "ce", soft cross-entropy, EAGLE-3's own; "kl", the same less the target's entropy, so 0 is perfect; "lk",
-log sum_v min(p_v, q_v), the negative logarithm of the rate at which sampled drafts are accepted (arXiv 2602.23881).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.batches import Batch
from eagle3lib.distances import row_gradients
from eagle3lib.draft import Draft
from eagle3lib.errors import Eagle3Error
from eagle3lib.ttt import unroll

DISTANCES = ("ce", "kl", "lk")
CHUNK_BYTES = {"cpu": 4 * 2**20, "cuda": 320 * 2**20}  # logits held at once; on a CPU about what stays in cache


@dataclass
class Outcome:
    """What a batch gave. `loss` is None when no row of it can be trained on (on a GPU it is 0 then: nobody waits to see)."""

    loss: Tensor | None  # scalar, differentiable
    losses: Tensor  # float64 [K] mean distance at each step, NaN where a step has no row
    rows: Tensor  # int64 [K] rows that count at each step
    hits: Tensor  # bool [M, K] the draft's greedy token is the target's (teacher-forced); False where not known
    known: Tensor  # bool [M, K] the row is supervised at that step


def objective(draft: Draft, batch: Batch, head: Tensor, steps: int, decay: float, distance: str = "ce", rows: Tensor | None = None) -> Outcome:
    """Loss of a batch. `head` [D, H]: the target's lm_head rows of the draft vocabulary, in the draft's dtype.

    `rows` int64 [K]: what to divide by, when the batch is one part of a larger one (data parallel); else its own counts.
    """
    if distance not in DISTANCES:
        raise Eagle3Error(f"loss {distance!r}: one of {', '.join(DISTANCES)} is wanted.")
    known, target, counted = pairs(draft, batch, steps)
    own = counted.sum(0)
    empty = torch.full((steps,), float("nan"), dtype=torch.float64, device=own.device)
    if not len(batch) or (own.device.type == "cpu" and not own.any()):
        return Outcome(None, empty, own, torch.zeros_like(known), known)
    out = draft.normed(torch.stack(list(unroll(draft, batch, steps))))  # [K, M, H]
    weight = decay ** torch.arange(steps, device=own.device, dtype=torch.float64) / (own if rows is None else rows).clamp(min=1)
    loss, each, guess = SoftTargets.apply(out, draft.lm_head.weight, getattr(draft.lm_head, "short", None), batch.last.to(head.dtype), head,
                                          (weight * counted).to(out.dtype if out.dtype == torch.float64 else torch.float32), distance)
    hits = counted & (draft.to_target(guess) == batch.greedy[target])
    losses = torch.where(own > 0, (each.double() * counted).sum(0) / own.clamp(min=1), empty)
    return Outcome(loss, losses, own, hits, known)


def pairs(draft: Draft, batch: Batch, steps: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of every position and step, each [M, K]: supervised or not, the position of its target, in the loss or not."""
    ahead = torch.arange(steps, device=batch.left.device)
    known = batch.left.unsqueeze(1) > ahead
    target = (torch.arange(len(batch), device=ahead.device).unsqueeze(1) + ahead).clamp(max=max(len(batch) - 1, 0))
    return known, target, known & draft.t2d[batch.greedy][target]


@torch.no_grad()
def simulate(draft: Draft, batch: Batch, steps: int) -> tuple[Tensor, Tensor]:
    """Teacher-forced greedy hits: (hits, known), both bool [M, K]; see Outcome."""
    known, target, counted = pairs(draft, batch, steps)
    if not len(batch):
        return known.clone(), known
    rows = max(64, CHUNK_BYTES[known.device.type] // (4 * draft.cfg.draft_vocab_size))
    short = getattr(draft.lm_head, "short", None)
    matrix = draft.lm_head.weight if short is None else short  # as in the objective: rounded logits would have other maxima
    guess = [torch.cat([products.wide(draft.normed(part), matrix).argmax(-1) for part in out.split(rows)]) for out in unroll(draft, batch, steps)]
    return counted & (draft.to_target(torch.stack(guess, dim=1)) == batch.greedy[target]), known


def joint_hits(hits: Tensor, known: Tensor) -> Tensor:
    """bool [M, K]: all steps up to and including k hit. Steps that are not known are False in both."""
    return (hits & known).cumprod(dim=1).bool()


class SoftTargets(torch.autograd.Function):
    """sum of weight[m, k] * distance(softmax(head @ last[m + k]), softmax(lm_head @ x[k, m])), with logits of a few rows at a time.

    The gradient is taken in the forward pass while a chunk's logits exist; neither logits nor distributions of a whole
    batch are ever held. Chunks go by target t = m + k: the K rows that share one lie together and its logits are computed
    once. `short`: lm_head in a shorter format, for the products only; the weight's gradient is then written into `grad` at once,
    as for the other layers (see products). Returns (sum, each distance [M, K], each guess [M, K]).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, lm_head: Tensor, short: Tensor | None, last: Tensor, head: Tensor, weight: Tensor,
                distance: str) -> tuple[Tensor, Tensor, Tensor]:
        steps, positions, width = x.shape
        matrix = lm_head if short is None else short
        there, has_row, back, has_pair = by_target(positions, steps, x.device)
        x_TKH = x.flatten(0, 1).index_select(0, there.flatten()).view(positions, steps, width)
        weight_TK = torch.where(has_row, weight.t().flatten()[there], 0)
        grad_TKH, grad_head = torch.empty_like(x_TKH), torch.zeros_like(lm_head) if short is None else products.gradient(lm_head).zero_()
        each_TK, guess_TK = weight.new_empty(positions, steps), torch.empty_like(there)
        chunk = chunk_targets(len(lm_head), steps, positions, x.device)
        for start in range(0, positions, chunk):
            part = slice(start, start + chunk)
            rows = x_TKH[part].flatten(0, 1)
            logits, target = products.wide(rows, matrix), products.wide(last[part], head)
            each_TK[part], guess_TK[part], slope = row_gradients(logits, target, weight_TK[part] != 0, distance, rows.dtype)
            grad_TKH[part] = (slope @ matrix).view_as(grad_TKH[part]) * weight_TK[part].unsqueeze(-1)
            products.accumulate(grad_head, slope, (rows * weight_TK[part].view(-1, 1)).to(rows.dtype))
        each, guess = (t.flatten()[back] for t in (each_TK, guess_TK))
        grad_x = grad_TKH.flatten(0, 1).index_select(0, back.t().flatten()).view_as(x)
        ctx.save_for_backward(grad_x.masked_fill_(~has_pair.t().unsqueeze(-1), 0), grad_head if short is None else None)
        ctx.mark_non_differentiable(each, guess)
        return (each * weight).sum(), each, guess

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_head = ctx.saved_tensors
        return grads[0] * grad_x, None if grad_head is None else grads[0] * grad_head, None, None, None, None, None


def chunk_targets(drafted: int, steps: int, positions: int, device: torch.device) -> int:
    """Targets whose logits are held at once. On a GPU every chunk passes over lm_head's gradient, so there are few of them."""
    by_bytes = max(16, CHUNK_BYTES[device.type] // (6 * drafted * steps))
    return by_bytes if device.type == "cpu" else max(by_bytes, -(-positions // 8))


def by_target(positions: int, steps: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """How rows (position m, step k), stored at k * M + m, and pairs (target t = m + k, step k), stored at t * K + k, correspond.

    there [T, K]: the row of each pair, and whether it exists; back [M, K]: the pair of each row, and whether it exists.
    """
    k, at = torch.arange(steps, device=device), torch.arange(positions, device=device).unsqueeze(1)
    there, back = k * positions + (at - k).clamp(min=0), (at + k).clamp(max=positions - 1) * steps + k
    return there, at >= k, back, at + k < positions
