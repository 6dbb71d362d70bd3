"""Row by row: the distance between two distributions given as logits, and its gradient, taken while the logits exist.

Legend: T targets, K TTT steps (rows that share a target), D draft vocabulary. On a GPU one Triton program walks a row two
or three times, out of its cache; nothing of size D is kept but the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 4096


def row_gradients(logits: Tensor, target: Tensor, weight: Tensor, distance: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """logits [T*K, D], the target's logits [T, D], weight [T, K] -> each row's distance [T, K], its greedy id int64 [T, K], and
    the gradient of sum(weight * distance) by the logits [T*K, D] in `dtype`. `logits` may be overwritten.

    distance: "ce", "kl" or "lk" (see loss). Rows of weight 0 have gradient 0 (and, on a GPU, distance 0 and greedy id 0).
    """
    if logits.is_cuda:
        return _on_gpu(logits, target, weight, distance, dtype)
    p, z = target.softmax(-1).unsqueeze(1), logits.view(*weight.shape, -1)
    top, guess = z.max(-1)
    q = z.softmax(-1)
    if distance == "lk":
        below = (q < p).to(q.dtype)  # 1 where the draft, not the target, is the smaller of the two
        rate = torch.minimum(p, q).sum(-1)
        slope = q * ((q * below).sum(-1, keepdim=True) - below) / rate.unsqueeze(-1)
        each = -rate.log()
    else:
        lse = top - q.gather(2, guess.unsqueeze(2)).squeeze(2).log()  # q's largest value is at least 1/D
        each = lse - torch.linalg.vecdot(p, z)
        if distance == "kl":
            each = each + torch.special.xlogy(p, p).sum(-1)
        slope = q.sub_(p)
    return each, guess, slope.mul_(weight.unsqueeze(-1)).flatten(0, 1)


def _on_gpu(logits: Tensor, target: Tensor, weight: Tensor, distance: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    from eagle3lib import kernels

    each, guess = torch.empty_like(weight), torch.empty(weight.shape, dtype=torch.int64, device=weight.device)
    slope = torch.empty(logits.shape, dtype=dtype, device=logits.device)
    kernels.rows[(len(logits),)](logits, target, weight, each, guess, slope, logits.shape[1], weight.shape[1],
                                 DISTANCE={"ce": 0, "kl": 1, "lk": 2}[distance], BLOCK=BLOCK, num_warps=8)
    return each, guess, slope
