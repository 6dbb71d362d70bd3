"""Reading ahead: a thread reads, checks and packs the next batches while the device computes on the current one.

On a GPU it also sends them there (pinned), and computes the target's greedy tokens on a stream of its own. Order is that of the list.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3lib.batches import Batch, Reader

AHEAD = 3  # batches read and not yet asked for


class Fed(NamedTuple):
    sent: Any  # the batch, or what `send` made of it; None when none of the samples has a supervised row
    positions: int  # supervised positions
    rows: Tensor  # int64 [K] on the CPU: rows of each TTT step that the loss is taken over
    waited: float  # seconds that the taker stood still


class Feed:
    """Iterate over it to get a Fed for each list of samples. Use as a context manager: leaving it ends the thread."""

    def __init__(self, reader: Reader, todo: Sequence[list[int]], send: Callable[[Batch], Any], t2d: Tensor, steps: int) -> None:
        self.reader, self.todo, self.send, self.t2d, self.steps = reader, todo, send, t2d.cpu(), steps
        self._queue: queue.Queue[Any] = queue.Queue(AHEAD)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        while self._thread.is_alive():  # it may stand before a full queue
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                pass
        self._thread.join()

    def __iter__(self) -> Iterator[Fed]:
        for _ in self.todo:
            start = time.perf_counter()
            found = self._queue.get()
            if isinstance(found, BaseException):
                raise found
            sent, positions, rows = found
            yield Fed(sent, positions, rows, time.perf_counter() - start)

    def _work(self) -> None:
        device = self.reader.device
        try:
            with torch.cuda.stream(torch.cuda.Stream(device)) if device.type == "cuda" else nullcontext():
                for samples in self.todo:
                    self._put(self._read(samples))
                    if self._over.is_set():
                        return
        except BaseException as error:  # it belongs to whoever waits for the batch
            self._put(error)

    def _read(self, samples: list[int]) -> tuple[Any, int, Tensor]:
        batch = self.reader.batch(samples) if samples else None
        if batch is None or not len(batch):
            return None, 0, torch.zeros(self.steps, dtype=torch.int64)
        return self.send(batch), len(batch), trained_rows(batch, self.t2d, self.steps)

    def _put(self, item: Any) -> None:
        while not self._over.is_set():
            try:
                return self._queue.put(item, timeout=0.2)
            except queue.Full:
                continue


def trained_rows(batch: Batch, t2d: Tensor, steps: int) -> Tensor:
    """int64 [K]: rows of each step that are supervised and whose greedy target lies in the draft vocabulary (see loss)."""
    inside, at = t2d[batch.greedy], torch.arange(len(batch))
    alive = [at[batch.left > k] + k for k in range(steps)]
    return torch.stack([inside[m].sum() for m in alive])
