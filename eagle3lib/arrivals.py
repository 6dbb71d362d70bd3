"""What arrives must look like what arrived before: norms of hidden states against their running distribution.

Two rules for each stream, both in ratios, both deaf until enough samples have come:
    a sample's median norm (token 0 apart) lies near the median of such medians, within 8 robust deviations or a factor of 3;
    each row's norm lies within a factor of 8 of the smallest and largest row seen so far.
Token 0 of a Llama is an attention sink whose norm is 170 times the median: it is always there, so it is among the rows
seen and raises no alarm. Legend: T tokens, S streams.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

from eagle3lib.errors import Eagle3Error

ENOUGH = 32  # samples before anything is judged
REMEMBERED = 1024  # latest samples
EVERY = 64  # samples between two looks at the distribution
DEVIATIONS, FACTOR, ROW_FACTOR = 8.0, 3.0, 8.0


class Norms:
    """The running distribution, stream by stream; any number of threads may ask."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self._medians = np.zeros((REMEMBERED, len(names)))  # natural logarithms
        self._low, self._high = np.full(len(names), math.inf), np.full(len(names), -math.inf)
        self._center, self._width = np.zeros(len(names)), np.full(len(names), math.inf)
        self._count = 0
        self._guard = threading.Lock()

    def require_usual(self, norms_TS: np.ndarray) -> None:
        """Eagle3Error that names row and stream when a sample is not like those before; else it joins them."""
        logs_TS = np.log(norms_TS)
        middle_S = np.median(logs_TS[1:] if len(logs_TS) > 1 else logs_TS, axis=0)
        with self._guard:
            if self._count >= ENOUGH:
                self._judge(logs_TS, middle_S)
            self._join(logs_TS, middle_S)

    def _judge(self, logs_TS: np.ndarray, middle_S: np.ndarray) -> None:
        for s in np.flatnonzero(np.abs(middle_S - self._center) > self._width):
            raise Eagle3Error(f"{self.names[s]}: the sample's median norm is {math.exp(middle_S[s]):.4g}, that of the samples before "
                              f"{math.exp(self._center[s]):.4g}; at most a factor of {math.exp(self._width[s]):.3g} between them is usual.")
        room = math.log(ROW_FACTOR)
        for t, s in np.argwhere((logs_TS > self._high + room) | (logs_TS < self._low - room)):
            raise Eagle3Error(f"{self.names[s]} at row {t} has a norm of {math.exp(logs_TS[t, s]):.4g}; all rows before lay between "
                              f"{math.exp(self._low[s]):.4g} and {math.exp(self._high[s]):.4g}.")

    def _join(self, logs_TS: np.ndarray, middle_S: np.ndarray) -> None:
        self._medians[self._count % REMEMBERED] = middle_S
        self._count += 1
        self._low, self._high = np.minimum(self._low, logs_TS.min(0)), np.maximum(self._high, logs_TS.max(0))
        if self._count == ENOUGH or self._count % EVERY == 0:
            known = self._medians[: self._count]
            self._center = np.median(known, axis=0)
            spread = 1.4826 * np.median(np.abs(known - self._center), axis=0)  # a standard deviation, if they were normal
            self._width = np.maximum(math.log(FACTOR), DEVIATIONS * spread)
