"""Reading ahead: the same batches in the same order, errors where they belong, no thread left behind."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from drafts import HIDDEN, VOCAB, make_sample, small_draft

from eagle3lib.batches import Reader
from eagle3lib.errors import Eagle3Error
from eagle3lib.feed import Feed
from eagle3lib.loss import objective
from eagle3lib.samples import stack

SAMPLES = [make_sample(14 + n, [(4, 10 + n)], seed=n) for n in range(9)] + [make_sample(8, [(7, 8)])]
TODO = [[0, 1], [2], [9], [], [3, 9, 4], [5, 6, 7, 8]]


class Stored:
    def __init__(self, broken=None, pause=0.0):
        self.broken, self.pause, self.read_so_far = broken, pause, []

    def read(self, i):
        self.read_so_far.append(i)
        time.sleep(self.pause)
        if i == self.broken:
            raise Eagle3Error(f"sample {i} is damaged")
        return SAMPLES[i]

    def read_many(self, numbers, scratch=None):
        return stack([self.read(i) for i in numbers])


def feed(stored, todo=TODO, send=lambda batch: batch):
    draft = small_draft()
    return Feed(Reader(stored, torch.randn(VOCAB, HIDDEN)), todo, send, draft.t2d, 4), draft


def fed_thread():
    return [t for t in threading.enumerate() if t.name == "feed"]


def test_batches_come_in_order_with_the_rows_that_the_loss_counts():
    ahead, draft = feed(Stored())
    plain = Reader(Stored(), ahead.reader.head)
    with ahead:
        for samples, fed in zip(TODO, ahead, strict=True):
            supervised = [i for i in samples if i != 9]
            assert (fed.sent is None) == (not supervised) and fed.positions == (len(plain.batch(supervised)) if supervised else 0)
            if fed.sent is not None:
                assert fed.sent.ids == [SAMPLES[i].id for i in supervised]
                assert torch.equal(fed.sent.aux, plain.batch(supervised).aux)
                assert torch.equal(fed.rows, objective(draft, fed.sent, ahead.reader.head[draft.target_ids], 4, 0.8).rows)
            else:
                assert not fed.rows.any()
    assert not fed_thread()


def test_it_reads_while_the_taker_works_but_not_without_bound():
    stored = Stored()
    ahead, _ = feed(stored, [[n % 9] for n in range(40)])
    with ahead:
        taken = iter(ahead)
        next(taken)
        time.sleep(0.5)
        assert 2 <= len(stored.read_so_far) <= 8
    assert not fed_thread()


def test_waiting_is_measured():
    ahead, _ = feed(Stored(pause=0.1), [[0]])
    with ahead:
        (fed,) = ahead
    assert 0.05 < fed.waited < 5


def test_what_goes_wrong_there_is_raised_here():
    ahead, _ = feed(Stored(broken=5))
    with pytest.raises(Eagle3Error, match="sample 5 is damaged"), ahead:
        for _ in ahead:
            pass
    assert not fed_thread()


def test_leaving_early_ends_the_thread_and_what_is_sent_is_what_send_makes():
    ahead, _ = feed(Stored(), [[n % 9] for n in range(40)], send=lambda batch: ("sent", len(batch.token)))
    with pytest.raises(KeyboardInterrupt), ahead:
        for fed in ahead:
            assert fed.sent[0] == "sent"
            raise KeyboardInterrupt
    assert not fed_thread()
