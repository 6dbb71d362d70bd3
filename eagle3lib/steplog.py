"""What a training run says of itself: metrics.jsonl, and TensorBoard's event files when asked.

Numbers of a step stay on the device until they are fetched, several steps at a time: a GPU never waits for the host to read a loss.
Legend: K TTT steps.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib import runs
from eagle3lib.loss import Outcome, joint_hits
from eagle3lib.parallel import Group

WINDOW = {"cpu": 1, "cuda": 10}  # steps between two fetches
Record = dict[str, Any]


class MetricsLog:
    """metrics.jsonl: appended line by line; after a crash, lines behind the state gone back to are dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, record: Record) -> Record:
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        return record

    def read(self) -> list[Record]:
        """Every whole record; a line without its end was cut short in writing, whatever it looks like."""
        lines = self.path.read_text().splitlines(keepends=True) if self.path.is_file() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def cut(self, step: int) -> list[Record]:
        """Drop what comes after `step`; what is left."""
        kept = [r for r in self.read() if r["step"] <= step]
        runs.write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))
        return kept


class Board:
    """TensorBoard event files in `folder`, through torch's own writer."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, record: Mapping[str, Any]) -> None:
        for name, value in _scalars(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


def _scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, each under a name that TensorBoard groups by."""
    named = {"train": ("loss", "lr", "grad_norm", "tokens_per_s", "wait_share"), "heldout": ("acceptance_length",)}
    found = {f"{group}/{name}": record.get(name) for group, names in named.items() for name in names}
    for name in ("losses", "hits", "joint"):
        found |= {f"{name}/step_{k}": value for k, value in enumerate(record.get(name) or [])}
    heldout = record.get("heldout") or {}
    found |= {f"heldout/{name}": heldout.get(name) for name in ("low", "high", "rate")}
    return {name: float(value) for name, value in found.items() if value is not None}


class Window:
    """Steps whose numbers are still on the device. `add` each, `fetch` when `full` or before anything that must know them."""

    def __init__(self, group: Group, device: str, steps: int) -> None:
        self.group, self.device, self.steps = group, device, steps
        self.size = WINDOW[device.split(":")[0]]
        self._pending: list[tuple[Record, Tensor]] = []
        self.restart()

    @property
    def full(self) -> bool:
        return len(self._pending) >= self.size

    def restart(self) -> None:
        """Leave out of the step times what has passed since the last fetch."""
        self._since = time.perf_counter()

    def add(self, record: Record, outcome: Outcome | None, norm: Tensor | None) -> None:
        """The numbers are copied: a GPU step may write the next ones into the same place."""
        self._pending.append((record, self._numbers(outcome, norm)))

    def _numbers(self, outcome: Outcome | None, norm: Tensor | None) -> Tensor:
        """float64 [4K + 2]: sums over this process's rows (losses, hits, joint hits, tries), the loss, the gradient's norm."""
        zeros = torch.zeros(self.steps, dtype=torch.float64, device=self.device)
        ends = [torch.zeros((), dtype=torch.float64, device=self.device) if x is None else x.detach().double()
                for x in (None if outcome is None else outcome.loss, norm)]
        ends[1] = ends[1] / self.group.size  # the same in every process
        if outcome is None:
            return torch.cat([zeros.repeat(4), torch.stack(ends)])
        own = torch.where(outcome.rows > 0, outcome.losses * outcome.rows, zeros)
        tables = [t.sum(0).double() for t in (outcome.hits, joint_hits(outcome.hits, outcome.known), outcome.known)]
        return torch.cat([own, *tables, torch.stack(ends)])

    def fetch(self, on_record: Callable[[Record], None]) -> None:
        """Complete the pending records and hand them on in order. `on_record` may raise: the rest is dropped."""
        if not self._pending:
            return
        pending, self._pending = self._pending, []
        numbers = self.group.sum(torch.stack([n for _, n in pending])).cpu()
        seconds = (time.perf_counter() - self._since) / len(pending)
        waited = sum(record["waited"] for record, _ in pending) / len(pending)
        self.restart()
        for (record, _), row in zip(pending, numbers, strict=True):
            on_record(self._complete(record, row, seconds, waited))

    def _complete(self, record: Record, row: Tensor, seconds: float, waited: float) -> Record:
        losses, hits, joint, tried = row[: 4 * self.steps].view(4, self.steps)
        loss, norm = row[-2:].tolist()
        rows, left, _ = (record.pop(name) for name in ("rows", "left", "waited"))
        trained = sum(rows) > 0
        return record | {
            "loss": loss if trained else None, "losses": rounded(losses / torch.tensor(rows)), "hits": rounded(hits / tried.clamp(min=1)),
            "joint": rounded(joint / tried.clamp(min=1)), "grad_norm": norm if trained else None, "seconds": round(seconds, 4),
            "tokens_per_s": round(record["tokens"] / seconds, 1), "wait_share": round(min(1.0, waited / seconds), 4),
            "left_s": round(seconds * left, 1),
        }  # fmt: skip


def rounded(values: Tensor) -> list[float | None]:
    return [None if math.isnan(v) else round(v, 5) for v in values.tolist()]
