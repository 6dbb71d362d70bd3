"""Attention of the unrolled draft on a GPU: PyTorch's own flash kernel for the true rows, the row's own later keys beside it;
and the draft's other steps that pay as one kernel.

Legend: N rows, M supervised positions, n own keys a row, Q query heads, G key/value heads, C head size, B documents, L query
places: of each document, all rows from its first supervised one to its end.

Both parts are one softmax. Forward, the kernel's log-sum-exp lets the own keys join. Backward, the kernel is handed the
*joint* output and log-sum-exp: the probabilities that it rebuilds from them are then those of the joint softmax, so its
gradients for queries, true keys and true values are exact (the rule that ring attention uses, arXiv 2310.01889).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from eagle3lib.batches import Batch

KeyValue = tuple[Tensor, Tensor]


@dataclass
class Varlen:
    """Where packed rows lie for the kernel, which aligns a document's last query with its last key."""

    slot: Tensor  # int64 [M] place among the L query places
    query_ends: Tensor  # int32 [B + 1] cumulative query places
    key_ends: Tensor  # int32 [B + 1] cumulative rows
    slots: int  # L
    longest: int  # rows of the longest document, or a bound above it

    @classmethod
    def of(cls, batch: Batch, longest: int = 0) -> Varlen:
        """For a batch still on the host. `longest`: a bound to use instead of the batch's own (CUDA graphs bake it in)."""
        first, offset = batch.offsets()
        rows = torch.bincount(batch.document, minlength=len(batch.ids))
        queries = (rows - torch.from_numpy(first)).cumsum(0)
        starts = torch.cat((queries.new_zeros(1), queries))
        slot = starts[batch.document[batch.row]] + torch.from_numpy(offset)
        ends = torch.cat((rows.new_zeros(1), rows.cumsum(0)))
        return cls(slot, starts.int(), ends.int(), int(starts[-1]), longest or int(rows.max()))

    def map(self, change: Callable[[Tensor], Tensor]) -> Varlen:
        return Varlen(change(self.slot), change(self.query_ends), change(self.key_ends), self.slots, self.longest)

    def whole(self, rows: int) -> Varlen:
        """The same documents with queries at all of the batch's rows."""
        return Varlen(torch.arange(rows, device=self.slot.device), self.key_ends, self.key_ends, rows, self.longest)


def flash_attend(q: Tensor, true: KeyValue, own: list[KeyValue], places: Any) -> Tensor:
    """As ttt.attend; all tensors bfloat16 on one CUDA device."""
    out: Tensor = FlashAttend.apply(q, *true, places, *(key for key, _ in own), *(value for _, value in own))
    return out


class FlashAttend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, at: Varlen, *own: Tensor) -> Tensor:
        flash, flash_lse, *random, _ = torch.ops.aten._flash_attention_forward(
            spread(q, at), k, v, at.query_ends, at.key_ends, at.longest, at.longest, 0.0, True, False)
        out, lse = torch.empty_like(q), torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        kernels().join[(len(q), k.shape[1])](flash, flash_lse, at.slot, q, *stacked(own, k), out, lse, q.shape[-1] ** -0.5, at.slots,
                                             **sizes(q, k, own))
        ctx.save_for_backward(q, k, v, out, lse, *random, *own)
        ctx.at = at
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, k, v, out, lse, seed, unused, *own), at, grad = ctx.saved_tensors, ctx.at, grads[0].contiguous()
        flash_q, grad_k, grad_v = torch.ops.aten._flash_attention_backward(
            spread(grad, at), spread(q, at), k, v, spread(out, at), spread(lse, at).t().contiguous(), at.query_ends, at.key_ends,
            at.longest, at.longest, 0.0, True, seed, unused)
        grad_q, (own_k, own_v) = torch.empty_like(q), stacked(own, k)
        more_k, more_v = torch.empty_like(own_k), torch.empty_like(own_v)
        kernels().own_backward[(len(q), k.shape[1])](flash_q, at.slot, q, own_k, own_v, out, lse, grad, grad_q, more_k, more_v,
                                                   q.shape[-1] ** -0.5, **sizes(q, k, own))
        return grad_q, grad_k, grad_v, None, *(more_k.unbind(1) + more_v.unbind(1) if own else ())


def stacked(own: Any, like: Tensor) -> tuple[Tensor, Tensor]:
    """n keys and n values, each [M, G, C] -> both [M, n, G, C]; without any, something that nobody reads."""
    half = len(own) // 2
    return (torch.stack(own[:half], dim=1), torch.stack(own[half:], dim=1)) if own else (like, like)


def sizes(q: Tensor, k: Tensor, own: Any) -> dict[str, int]:
    """What the kernels are compiled for; powers of two where Triton wants them."""
    group, width = q.shape[1] // k.shape[1], q.shape[2]
    return {"OWN": len(own) // 2, "G": k.shape[1], "GROUP": group, "C": width, "HEADS": power(group), "LANES": power(width), "num_warps": 1}


def spread(x: Tensor, at: Varlen) -> Tensor:
    """Supervised rows [M, ...] -> query places [L, ...], zeros between them."""
    return x.new_zeros(at.slots, *x.shape[1:]).index_copy_(0, at.slot, x)


class Rotate(torch.autograd.Function):
    """draft.rotate of x [R, heads, C] by cos, sin float32 [R, C] in one pass; backward turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return turned(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return turned(grads[0], cos, sin, -1.0), None, None


def turned(x: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    x, out = x.contiguous(), torch.empty_like(x, memory_format=torch.contiguous_format)
    heads, width = x.shape[1:]
    kernels().rotary[(len(x),)](x, cos.contiguous(), sin.contiguous(), out, sign, HEADS=heads, C=width, ROWS=power(heads), LANES=power(width // 2))
    return out


class SwiGlu(torch.autograd.Function):
    """silu(gate) * up, remembering no more than the two."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        out = torch.empty_like(gate)
        kernels().swiglu[(-(-gate.numel() // 4096),)](gate, up, out, gate.numel(), BLOCK=4096)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        kernels().swiglu_backward[(-(-gate.numel() // 4096),)](gate, up, grads[0].contiguous(), d_gate, d_up, gate.numel(), BLOCK=4096)
        return d_gate, d_up


def power(count: int) -> int:
    return 1 << (count - 1).bit_length()


def kernels() -> Any:
    """Triton is there where CUDA is; a machine without must not need it."""
    from eagle3lib import kernels as module

    return module
