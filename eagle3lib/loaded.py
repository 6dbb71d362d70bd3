"""Loaded: which draft tensors the server really holds. SGLang's loader drops unknown tensors and leaves missing ones random, in silence.

The running server hashes every parameter it holds (`/weights_checker`, on a GPU; names of the draft start with "draft.").
Here the same hash is taken of the tensors in the draft's file, stacked and padded as SGLang 0.5.14 keeps them, so the two
are compared to the bit. Only a single rank holds whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib.checks import Check, Checks
from eagle3lib.draftfile import DTYPES, WEIGHTS

STACKED = {"self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight"),
           "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}
VOCAB_PADDING = 64  # rows of lm_head are padded with zeros to a multiple of it
MASK32, MASK64 = 2**32 - 1, 2**64 - 1


def expected(folder: Path, dtype: str) -> dict[str, str]:
    """Hash of every parameter that a server of this `dtype` must hold, by the server's name for it."""
    tensors = {name.replace("midlayer.", "layers.0."): t for name, t in load_file(Path(folder) / WEIGHTS).items() if name not in ("d2t", "t2d")}
    held = {name: t.to(DTYPES[dtype]) for name, t in tensors.items()}
    for layer in {name[: name.index(".", 7)] for name in held if name.startswith("layers.")}:
        for stacked, parts in STACKED.items():
            names = [f"{layer}.{part}" for part in parts]
            if all(name in held for name in names):
                held[f"{layer}.{stacked}"] = torch.cat([held.pop(name) for name in names])
    head = held.pop("lm_head.weight", None)
    hashes = {f"draft.model.{name}": tensor_hash(t) for name, t in held.items()}
    if head is not None:
        padding = -len(head) % VOCAB_PADDING
        hashes["draft.lm_head.weight"] = tensor_hash(torch.cat([head, head.new_zeros(padding, head.shape[1])]))
    return hashes


def check(checks: Checks, answer: Mapping[str, Any], folder: Path, dtype: str) -> Check:
    """Add "draft tensors are loaded"; `answer`: what the server says at /weights_checker."""
    ranks = answer.get("ranks") or []
    wanted = expected(folder, dtype)
    if len(ranks) != 1:
        said = answer.get("message") or "no answer"
        limit, passed, found = "one rank, to compare whole tensors", bool(ranks), f"{len(ranks)} ranks, not compared ({said})"
    else:
        held = {name: value for name, value in ranks[0]["checksums"].items() if name.startswith("draft.")}
        limit, found = f"all {len(wanted)} as in the file", _difference(held, wanted)
        passed, found = not found, found or f"all {len(wanted)} as in the file"
    return checks.add("draft tensors are loaded", passed, found, limit,
                      "a loader that drops tensors it does not know and leaves missing ones random: acceptance 1.00, server healthy",
                      "Run `python -m eagle3lib check-draft` on the folder; compare its names with the server's models/llama_eagle3.py.")


def _difference(held: Mapping[str, str], wanted: Mapping[str, str]) -> str:
    """What is not as in the file. The embedding is the target's, so it may be held without being wanted."""
    other = sorted(name for name in held.keys() & wanted.keys() if held[name] != wanted[name])
    surplus = sorted(name for name in held.keys() - wanted.keys() if "embed_tokens" not in name and "rotary" not in name)
    named = (("missing in the server", sorted(wanted.keys() - held.keys())), ("other values", other), ("not in the file", surplus))
    return "; ".join(f"{what}: {', '.join(names)}" for what, names in named if names)


# SGLang's hash of a tensor on a GPU (layers/multimodal.py): two murmur-like sums over 32-bit words, by tiles, and a splitmix finish --------

SEED = 0x243F6A88
SEEDS = (SEED, (SEED * 0x9E3779B1 ^ 0xDEADBEEF) & MASK32)
TILE = 8192
PART = 512 * TILE  # words hashed at once, to bound memory


def tensor_hash(tensor: Tensor) -> str:
    """16 hexadecimal digits, as the server's checker shows them."""
    data = tensor.contiguous().reshape(-1).view(torch.uint8)
    words = torch.cat([data, data.new_zeros(-len(data) % 4)]).numpy().view("<u4")
    size, total = np.uint32(4 * len(words) & MASK32), 0
    for start in range(0, len(words), PART):
        part = words[start : start + PART]
        high, low = (_mix(_add(_mix(part ^ place)) ^ size) for place in _places(start, len(part)))
        total += int((high.astype(np.uint64) << np.uint64(32) | low.astype(np.uint64)).sum(dtype=np.uint64))
    return f"{_finish(total & MASK64) if len(words) else 0:016x}"


def _places(start: int, count: int) -> list[np.ndarray]:
    """What each word is mixed with: its place in the tensor, in two ways."""
    at = np.arange(start, start + count, dtype=np.uint32)
    return [(at * np.uint32(factor) + np.uint32(seed)) ^ (at << np.uint32(turn) | at >> np.uint32(32 - turn))
            for factor, seed, turn in ((0x27D4EB2D, SEEDS[0], 15), (0x165667B1, SEEDS[1], 13))]


def _add(words: np.ndarray) -> np.ndarray:
    """Sum of each tile, modulo 2**32."""
    return np.add.reduceat(words, np.arange(0, len(words), TILE), dtype=np.uint32)


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x85EBCA6B)
    x = (x ^ x >> np.uint32(13)) * np.uint32(0xC2B2AE35)
    return x ^ x >> np.uint32(16)


def _finish(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK64
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK64
    return x ^ x >> 31
