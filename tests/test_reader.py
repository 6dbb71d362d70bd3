"""Batches laid in one pass over many samples, against one sample at a time; scratch memory; greedy tokens."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from drafts import HIDDEN, LAYERS, VOCAB, make_sample
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib.batches import TENSORS, Reader, greedy_tokens, lay, pack
from eagle3lib.errors import Eagle3Error
from eagle3lib.samples import Sample, sample_id, stack
from eagle3lib.store import Store, make_manifest

HEAD = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1))


def plain(sample):
    """(token, position, row, left, aux rows, last rows) of one sample, straight from the definition."""
    mask, n = sample.loss_mask.tolist(), len(sample.input_ids)
    supervised = []
    for i in range(n - 2):
        k = 0
        while i + 2 + k < n and all(mask[i + 1 : i + 3 + k]):
            k += 1
        if k:
            supervised.append((i, k))
    rows = supervised[-1][0] + 1 if supervised else 0
    at = [i for i, _ in supervised]
    return (sample.input_ids[1 : rows + 1].tolist(), list(range(rows)), at, [k for _, k in supervised],
            sample.hidden[:rows, :-1].flatten(1), sample.hidden[[i + 1 for i in at], -1])


samples = st.lists(st.tuples(st.integers(1, 24), st.lists(st.booleans(), min_size=24, max_size=24)), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(samples)
def test_laid_rows_are_those_of_the_definition(drawn):
    made = []
    for n, (length, bits) in enumerate(drawn):
        one = make_sample(length, [], seed=n)
        mask = torch.tensor(bits[:length])
        made.append(Sample(sample_id(one.input_ids, mask), one.input_ids, mask, one.hidden))
    batch = lay(stack(made))
    kept = [(s, plain(s)) for s in made if plain(s)[2]]
    assert batch.ids == ([s.id for s, _ in kept] or [made[0].id])
    starts = np.cumsum([0] + [len(p[0]) for _, p in kept])
    assert batch.token.tolist() == [t for _, p in kept for t in p[0]] and batch.position.tolist() == [t for _, p in kept for t in p[1]]
    assert batch.row.tolist() == [int(start) + r for start, (_, p) in zip(starts, kept, strict=False) for r in p[2]]
    assert batch.left.tolist() == [k for _, p in kept for k in p[3]]
    assert batch.document.tolist() == [d for d, (_, p) in enumerate(kept) for _ in p[0]]
    if kept:
        assert torch.equal(batch.aux, torch.cat([p[4] for _, p in kept])) and torch.equal(batch.last, torch.cat([p[5] for _, p in kept]))
    together = pack([lay(stack([s])) for s in made])
    assert all(torch.equal(getattr(batch, name), getattr(together, name)) for name in TENSORS)


@pytest.fixture
def store(tmp_path):
    with Store.create(tmp_path / "store", make_manifest({"target": "toy"}, list(LAYERS), HIDDEN, "bfloat16"), shard_bytes=3000) as writer:
        for n in range(12):
            writer.append(make_sample(10 + 3 * n, [(4, 9 + n)], seed=n))
    return Store.open(tmp_path / "store")


def test_read_many_equals_read_one_by_one_in_any_order(store):
    order = [7, 0, 11, 3, 3]
    scratch = np.empty(10**6, np.uint8)
    for given_scratch in (None, scratch, np.empty(5, np.uint8)):
        found, singles = store.read_many(order, given_scratch), [store.read(i) for i in order]
        assert found.ids == [s.id for s in singles] and found.lengths.tolist() == [len(s.input_ids) for s in singles]
        assert found.input_ids.tolist() == [t for s in singles for t in s.input_ids.tolist()]
        assert found.loss_mask.tolist() == [t for s in singles for t in s.loss_mask.tolist()]
        assert torch.equal(found.hidden, torch.cat([s.hidden for s in singles]))


def test_a_flipped_bit_in_any_of_them_is_named(store):
    shard = sorted(store.path.glob("shard-*"))[1]
    raw = bytearray(shard.read_bytes())
    raw[-5] ^= 4
    shard.write_bytes(raw)
    hurt = [i for i in range(12) if store.index[i]["shard"] == 1]
    with pytest.raises(Eagle3Error, match="is damaged: its bytes differ from the checksum"):
        Store.open(store.path).read_many(range(12))
    assert hurt and Store.open(store.path).read_many([i for i in range(12) if i not in hurt]).ids


def test_threads_that_read_do_not_share_scratch(store):
    """Batches read at the same time hold their own rows, also when each thread uses its memory again."""
    reader, plain_reader, wrong = Reader(store, HEAD), Reader(store, HEAD), []
    expected = {i: plain_reader.batch([i, 11 - i]) for i in range(12)}

    def work(first):
        for _ in range(6):
            for i in range(first, 12, 3):
                batch = reader.batch([i, 11 - i])
                wrong.extend(name for name in TENSORS if not torch.equal(getattr(batch, name), getattr(expected[i], name)))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_greedy_tokens_are_those_of_the_whole_head_whatever_the_pieces(store):
    batch = Reader(store, HEAD).batch([5, 2])
    assert torch.equal(batch.greedy, (batch.last.float() @ HEAD.t()).argmax(-1))
    for chunk in (1, 7, VOCAB):
        assert torch.equal(greedy_tokens(batch.last, HEAD, chunk), batch.greedy)
