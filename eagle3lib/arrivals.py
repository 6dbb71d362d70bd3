"""What arrives must look like what arrived before: norms of hidden states against their running distribution.

Two rules for each stream, both in ratios, both deaf until enough samples have come:
    a sample's typical norm (geometric mean, token 0 apart) lies near the median of those before, within 8 robust deviations or
    a factor of 3; no single row counts for more than a factor of 8 in it, and samples of fewer than 4 rows are not judged by it;
    each row's norm lies within a factor of 8 of the smallest and largest row seen so far.
Token 0 of a Llama is an attention sink whose norm is 170 times the median: it is always there, so it is among the rows
seen and raises no alarm. Legend: N samples of R rows in all, S streams.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence

import numpy as np

ENOUGH = 32  # samples before anything is judged
REMEMBERED = 1024  # latest samples
EVERY = 64  # samples between two looks at the distribution
DEVIATIONS, FACTOR = 8.0, 3.0
ROOM = math.log(8.0)  # between a row and all rows before
SHORT = 4  # rows


class Norms:
    """The running distribution, stream by stream; any number of threads may ask."""

    def __init__(self, names: Sequence[str]):
        self.names = list(names)
        self._typical = np.zeros((REMEMBERED, len(names)))  # natural logarithms
        self._low, self._high = np.full(len(names), math.inf), np.full(len(names), -math.inf)
        self._center, self._width = np.zeros(len(names)), np.full(len(names), math.inf)
        self._count = self._looked = 0
        self._guard = threading.Lock()

    def judge(self, norms_RS: np.ndarray, starts_N: np.ndarray) -> dict[int, str]:
        """Number of the sample -> how it differs from those before; the others join them. starts_N: where each sample begins.

        Norms are finite and above 0. All samples of a call are judged by those of earlier calls."""
        logs_RS = np.log(norms_RS.astype(np.float64))
        low_NS, high_NS = np.minimum.reduceat(logs_RS, starts_N), np.maximum.reduceat(logs_RS, starts_N)
        counts_N1 = np.diff([*starts_N, len(logs_RS)])[:, None]
        with self._guard:
            known = self._count >= ENOUGH
            tame_RS = self._center + np.clip(logs_RS - self._center, -ROOM, ROOM) if known else logs_RS
            rest_NS = np.add.reduceat(tame_RS, starts_N) - tame_RS[starts_N]
            typical_NS = np.where(counts_N1 > 1, rest_NS / np.maximum(counts_N1 - 1, 1), tame_RS[starts_N])
            found = self._strange(logs_RS, starts_N, low_NS, high_NS, np.where(counts_N1 < SHORT, self._center, typical_NS)) if known else {}
            usual_N = [n for n in range(len(starts_N)) if n not in found]
            if usual_N:
                self._join(low_NS[usual_N], high_NS[usual_N], typical_NS[usual_N])
        return found

    def _strange(self, logs_RS: np.ndarray, starts_N: np.ndarray, low_NS: np.ndarray, high_NS: np.ndarray, typical_NS: np.ndarray) -> dict[int, str]:
        found: dict[int, str] = {}
        for n, s in np.argwhere((high_NS > self._high + ROOM) | (low_NS < self._low - ROOM)):
            rows_T = logs_RS[starts_N[n] : (*starts_N, len(logs_RS))[n + 1], s]
            worst = int(np.argmax(np.maximum(rows_T - self._high[s], self._low[s] - rows_T)))
            found.setdefault(int(n), f"{self.names[s]} at row {worst} has a norm of {math.exp(rows_T[worst]):.4g}; all rows before lay between "
                             f"{math.exp(self._low[s]):.4g} and {math.exp(self._high[s]):.4g}.")
        for n, s in np.argwhere(np.abs(typical_NS - self._center) > self._width):
            found.setdefault(int(n), f"{self.names[s]}: the sample's typical norm is {math.exp(typical_NS[n, s]):.4g}, that of the samples before "
                             f"{math.exp(self._center[s]):.4g}; at most a factor of {math.exp(self._width[s]):.3g} between them is usual.")
        return found

    def _join(self, low_NS: np.ndarray, high_NS: np.ndarray, typical_NS: np.ndarray) -> None:
        for typical_S in typical_NS:
            self._typical[self._count % REMEMBERED] = typical_S
            self._count += 1
        self._low, self._high = np.minimum(self._low, low_NS.min(0)), np.maximum(self._high, high_NS.max(0))
        if self._count >= ENOUGH and (not self._looked or self._count >= self._looked + EVERY):
            self._looked = self._count
            known = self._typical[: self._count]
            self._center = np.median(known, axis=0)
            spread = 1.4826 * np.median(np.abs(known - self._center), axis=0)  # a standard deviation, if they were normal
            self._width = np.maximum(math.log(FACTOR), DEVIATIONS * spread)
