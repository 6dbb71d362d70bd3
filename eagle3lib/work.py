"""Work shared by engines: rows still to do, cut into batches of about equal tokens, longest rows first.

Whoever is free takes the next batch, so a slow engine takes fewer and a dead one's come back. Towards the end batches
shrink, so that nobody waits long for the last. A row that failed goes alone when it is tried again: it may have
spoiled its neighbours.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, field

import numpy as np


@dataclass
class Task:
    row: int  # number of the row
    tokens: int
    reasons: list[str] = field(default_factory=list)  # one for every time it failed


class Work:
    """rows: numbers of the rows to do; lengths: their tokens; takers: threads that will take batches. Thread-safe."""

    def __init__(self, rows: np.ndarray, lengths: np.ndarray, batch_tokens: int, takers: int):
        order = np.argsort(-lengths, kind="stable")
        self._rows, self._lengths = rows[order].astype(np.int32), lengths[order].astype(np.int32)
        self._next, self._left = 0, int(lengths.sum())
        self.batch_tokens, self.takers = batch_tokens, takers
        self._returned: deque[list[Task]] = deque()
        self._out = 0  # batches under way
        self._stopped = False
        self._change = threading.Condition()

    def take(self) -> list[Task]:
        """The next batch; waits while others may still fail and come back. [] when all is done, or stop() was called."""
        with self._change:
            while not self._stopped:
                if self._returned or self._next < len(self._rows):
                    self._out += 1
                    return self._returned.popleft() if self._returned else self._cut()
                if not self._out:
                    break
                self._change.wait(1.0)
            return []

    def _cut(self) -> list[Task]:
        room = min(self.batch_tokens, max(self._left // (2 * self.takers), self.batch_tokens // 8))
        batch: list[Task] = []
        while self._next < len(self._rows) and (not batch or room >= self._lengths[self._next]):
            task = Task(int(self._rows[self._next]), int(self._lengths[self._next]))
            batch.append(task)
            room -= task.tokens
            self._left -= task.tokens
            self._next += 1
        return batch

    def done(self, again: list[Task] | None = None) -> None:
        """A batch is dealt with; `again`: those of it that failed and shall be tried once more."""
        with self._change:
            self._out -= 1
            self._returned.extend([task] for task in again or [])
            self._change.notify_all()

    def give_back(self, batch: list[Task]) -> None:
        """The batch was not done, through no fault of its rows."""
        with self._change:
            self._out -= 1
            self._returned.append(batch)
            self._change.notify_all()

    def stop(self) -> None:
        with self._change:
            self._stopped = True
            self._change.notify_all()

    @property
    def stopped(self) -> bool:
        return self._stopped

    @property
    def remaining(self) -> bool:
        return bool(self._returned) or self._next < len(self._rows) or self._out > 0
