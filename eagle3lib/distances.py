"""Row by row: the distance between two distributions given as logits, and its gradient, taken while the logits exist.

Legend: T targets, K TTT steps (rows that share a target), D draft vocabulary. On a GPU one Triton program walks a row two
or three times, out of its cache; nothing of size D is kept but the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096


def row_gradients(logits: Tensor, target: Tensor, live: Tensor, distance: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T*K, D], the target's logits [T, D] -> each row's distance [T, K], its greedy id int64 [T, K], and the gradient of
    the distance by the logits [T*K, D] in `dtype`. `logits` may be overwritten.

    distance: "ce", "kl" or "lk" (see loss). live bool [T, K]: other rows have distance and gradient 0, whatever their logits; a GPU
    skips them, and says 0 for their greedy id too.
    """
    if logits.is_cuda:
        return _on_gpu(logits, target, live, distance, dtype)
    each, guess, slope = (_acceptance if distance == "lk" else _entropy)(logits.view(*live.shape, -1), target, distance)
    slope[~live] = 0
    return each.masked_fill(~live, 0), guess, slope.flatten(0, 1)


def _acceptance(z: Tensor, target: Tensor, distance: str) -> tuple[Tensor, Tensor, Tensor]:
    """-log sum_v min(p, q), in logarithms throughout: the sum of two distributions far apart is below the smallest number."""
    logp, logq = target.log_softmax(-1).unsqueeze(1), z.log_softmax(-1)
    low = torch.minimum(logp, logq)
    rate = low.logsumexp(-1, keepdim=True)
    # Each id's share in the rate, where the draft, not the target, is the smaller of the two.
    share = (low - rate).exp() * (logq < logp).to(z.dtype)
    return -rate.squeeze(-1), z.argmax(-1), logq.exp() * share.sum(-1, keepdim=True) - share


def _entropy(z: Tensor, target: Tensor, distance: str) -> tuple[Tensor, Tensor, Tensor]:
    """Soft cross-entropy; for "kl" less the target's own entropy."""
    p = target.softmax(-1)
    top, guess = z.max(-1)
    q = z.softmax(-1)
    lse = top - q.gather(2, guess.unsqueeze(2)).squeeze(2).log()  # q's largest value is at least 1/D
    each = lse - torch.bmm(z, p.unsqueeze(2)).squeeze(2)
    if distance == "kl":
        each = each + torch.special.xlogy(p, p).sum(-1, keepdim=True)
    return each, guess, q.sub_(p.unsqueeze(1))


def _on_gpu(logits: Tensor, target: Tensor, live: Tensor, distance: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    from eagle3lib import kernels

    each, guess = torch.empty(live.shape, device=live.device), torch.empty(live.shape, dtype=torch.int64, device=live.device)
    slope = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    kernels.rows[(len(logits),)](logits, target, live, each, guess, slope, logits.shape[1], live.shape[1],
                                 DISTANCE={"ce": 0, "kl": 1, "lk": 2}[distance], BLOCK=BLOCK, num_warps=8)
    return each, guess, slope
