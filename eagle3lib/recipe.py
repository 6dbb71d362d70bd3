"""The recipe of a training run, checked, and its learning rate at every step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from eagle3lib.errors import ParamError
from eagle3lib.loss import DISTANCES

SCHEDULES = ("cosine", "wsd")
DECAY_SHARE = 0.2  # of all steps: the last part of a "wsd" schedule


@dataclass(frozen=True)
class Recipe:
    """How to train. Two runs with the same recipe, store and draft vocabulary are the same run."""

    ttt_steps: int = 5
    step_decay: float = 0.8  # loss weight of step k is step_decay ** k
    epochs: int = 3
    lr: float = 1e-3  # peak
    batch_tokens: int = 1024  # tokens of the samples in a batch, over all processes, supervised or not
    loss: str = "ce"  # soft cross-entropy; or "kl", or "lk": acceptance itself (see loss)
    schedule: str = "cosine"  # or "wsd": warm-up, level, linear decay over the last fifth
    warmup_share: float = 0.05  # of all optimizer steps
    grad_clip: float = 1.0  # norm of all gradients together
    seed: int = 0
    save_steps: int = 200  # optimizer steps between two states; one is written at each end of an epoch as well
    eval_steps: int = 0  # optimizer steps between two measurements of acceptance; 0: at each end of an epoch only

    def __post_init__(self) -> None:
        bounds = {"ttt_steps": (1, 8), "step_decay": (0, 10), "epochs": (1, 10**6), "lr": (1e-12, 1e39), "batch_tokens": (1, 2**40),
                  "warmup_share": (0, 1), "grad_clip": (1e-12, 1e12), "save_steps": (1, 10**12), "eval_steps": (0, 10**12)}
        for name, (low, high) in bounds.items():
            if not low <= getattr(self, name) <= high:
                raise ParamError(f"{name} is {getattr(self, name)}, must be between {low:g} and {high:g}")
        for name, known in (("schedule", SCHEDULES), ("loss", DISTANCES)):
            if getattr(self, name) not in known:
                raise ParamError(f"{name} is {getattr(self, name)!r}, must be one of {', '.join(known)}")


def schedule(step: int, total: int, warmup_share: float, kind: str = "cosine") -> float:
    """Learning rate factor of optimizer step `step` (from 0): linear warm-up, then down to zero.

    "cosine": half a cosine from the end of the warm-up; "wsd": level, then a line over the last fifth of all steps.
    """
    warmup = max(1, round(total * warmup_share))
    if step < warmup:
        return (step + 1) / warmup
    if kind == "wsd":
        decay = max(1, round(total * DECAY_SHARE))
        return min(1.0, (total - step) / (decay + 1))
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))
