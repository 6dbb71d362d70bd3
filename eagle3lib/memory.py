"""Forecast: the memory that training will take, said before the first step, and a refusal when it cannot fit.

Counted: weights, gradients and AdamW's two moments (float32), the target's head, and what the backward pass keeps of every row and
TTT step. An upper estimate: all tokens are taken as supervised, in one document as long as the batch.

Legend: N rows of a batch, K TTT steps, H draft hidden size, I intermediate size, Q query heads, C head size, D draft vocabulary.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from eagle3lib.draft import DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.loss import CHUNK_BYTES

RESERVE = 0.05  # of what is free: other processes breathe


@dataclass(frozen=True)
class Forecast:
    """Bytes."""

    weights: int  # the draft's own and the target's head and embedding
    optimizer: int  # gradients and moments
    activations: int

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.activations

    def __str__(self) -> str:
        parts = {"weights": self.weights, "gradients and optimizer": self.optimizer, "activations": self.activations}
        return f"{_size(self.total)} at most (" + ", ".join(f"{name} {_size(n)}" for name, n in parts.items()) + ")"

    def require(self, device: str, *, say: bool = True) -> None:
        """Print the forecast; Eagle3Error when it is more than what is free on the device."""
        free = free_bytes(device)
        if say:
            print(f"memory forecast: {self}; {_size(free)} are free on {device}", flush=True)
        if self.total > free * (1 - RESERVE):
            way = "lower batch_tokens or ttt_steps" if self.activations > self.total // 2 else "lower draft_vocab, or use a larger device"
            raise Eagle3Error(f"training needs {self}, and {_size(free)} are free on {device}: {way}.")


def of(cfg: DraftConfig, steps: int, tokens: int, vocab: int, device: str) -> Forecast:
    """`tokens`: of the largest batch of one process; `vocab`: rows of the target's head."""
    trained = _parameters(cfg)
    frozen = 0 if cfg.train_embeddings else cfg.vocab_size * cfg.hidden_size
    heads = (vocab + cfg.draft_vocab_size) * cfg.target_hidden_size
    return Forecast(4 * (trained + frozen + heads), 4 * 3 * trained, _activations(cfg, steps, tokens, device))


def _parameters(cfg: DraftConfig) -> int:
    h, i, qc, gc = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    layers = 0
    for first in [True] + [False] * (cfg.num_layers - 1):
        layers += (2 * h if first else h) * (qc + 2 * gc) + h * qc + 3 * h * i + (3 if first else 2) * h
    features = len(cfg.aux_layers) * cfg.target_hidden_size
    options = (features if cfg.fc_norm else 0) + (cfg.vocab_size * h if cfg.train_embeddings else 0)
    return layers + features * h + h + cfg.draft_vocab_size * h + options


def _activations(cfg: DraftConfig, steps: int, tokens: int, device: str) -> int:
    h, i, qc, gc = cfg.hidden_size, cfg.intermediate_size, cfg.num_heads * cfg.head_dim, cfg.num_kv_heads * cfg.head_dim
    once = 4 * len(cfg.aux_layers) * cfg.target_hidden_size + 2 * cfg.target_hidden_size + 7 * h + 4 * gc
    layer = 9 * h + 5 * qc + 6 * gc + 4 * i  # norms and residuals, queries and attention, own keys and values, MLP
    row = layer * cfg.num_layers + 4 * h  # the last: output, its norm and the gradient taken with the loss
    scores = 3 * tokens * cfg.num_heads * cfg.num_layers if device == "cpu" else 0  # dense attention: [Q, N] a row and step
    own = sum(range(steps)) * (qc * 3) * cfg.num_layers  # keys of earlier steps, once more for every later one
    chunks = 4 * max(CHUNK_BYTES[device.split(":")[0]], 4 * 64 * cfg.draft_vocab_size)
    size = 4 if device == "cpu" else 2  # on a GPU activations are bfloat16
    return size * tokens * (once + steps * (row + scores) + own) + chunks


def free_bytes(device: str) -> int:
    """Memory that can still be had: of the GPU, or of this machine and the container it is in."""
    if device.startswith("cuda"):
        return torch.cuda.mem_get_info(device)[0]
    return min(psutil.virtual_memory().available, _container_bytes())


def _container_bytes(root: Path = Path("/sys/fs/cgroup")) -> int:
    """What is left of the cgroup's limit; a huge number without one."""
    try:
        limit, used = ((root / name).read_text().strip() for name in ("memory.max", "memory.current"))
        cached = sum(int(line.split()[1]) for line in (root / "memory.stat").read_text().splitlines() if line.startswith("inactive_file "))
        return int(limit) - int(used) + cached
    except (OSError, ValueError):
        return int(os.sysconf("SC_PAGE_SIZE")) * 2**48


def _size(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"
