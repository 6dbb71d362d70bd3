"""Data parallel: what a process knows of the others. Alone, everything here does nothing, exactly.

torchrun (`python -m torch.distributed.run`) starts the processes and sets their environment. Every step has one global batch, whatever
the number of processes: its samples are dealt out, the loss is divided by the rows of all, and gradients are added up (see step).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

PATIENCE = timedelta(minutes=30)  # a rank that measures acceptance or writes a checkpoint lets the others wait


@dataclass(frozen=True)
class Group:
    """`rank` of `size` processes; `local` is the rank on this machine: its GPU."""

    rank: int = 0
    size: int = 1
    local: int = 0

    @property
    def main(self) -> bool:
        """The one process that writes files and prints."""
        return self.rank == 0

    def deal(self, samples: Sequence[int], lengths: np.ndarray) -> list[int]:
        """This process's part of a global batch: each sample goes to whoever has the fewest tokens so far, longest first."""
        if self.size == 1:
            return list(samples)
        loads, mine = [0] * self.size, set[int]()
        for i in sorted(samples, key=lambda i: (-int(lengths[i]), i)):
            rank = loads.index(min(loads))
            loads[rank] += int(lengths[i])
            if rank == self.rank:
                mine.add(i)
        return [i for i in samples if i in mine]

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes. A tensor on the CPU waits for nothing on a GPU."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """What every process has to say, by rank; in every process. Small things only."""
        if self.size == 1:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Go on once all are here."""
        self.sum(torch.zeros(1))

    def add_up(self, gradients: Sequence[Tensor]) -> None:
        """Sum each over all processes, in place; all are on their way before the first is waited for."""
        if self.size > 1:
            for work in [dist.all_reduce(gradient, async_op=True) for gradient in gradients]:
                work.wait()


def started_by_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(device: str) -> tuple[Group, str]:
    """Meet the other processes of this torchrun, if there is one; the group, and this process's device ("cuda" becomes "cuda:1")."""
    if not started_by_torchrun():
        return Group(), device
    group = Group(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"]))
    if device == "cuda":
        device = f"cuda:{group.local}"
        torch.cuda.set_device(device)
    if group.size > 1 and not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device != "cpu" else "gloo", timeout=PATIENCE)
    return group, device


def leave() -> None:
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
