"""Matrix products of float32 tensors, multiplied in a shorter format where the machine has units for it.

On CPUs with AMX or AVX512-BF16 oneDNN rounds the factors to bfloat16 and adds up in float32; on a GPU the same is done
with TF32. Weights, moments and everything between products stay float32. Elsewhere nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def has_bf16_units() -> bool:
    """Whether this CPU multiplies bfloat16 faster than float32."""
    return torch.cpu._is_amx_tile_supported() or torch.cpu._is_avx512_bf16_supported()


@contextmanager
def fast_products() -> Iterator[bool]:
    """Within it float32 products may round their factors; yields whether those on the CPU do."""
    backends: Any = torch.backends  # its stubs lack mkldnn.matmul
    cpu, gpu = backends.mkldnn.matmul, backends.cuda.matmul
    before, fast = (cpu.fp32_precision, gpu.fp32_precision), has_bf16_units()
    cpu.fp32_precision, gpu.fp32_precision = "bf16" if fast else before[0], "tf32"
    try:
        yield fast
    finally:
        cpu.fp32_precision, gpu.fp32_precision = before
