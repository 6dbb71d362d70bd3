"""Samples: a row of tokens with its hidden states, alone or many behind each other, and its name.

Legend: T tokens, A aux layers, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Sample:
    id: str  # 32 hex digits: sample_id(input_ids, loss_mask)
    input_ids: torch.Tensor  # int64 [T]
    loss_mask: torch.Tensor  # bool [T]
    hidden: torch.Tensor  # [T, A+1, H] in the dtype of the capture, also when the disk holds fp8


@dataclass(frozen=True)
class Stack:
    """Samples behind each other. T: tokens of all of them."""

    ids: list[str]
    lengths: np.ndarray  # int64 [samples]
    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # bool [T]
    hidden: torch.Tensor  # [T, A+1, H] in the dtype captured


def stack(samples: Sequence[Sample]) -> Stack:
    """At least one sample."""
    import torch

    lengths = np.array([len(s.input_ids) for s in samples])
    ids, mask = (np.concatenate([getattr(s, name).numpy() for s in samples]) for name in ("input_ids", "loss_mask"))
    return Stack([s.id for s in samples], lengths, ids.astype(np.int32), mask, torch.cat([s.hidden for s in samples]))


def sample_id(input_ids: Any, loss_mask: Any) -> str:
    """Identity of a row: a hash of its token ids and loss mask, whatever its file, order or worker."""
    ids = np.ascontiguousarray(input_ids, dtype="<i4").tobytes()
    return xxhash.xxh3_128_hexdigest(ids + np.ascontiguousarray(loss_mask, dtype=np.uint8).tobytes())
