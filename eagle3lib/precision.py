"""Matrix products on the CPU: float32 tensors, multiplied in bfloat16 where the CPU has units for it.

oneDNN rounds the factors of a float32 product to bfloat16 and adds up in float32, on CPUs with AMX or AVX512-BF16;
weights, moments and everything between products stay float32. Elsewhere nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def fast_products(enabled: bool = True) -> Iterator[bool]:
    """Within it float32 products on the CPU may round their factors to bfloat16; yields whether they do."""
    matmul = torch.backends.mkldnn.matmul
    before, fast = matmul.fp32_precision, enabled and has_bf16_units()
    matmul.fp32_precision = "bf16" if fast else before
    try:
        yield fast
    finally:
        matmul.fp32_precision = before
