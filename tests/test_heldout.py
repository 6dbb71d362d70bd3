"""Acceptance on held-out rows: equal to counting by hand, as a whole and in every bucket, whatever the number of processes."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from drafts import HIDDEN, VOCAB, make_sample, small_draft

from eagle3lib import heldout
from eagle3lib.batches import Reader
from eagle3lib.loss import simulate
from eagle3lib.parallel import Group
from eagle3lib.samples import stack

SAMPLES = [make_sample(150, [(60, 124)], seed=1), make_sample(90, [(3, 66), (70, 80)], seed=2), make_sample(90, [(10, 85)], seed=3),
           make_sample(20, [(4, 16)], seed=4)]
PARTS, STEPS = [[0], [1, 2], [3]], 3


class Stored:
    def read_many(self, numbers, scratch=None):
        return stack([SAMPLES[i] for i in numbers])


@pytest.fixture
def reader():
    return Reader(Stored(), torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)))


@pytest.fixture
def draft():
    return small_draft(drafted=VOCAB)


def by_hand(draft, reader):
    """(context, reply length, joint hits, tries) of every supervised row, straight from the masks."""
    rows = []
    for n, sample in enumerate(SAMPLES):
        batch = reader.batch([n])
        hits, known = simulate(draft, batch, STEPS)
        ends = [t for t in range(len(sample.loss_mask)) if sample.loss_mask[t] and not sample.loss_mask[t + 1 : t + 2].any()]
        for m, row in enumerate(batch.row.tolist()):
            end = next(e for e in ends if e >= row + 1)
            start = max(t for t in range(end + 1) if sample.loss_mask[t] and not sample.loss_mask[t - 1])
            joint = [bool(hits[m, : k + 1].all()) and bool(known[m, k]) for k in range(STEPS)]
            rows.append((row + 2, end - start + 1, joint, known[m].tolist()))
    return rows


def length(rows):
    return 1 + sum(sum(r[2][k] for r in rows) / max(1, sum(r[3][k] for r in rows)) for k in range(STEPS))


def test_total_and_buckets_are_those_of_counting_by_hand(draft, reader):
    rows, found = by_hand(draft, reader), heldout.measure(draft, reader, PARTS, STEPS, "cpu", Group())
    assert found.total.length == pytest.approx(length(rows)) and found.total.rounds == len(rows) and found.total.prompts == 4
    bounds = [0, *heldout.EDGES, 10**9]
    for place, buckets in ((0, found.by_context), (1, found.by_reply)):
        assert len(buckets) >= 2
        for name, figure in buckets.items():
            low = int(name.rstrip("+").split("-")[0])
            inside = [r for r in rows if low <= r[place] < bounds[bounds.index(low) + 1]]
            assert figure.rounds == len(inside) and figure.length == pytest.approx(length(inside))
    assert set(found.buckets) == {"context", "reply"} and found.buckets["context"]["0-63"]["rows"] == found.by_context["0-63"].rounds


def test_a_token_outside_the_draft_vocabulary_is_a_miss(reader):
    all_known = heldout.measure(small_draft(drafted=VOCAB), reader, PARTS, STEPS, "cpu", Group()).total
    few = heldout.measure(small_draft(drafted=2), reader, PARTS, STEPS, "cpu", Group()).total
    assert few.rounds == all_known.rounds  # tried all the same
    outside = sum(int(not small_draft(drafted=2).t2d[g]) for n in range(4) for g in reader.batch([n]).greedy)
    assert few.survival[0] <= 1 - outside / few.rounds


def test_no_row_no_figure(draft, reader):
    SAMPLES.append(make_sample(9, [(5, 6)]))
    try:
        assert heldout.measure(draft, reader, [[4]], STEPS, "cpu", Group()) is None
        assert heldout.measure(draft, reader, [], STEPS, "cpu", Group()) is None
    finally:
        SAMPLES.pop()


@dataclass(frozen=True)
class Part(Group):
    """One of several processes whose words the others have said already."""

    said: list = field(default_factory=list)

    def gather(self, value):
        self.said.append(value)
        return list(self.said)


def test_several_processes_say_the_same_as_one(draft, reader):
    alone, said = heldout.measure(draft, reader, PARTS, STEPS, "cpu", Group()), []
    for rank in range(2):
        together = heldout.measure(draft, reader, PARTS, STEPS, "cpu", Part(rank, 2, 0, said))
    assert together == alone
