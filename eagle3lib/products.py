"""Matrix products of the training step on a GPU: multiplied in bfloat16, added up in float32, weight gradients once a step.

Legend: R rows, I inputs, O outputs. A draft's weights stay float32; `shorten` gives every linear layer a bfloat16 copy to
multiply with. Unrolling uses a layer K times. Instead of adding K gradients to a weight, its inputs and output gradients are
kept, and one product over all rows of all steps makes the gradient (`collect`): fewer, larger products, no rounding between.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3lib.draft import Mlp
from eagle3lib.flash import SwiGlu


def wide(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows [R, I], matrix [O, I] -> [R, O]; of bfloat16 factors on a GPU in float32, as they were added up."""
    if rows.is_cuda and rows.dtype == torch.bfloat16:
        return torch.mm(rows, matrix.t(), out_dtype=torch.float32)
    return rows @ matrix.t()


def accumulate(total: Tensor, slope: Tensor, rows: Tensor) -> None:
    """total [O, I] += slope [R, O]^T rows [R, I], in total's own precision."""
    if slope.is_cuda and slope.dtype != total.dtype:
        torch.addmm(total, slope.t(), rows, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(slope.t(), rows)


class Short(nn.Linear):
    """What `shorten` makes of a linear layer, for the type checker: it stays the object that it was."""

    short: Tensor  # bfloat16 [O, I]
    kept: list[tuple[Tensor, Tensor]]  # of every use in a step: rows [R, I] and output gradients [R, O]


class Kept(torch.autograd.Function):
    """rows @ short^T; backward keeps what the weight's gradient needs with the layer, for `collect`."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, layer: Short) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.layer = layer
        return rows @ layer.short.t()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        layer = ctx.layer
        layer.kept.append((ctx.saved_tensors[0], grads[0]))
        return grads[0] @ layer.short if ctx.needs_input_grad[0] else None, None, None


def shorten(model: nn.Module) -> list[Short]:
    """Give every trained linear layer of `model` a bfloat16 copy `short`, and make it multiply with that. Returns the layers.

    Norms take their weight in the format of what they get, and frozen embeddings are kept in bfloat16.
    """
    layers = [cast(Short, m) for m in model.modules() if isinstance(m, nn.Linear) and m.weight.requires_grad]
    for layer in layers:
        layer.short, layer.kept = layer.weight.detach().bfloat16(), []
        layer.forward = partial(_forward, layer)  # type: ignore[method-assign]
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            module.forward = partial(_normed, module)  # type: ignore[method-assign]
        elif isinstance(module, Mlp):
            module.forward = partial(_gated, module)  # type: ignore[method-assign]
        elif isinstance(module, nn.Embedding) and not module.weight.requires_grad:
            module.bfloat16()
    return layers


def _gated(mlp: Mlp, rows: Tensor) -> Tensor:
    out: Tensor = mlp.down_proj(SwiGlu.apply(mlp.gate_proj(rows), mlp.up_proj(rows)))
    return out


def _normed(norm: nn.RMSNorm, rows: Tensor) -> Tensor:
    return F.rms_norm(rows, norm.normalized_shape, norm.weight.to(rows.dtype), norm.eps)


def _forward(layer: Short, rows: Tensor) -> Tensor:
    out: Tensor = Kept.apply(rows.flatten(0, -2).bfloat16(), layer.weight, layer)
    return out.unflatten(0, rows.shape[:-1])


@torch.no_grad()
def refresh(layers: list[Short]) -> None:
    """Copies follow the weights after an optimizer step."""
    torch._foreach_copy_([layer.short for layer in layers], [layer.weight for layer in layers])


@torch.no_grad()
def collect(layers: list[Short]) -> None:
    """After backward: every layer's weight gets its gradient in float32, written into `weight.grad` where there is one."""
    for layer in layers:
        if not layer.kept:
            continue
        rows, slopes = (torch.cat(parts) for parts in zip(*layer.kept, strict=True))
        layer.kept.clear()
        torch.mm(slopes.t(), rows, out_dtype=layer.weight.dtype, out=gradient(layer.weight))


def gradient(weight: Tensor) -> Tensor:
    """The weight's gradient, made when it is not there; to be written to."""
    if weight.grad is None:
        weight.grad = torch.empty_like(weight)
    return weight.grad
