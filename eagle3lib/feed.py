"""Reading ahead: threads read, check and pack the next batches while the device computes on the current one.

For a GPU they also pad and pin them, and compute the target's greedy tokens beside the training step. Order is that of the list.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from eagle3lib.batches import Batch, Reader

WORKERS = {"cpu": 1, "cuda": 4}  # threads; a CPU that trains has nothing to spare
AHEAD = 2  # batches beyond those that the threads are at


class Fed(NamedTuple):
    sent: Any  # the batch, or what `send` made of it; None when none of the samples has a supervised row
    positions: int  # supervised positions
    rows: Tensor  # int64 [K] on the CPU: rows of each TTT step that the loss is taken over
    waited: float  # seconds that the taker stood still


class Feed:
    """Iterate over it to get a Fed for each list of samples, in order. Use as a context manager: leaving it ends the threads."""

    def __init__(self, reader: Reader, todo: Sequence[list[int]], send: Callable[[Batch], Any], t2d: Tensor, steps: int) -> None:
        self.reader, self.todo, self.send, self.t2d, self.steps = reader, todo, send, t2d.cpu(), steps
        self.workers = WORKERS[reader.device.type]
        self._pool = ThreadPoolExecutor(self.workers, "feed")
        self._local = threading.local()

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Fed]:
        coming: deque[Future[tuple[Any, int, Tensor]]] = deque()
        for n in range(len(self.todo)):
            while len(coming) < self.workers + AHEAD and n + len(coming) < len(self.todo):
                coming.append(self._pool.submit(self._read, self.todo[n + len(coming)]))
            start = time.perf_counter()
            sent, positions, rows = coming.popleft().result()
            yield Fed(sent, positions, rows, time.perf_counter() - start)

    def _read(self, samples: list[int]) -> tuple[Any, int, Tensor]:
        with self._stream():
            batch = self.reader.batch(samples) if samples else None
        if batch is None or not len(batch):
            return None, 0, torch.zeros(self.steps, dtype=torch.int64)
        return self.send(batch), len(batch), trained_rows(batch, self.t2d, self.steps)

    def _stream(self) -> Any:
        """A stream of the thread's own, so that greedy tokens are computed beside the training step."""
        if self.reader.device.type != "cuda":
            return nullcontext()
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self.reader.device)
        return torch.cuda.stream(self._local.stream)


def trained_rows(batch: Batch, t2d: Tensor, steps: int) -> Tensor:
    """int64 [K]: rows of each step that are supervised and whose greedy target lies in the draft vocabulary (see loss)."""
    inside, at = t2d[batch.greedy], torch.arange(len(batch))
    alive = [at[batch.left > k] + k for k in range(steps)]
    return torch.stack([inside[m].sum() for m in alive])
