"""The draft vocabulary: the target tokens that the draft may propose, and the maps between the two.

Legend: V target vocabulary, D draft vocabulary. The rule is EAGLE-3's: the D most frequent supervised tokens, sorted
by id; `d2t` holds offsets (target id = j + d2t[j]), which is how SGLang and vLLM rebuild the ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle3lib.errors import ParamError


@dataclass(frozen=True)
class DraftVocab:
    d2t: torch.Tensor  # int64 [D], offsets: target id = j + d2t[j]
    t2d: torch.Tensor  # bool [V]
    coverage: float  # share of the supervised tokens that the draft can say, 0..1

    @property
    def ids(self) -> torch.Tensor:
        """int64 [D]: the target ids, ascending; rebuilt the way that the serving engine does."""
        return self.d2t + torch.arange(len(self.d2t))


def draft_vocab(counts: Sequence[int] | np.ndarray | torch.Tensor, size: int, forced: Iterable[int] = ()) -> DraftVocab:
    """Choose the draft vocabulary.

    counts: [V] how often each target id is supervised. size: D; V or more gives the full vocabulary. forced: ids that
    are in whatever their count (end of turn, other special reply tokens). Ties go to the smaller id.
    Raises ParamError when size is less than one or than the forced ids, or a forced id is outside the vocabulary.
    """
    counts_V = np.asarray(counts, dtype=np.int64)
    ids = _choose(counts_V, size, sorted(set(forced)))
    t2d_V = np.zeros(len(counts_V), dtype=bool)
    t2d_V[ids] = True
    d2t_D = ids - np.arange(len(ids))
    return DraftVocab(torch.from_numpy(d2t_D), torch.from_numpy(t2d_V), _share(counts_V[ids].sum(), counts_V.sum()))


def of_draft(d2t: torch.Tensor, t2d: torch.Tensor, counts: Sequence[int] | np.ndarray | torch.Tensor) -> DraftVocab:
    """The vocabulary of a draft that already has one, with the share of the supervised tokens that it covers."""
    counts_V = np.asarray(counts, dtype=np.int64)
    return DraftVocab(d2t.cpu(), t2d.cpu(), _share(counts_V[t2d.cpu().numpy()].sum(), counts_V.sum()))


def reply_tokens(tokenizer: Any, counts: Sequence[int] | np.ndarray | torch.Tensor, ends: Iterable[int]) -> list[int]:
    """The ids that a draft vocabulary must hold: those that end a turn, and every added (special) token seen in a reply."""
    counts_V = np.asarray(counts, dtype=np.int64)
    return sorted({*ends, *(i for i in tokenizer.added_tokens_decoder if i < len(counts_V) and counts_V[i])})


def _choose(counts_V: np.ndarray, size: int, forced: list[int]) -> np.ndarray:
    V = len(counts_V)
    if size < 1:
        raise ParamError(f"draft vocabulary of {size} tokens: it needs at least one")
    if forced and not 0 <= forced[0] <= forced[-1] < V:
        raise ParamError(f"forced token ids {forced[0]}..{forced[-1]} are outside the target's vocabulary of {V:,}")
    if len(forced) > size:
        raise ParamError(f"draft vocabulary of {size} tokens cannot hold the {len(forced)} tokens that every reply needs; enlarge it")
    ranked = _ranked(counts_V)
    rest = ranked[~np.isin(ranked, forced)][: size - len(forced)]
    return np.sort(np.concatenate([np.asarray(forced, dtype=np.int64), rest]))


def _ranked(counts_V: np.ndarray) -> np.ndarray:
    """All ids, most frequent first, ties by id: a stable sort."""
    return np.argsort(-counts_V, kind="stable").astype(np.int64)


def _share(part: int, whole: int) -> float:
    return float(part / whole) if whole else 1.0


def coverage_curve(counts: Sequence[int] | np.ndarray | torch.Tensor, sizes: Sequence[int] | None = None) -> list[tuple[int, float]]:
    """(N, share of supervised tokens that the N most frequent ids cover) for each size.

    sizes: by default 1,024, doubled up to the full vocabulary, which is always the last point.
    """
    counts_V = np.asarray(counts, dtype=np.int64)
    V = len(counts_V)
    if sizes is None:
        sizes = [n for n in (1024 * 2**k for k in range(30)) if n < V] + [V]
    covered = np.cumsum(counts_V[_ranked(counts_V)])
    return [(int(n), _share(covered[min(n, V) - 1], covered[-1])) for n in sizes]


def count_supervised(input_ids: Iterable[Sequence[int]], loss_masks: Iterable[Sequence[bool]], vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each id occurs under the loss mask."""
    counts_V = np.zeros(vocab_size, dtype=np.int64)
    for ids, mask in zip(input_ids, loss_masks, strict=True):
        np.add.at(counts_V, np.asarray(ids, dtype=np.int64)[np.asarray(mask, dtype=bool)], 1)
    return counts_V
