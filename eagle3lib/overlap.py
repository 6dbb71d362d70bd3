"""Overlap: text that shares a run of words with an evaluation set, or most of its words with other training text.

The first would make the evaluation worthless, the second teaches the same thing many times.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from eagle3lib import evalsets
from eagle3lib.errors import Eagle3Error

RUN, HALF = 8, 4  # words
SHINGLE = 3  # words; what near duplicates are compared by
_PERMUTATIONS = 128
_WORD = re.compile(r"\w+")


# What the pattern and casefold do to ASCII text, as a table of bytes: ten times as fast, and most text is ASCII.
_ASCII = bytes(ord(chr(c).lower()) if _WORD.match(chr(c)) else ord(" ") for c in range(128)) + bytes(128)


def words(text: str) -> list[str]:
    """Case and punctuation do not count."""
    if text.isascii():
        return text.encode().translate(_ASCII).decode().split()
    return _WORD.findall(text.casefold())


class Runs:
    """The 8-word runs of a set of prompts. A prompt of fewer words is met only by a text with exactly its words."""

    def __init__(self, prompts: Iterable[str]):
        texts = [tuple(words(prompt)) for prompt in prompts]
        self._short = {text for text in texts if len(text) < RUN}
        self._runs = {run for text in texts for run in _runs_of(text)}
        self._halves = {run[i : i + HALF] for run in self._runs for i in range(RUN - HALF + 1)}

    @classmethod
    def of_evalsets(cls) -> Runs:
        """Every turn of every evaluation set that `evalsets` knows."""
        return cls(turn for name in evalsets.NAMES for prompt in evalsets.load(name) for turn in prompt.turns)

    def meets(self, text: str) -> str:
        """The shared words, or "" when there are none."""
        found = tuple(words(text))
        if len(found) < RUN:
            return " ".join(found) if found in self._short else ""
        # Of eight neighbours, four begin at a multiple of four: a quarter of the work settles nearly every text.
        if self._halves.isdisjoint(zip(*(found[i::HALF] for i in range(HALF)), strict=False)):
            return ""
        return " ".join(next((run for run in _runs_of(found) if run in self._runs), ()))


def _runs_of(found: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Every eight neighbours. A zip of shifted copies stays out of the interpreter: all training text goes through it."""
    return zip(*(found[i:] for i in range(RUN)), strict=False)


class NearDuplicates:
    """Finds texts whose sets of 3-word runs have an estimated Jaccard similarity of `threshold` (0..1) or more with an
    earlier one: MinHash with locality-sensitive hashing, by `datasketch`. Which of two is the earlier depends on the
    order of the input. Raises Eagle3Error when datasketch is not installed."""

    def __init__(self, threshold: float):
        try:
            from datasketch import MinHash, MinHashLSH
        except ImportError:
            raise Eagle3Error("near_duplicates needs the package datasketch, which is missing. Run `make setup`, or set it to 0.") from None
        self._threshold, self._new = threshold, MinHash
        self._index = MinHashLSH(threshold, _PERMUTATIONS)
        self._kept: list[Any] = []

    def meets(self, text: str) -> bool:
        """Is it near to an earlier text? If not, it becomes one of those."""
        found = words(text)
        sketch = self._new(_PERMUTATIONS)
        sketch.update_batch({" ".join(found[i : i + SHINGLE]).encode() for i in range(max(1, len(found) - SHINGLE + 1))})
        if any(sketch.jaccard(self._kept[i]) >= self._threshold for i in self._index.query(sketch)):
            return True
        self._index.insert(len(self._kept), sketch)
        self._kept.append(sketch)
        return False
