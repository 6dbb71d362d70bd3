"""Seen: which contents were met before, in eight bytes each; a Python set takes about a hundred."""

from __future__ import annotations

import numpy as np
import xxhash

_RECENT = 50_000


class Seen:
    """A set of contents by their 64-bit hash. Two of 10 million different ones are taken for the same with a
    probability of 3e-6: then one row is lost as a duplicate, and nothing else happens."""

    def __init__(self) -> None:
        self._recent: set[int] = set()
        self._sorted: list[np.ndarray] = []  # sorted hashes; each array at least twice as long as the next

    def add(self, content: bytes) -> bool:
        """True when it is new."""
        key = xxhash.xxh3_64_intdigest(content)
        if key in self._recent or any(_holds(known, key) for known in self._sorted):
            return False
        self._recent.add(key)
        if len(self._recent) >= _RECENT:
            self._settle()
        return True

    def _settle(self) -> None:
        new = np.fromiter(self._recent, dtype=np.uint64, count=len(self._recent))
        new.sort()
        while self._sorted and len(self._sorted[-1]) < 2 * len(new):
            new = np.concatenate([self._sorted.pop(), new])
            new.sort(kind="stable")  # a merge: both halves are sorted
        self._sorted.append(new)
        self._recent = set()


def _holds(known: np.ndarray, key: int) -> bool:
    at = int(known.searchsorted(np.uint64(key)))
    return at < len(known) and int(known[at]) == key
