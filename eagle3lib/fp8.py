"""Hidden states in one byte a value: e4m3 with one scale for each token and stream.

The scale is a power of two, so value * scale is exact in bfloat16 and float32: encoding what was decoded changes nothing.
Four significant bits stay: values of a vector down to 2^-14 of its largest are off by at most 1/16, smaller ones by at
most 2^-19 of the largest. Legend: T tokens, S streams, H hidden size.
"""

from __future__ import annotations

import torch

from eagle3lib.errors import Eagle3Error

LARGEST = 448.0  # of e4m3


def encode(hidden_TSH: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(float8_e4m3fn [T, S, H], scale float32 [T, S]). Eagle3Error for what has no scale: zeros throughout, NaN, infinity."""
    hidden = hidden_TSH.float()
    peak_TS = hidden.abs().amax(-1)
    scale_TS = torch.exp2(torch.ceil(torch.log2(peak_TS / LARGEST)))
    scale_TS = torch.where(peak_TS > scale_TS * LARGEST, scale_TS * 2, scale_TS)  # log2 rounds
    fits = torch.isfinite(scale_TS) & (scale_TS > 2.0**-120) & (scale_TS < 2.0**120)
    if not fits.all():
        row, stream = (~fits).nonzero()[0].tolist()
        raise Eagle3Error(f"sample {name}: row {row} of stream {stream} has a largest value of {float(peak_TS[row, stream]):g}, "
                          "which no fp8 scale can stand for. Extract it again; if it stays so, use store_dtype bfloat16.")
    return (hidden / scale_TS[..., None]).to(torch.float8_e4m3fn), scale_TS


def decode(packed_TSH: torch.Tensor, scale_TS: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return (packed_TSH.float() * scale_TS[..., None]).to(dtype)
