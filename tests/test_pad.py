"""Padding to fixed sizes changes neither the loss nor a gradient; the layout for the GPU's attention kernel; distances."""

from __future__ import annotations

import threading

import pytest
import torch
from drafts import HIDDEN, VOCAB, make_batch, make_sample, small_draft, unrolled
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib.batches import TENSORS, pad
from eagle3lib.distances import row_gradients
from eagle3lib.errors import Eagle3Error
from eagle3lib.flash import Varlen
from eagle3lib.graph import GraphStep
from eagle3lib.loss import objective

MIXED = [make_sample(14, [(4, 10)], seed=1), make_sample(20, [(3, 5), (8, 19)], seed=2), make_sample(9, [(5, 9)], seed=3)]
HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)


def gradients(batch, distance="ce", decay=0.8):
    draft = small_draft(torch.float64)
    outcome = objective(draft, batch, HEAD[draft.target_ids], 4, decay, distance)
    outcome.loss.backward()
    return [outcome.loss.detach(), outcome.losses, *(p.grad for p in draft.parameters() if p.requires_grad)]


@settings(max_examples=25, deadline=None)
@given(more=st.integers(1, 6), gap=st.integers(0, 4), room=st.integers(0, 5), documents=st.integers(1, 4))
def test_padding_to_fixed_sizes_counts_for_nothing(more, gap, room, documents):
    batch = make_batch(MIXED, HEAD)
    sizes = (len(batch.token) + more + gap + room, len(batch) + more, batch.queries + more + gap, len(batch.ids) + documents)
    padded = pad(batch, *sizes)
    assert (len(padded.token), len(padded), padded.queries, len(padded.ids)) == sizes
    for plain, other in zip(gradients(batch), gradients(padded), strict=True):
        torch.testing.assert_close(plain, other, rtol=0, atol=1e-12)


def test_padding_that_does_not_fit_is_refused():
    batch = make_batch(MIXED, HEAD)
    rows, positions, queries, documents = len(batch.token), len(batch), batch.queries, len(batch.ids)
    for sizes in ((rows, positions + 1, queries + 1, documents + 1), (rows + 9, positions, queries, documents + 1),
                  (rows + 9, positions + 2, queries + 1, documents + 1), (rows + 9, positions + 1, queries + 1, documents)):
        with pytest.raises(ValueError, match="cannot pad"):
            pad(batch, *sizes)


def test_the_kernels_layout_ends_each_document_with_its_last_row():
    """A causal kernel that aligns the last query with the last key must see each row where it is."""
    batch = make_batch(MIXED, HEAD)
    at = Varlen.of(batch)
    assert at.slots == batch.queries == int(at.query_ends[-1]) and int(at.key_ends[-1]) == len(batch.token)
    assert len(at.slot.unique()) == len(batch)
    for m, row in enumerate(batch.row.tolist()):
        document = int(batch.document[row])
        behind = int(at.query_ends[document + 1] - 1 - at.slot[m])  # queries of this document after this one
        assert behind == int(at.key_ends[document + 1]) - 1 - row


def test_a_batch_is_mapped_tensor_by_tensor():
    batch = make_batch(MIXED, HEAD)
    batch.places = Varlen.of(batch)
    seen = []
    copied = batch.map(lambda t: seen.append(t) or t.clone())
    assert len(seen) == len(TENSORS) + 3 and copied.places.slots == batch.places.slots
    assert all(torch.equal(getattr(batch, n), getattr(copied, n)) for n in TENSORS)


# Distances -------------------------------------------------------------------------------------------------------------


def test_distances_and_their_slopes_against_autograd():
    torch.manual_seed(0)
    logits, target = torch.randn(12, 30).double() * 3, torch.randn(4, 30).double() * 3
    for distance in ("ce", "kl", "lk"):
        z = logits.clone().requires_grad_()
        p, q = target.softmax(-1).unsqueeze(1), z.view(4, 3, 30).softmax(-1)
        expected = {"ce": -(p * q.log()).sum(-1), "kl": (p * (p / q).log()).sum(-1), "lk": -torch.minimum(p, q).sum(-1).log()}[distance]
        expected.sum().backward()
        each, guess, slope = row_gradients(logits.clone(), target, torch.ones(4, 3) > 0, distance, torch.float64)
        torch.testing.assert_close(each, expected.detach(), rtol=0, atol=1e-12)
        torch.testing.assert_close(slope, z.grad, rtol=0, atol=1e-12)
        assert torch.equal(guess.flatten(), logits.argmax(-1))


def test_a_perfect_draft_is_at_no_distance():
    logits = torch.randn(4, 30).double()
    for distance in ("kl", "lk"):
        each, _, slope = row_gradients(logits.repeat_interleave(2, 0), logits, torch.ones(4, 2) > 0, distance, torch.float64)
        assert each.abs().max() < 1e-12 and slope.abs().max() < 1e-12


def test_an_unknown_distance_is_refused():
    draft = small_draft(torch.float64)
    with pytest.raises(Eagle3Error, match="loss 'mse': one of ce, kl, lk is wanted"):
        objective(draft, make_batch(MIXED, HEAD), HEAD[draft.target_ids], 2, 0.8, "mse")


def test_parts_of_a_batch_add_up_when_divided_by_the_whole_batchs_rows():
    whole, draft = make_batch(MIXED, HEAD), small_draft(torch.float64)
    head = HEAD[draft.target_ids]
    expected = objective(draft, whole, head, 4, 0.8)
    parts = [objective(draft, make_batch([s], HEAD), head, 4, 0.8, rows=expected.rows) for s in MIXED]
    assert torch.equal(sum(p.rows for p in parts), expected.rows)
    torch.testing.assert_close(sum(p.loss for p in parts), expected.loss, rtol=0, atol=1e-12)


def test_every_step_has_all_positions_and_dead_ones_are_told_apart():
    draft, batch = small_draft(torch.float64), make_batch(MIXED, HEAD)
    assert [len(alive) for alive, _ in unrolled(draft, batch, 4)] == [int((batch.left > k).sum()) for k in range(4)]


# Sizes of batches for the GPU's graphs -----------------------------------------------------------------------------------


def chooser(batch_tokens=2048):
    """The part of GraphStep that needs no GPU."""
    step = object.__new__(GraphStep)
    step.batch_tokens, step.known, step.choosing = batch_tokens, [], threading.Lock()
    return step


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.tuples(st.integers(6, 90), st.integers(1, 60)), min_size=1, max_size=9), min_size=1, max_size=12))
def test_batches_of_any_lengths_fit_into_the_size_chosen_for_them(drawn):
    step = chooser(512)
    for spec in drawn:
        samples = [make_sample(length, [(max(1, length - reply), length)], seed=n) for n, (length, reply) in enumerate(spec)]
        batch = make_batch(samples, HEAD)
        if not len(batch):
            continue
        rows, positions, documents, queries, longest = step._sizes(batch)
        padded = pad(batch, rows, positions, queries, documents, states=False)
        assert padded.queries == queries and Varlen.of(padded).longest <= longest
        assert len(padded.aux) == len(batch.token) and len(padded.row) == positions


def test_few_sizes_serve_many_batches():
    step, generator = chooser(), torch.Generator().manual_seed(3)
    for n in range(200):
        lengths = torch.randint(40, 220, (14,), generator=generator).tolist()
        step._sizes(make_batch([make_sample(length, [(20, length)], seed=n) for length in lengths], HEAD))
    assert len(step.known) <= 24, step.known
