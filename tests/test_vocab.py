from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import byte_tokenizer

from eagle3lib.errors import ParamError
from eagle3lib.vocab import count_supervised, coverage_curve, draft_vocab, of_draft, reply_tokens


@given(counts=st.lists(st.integers(0, 5), min_size=1, max_size=40), data=st.data())
@settings(max_examples=200, deadline=None)
def test_draft_vocabulary_against_plain_sorting(counts: list[int], data: st.DataObject) -> None:
    V = len(counts)
    forced = data.draw(st.sets(st.integers(0, V - 1), max_size=V))
    size = data.draw(st.integers(max(1, len(forced)), V + 3))
    vocab = draft_vocab(counts, size, forced)
    ranked = sorted((i for i in range(V) if i not in forced), key=lambda i: (-counts[i], i))
    wanted = sorted(forced | set(ranked[: size - len(forced)]))
    assert vocab.ids.tolist() == wanted
    assert vocab.d2t.dtype == torch.int64 and (vocab.d2t + torch.arange(len(wanted))).tolist() == wanted
    assert vocab.t2d.dtype == torch.bool and vocab.t2d.nonzero().flatten().tolist() == wanted
    total = sum(counts)
    assert vocab.coverage == pytest.approx(sum(counts[i] for i in wanted) / total if total else 1.0)


def test_offsets_are_offsets_and_not_ids() -> None:
    vocab = draft_vocab([0, 9, 0, 0, 8, 0, 0, 7], 3)
    assert vocab.d2t.tolist() == [1, 3, 5]
    assert draft_vocab([1, 2, 3], 99).d2t.tolist() == [0, 0, 0]  # the full vocabulary maps every id to itself


@pytest.mark.parametrize(
    ("size", "forced", "message"),
    [(0, [], "at least one"), (2, [0, 1, 2], "cannot hold"), (3, [9], "outside"), (3, [-1], "outside")],
)
def test_impossible_vocabularies(size: int, forced: list[int], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        draft_vocab([1] * 5, size, forced)


def test_special_tokens_of_replies_are_forced_in_and_those_never_seen_are_not() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>", "<unused>"]})
    think, end, unused = tokenizer.convert_tokens_to_ids(["<think>", "</think>", "<unused>"])
    counts = np.zeros(320, dtype=np.int64)
    counts[[think, end, 70]], counts[100:150] = 1, 9
    forced = reply_tokens(tokenizer, counts, [2])
    assert set(forced) == {2, think, end} and unused not in forced
    assert {2, think, end} <= set(draft_vocab(counts, 10, forced).ids.tolist())


def test_the_vocabulary_of_a_draft_is_taken_over_with_what_it_covers() -> None:
    chosen = draft_vocab([5, 0, 3, 2], 2)
    again = of_draft(chosen.d2t, chosen.t2d, [1, 1, 1, 1])
    assert torch.equal(again.ids, chosen.ids) and again.coverage == 0.5


def test_coverage_curve_rises_to_one() -> None:
    counts = np.zeros(5000, dtype=np.int64)
    counts[:3000] = 1
    assert coverage_curve(counts) == [(1024, 1024 / 3000), (2048, 2048 / 3000), (4096, 1.0), (5000, 1.0)]
    assert coverage_curve([3, 1, 0, 4], [1, 2, 9]) == [(1, 0.5), (2, 0.875), (9, 1.0)]
    assert coverage_curve([0, 0]) == [(2, 1.0)]


def test_counting_counts_only_under_the_mask() -> None:
    rng = np.random.default_rng(0)
    ids = [rng.integers(0, 50, n) for n in (1, 30, 200)]
    masks = [rng.random(len(i)) < 0.5 for i in ids]
    wanted = Counter(int(t) for i, m in zip(ids, masks, strict=True) for t, on in zip(i, m, strict=True) if on)
    assert count_supervised(ids, masks, 50).tolist() == [wanted[t] for t in range(50)]
