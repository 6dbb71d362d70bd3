"""The store against crashes, damage and mixed configurations; numpy and safetensors are the oracle, not the store itself."""

from __future__ import annotations

import multiprocessing
import os
import resource

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from eagle3lib import shards
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import RECORD, Sample, Store, make_manifest, sample_id

H, STREAMS = 8, 4
MANIFEST = make_manifest({"weights": "w1", "engine": "0.5.14"}, [2, 4, 5], H, "bfloat16")


def make_sample(tokens: int, seed: int) -> Sample:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 300, (tokens,), generator=generator)
    mask = torch.rand(tokens, generator=generator) < 0.5
    return Sample(sample_id(ids, mask), ids, mask, torch.randn(tokens, STREAMS, H, generator=generator).bfloat16())


SAMPLES = [make_sample(3 + 5 * i, i) for i in range(12)]
SHARD = 3 * 40 * STREAMS * H * 2  # a few samples a shard


def fill(path, samples=SAMPLES, shard_bytes=SHARD):
    with Store.create(path, MANIFEST, shard_bytes) as writer:
        for sample in samples:
            writer.append(sample)
    return Store.open(path)


def assert_holds(store: Store, samples) -> None:
    assert sorted(store.ids) == sorted(s.id for s in samples)
    wanted = {s.id: s for s in samples}
    for got in store:
        assert torch.equal(got.hidden.view(torch.int16), wanted[got.id].hidden.view(torch.int16))
        assert torch.equal(got.input_ids, wanted[got.id].input_ids)
        assert torch.equal(got.loss_mask, wanted[got.id].loss_mask)


def test_what_goes_in_comes_out_in_several_shards(tmp_path):
    store = fill(tmp_path)
    assert_holds(store, SAMPLES)
    shards = sorted(tmp_path.glob("shard-*.safetensors"))
    assert len(shards) > 1
    rows = torch.cat([load_file(f)["hidden"] for f in shards])  # plain safetensors reads it too
    assert len(rows) == store.tokens == sum(len(s.input_ids) for s in SAMPLES)


def test_an_append_that_is_interrupted_in_the_middle_of_its_bytes_takes_nothing_along(tmp_path, monkeypatch):
    """Ctrl-C, and then the writer closes as it always does; or the caller goes on."""
    real = shards.write_all

    def halfway(file, data):
        file.write(memoryview(data).cast("B")[: len(data) // 2])
        raise KeyboardInterrupt

    for name, again in (("closed", ()), ("gone on", SAMPLES[1:3])):
        with pytest.raises(KeyboardInterrupt), Store.create(tmp_path / name, MANIFEST) as writer:
            writer.append(SAMPLES[0])
            monkeypatch.setattr(shards, "write_all", halfway)
            with pytest.raises(KeyboardInterrupt):
                writer.append(SAMPLES[1])
            monkeypatch.setattr(shards, "write_all", real)
            for sample in again:
                writer.append(sample)
            raise KeyboardInterrupt
        assert_holds(Store.open(tmp_path / name), [SAMPLES[0], *again])
        assert list((tmp_path / name).glob("shard-*.tmp")) == []


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_any_cut_of_the_files_resumes_to_the_same_store(tmp_path_factory, data):
    """A power cut loses unsynced tails: cut the index anywhere, forget the renames after it, then go on."""
    path = tmp_path_factory.mktemp("cut")
    fill(path, SAMPLES[: data.draw(st.integers(1, len(SAMPLES)))])
    index = path / "index.bin"
    os.truncate(index, data.draw(st.integers(0, index.stat().st_size)))
    (path / "shard-00099.tmp").write_bytes(b"half a shard")
    with Store.create(path, MANIFEST, SHARD) as writer:
        for sample in SAMPLES:
            if sample.id not in writer.ids:
                writer.append(sample)
    assert_holds(Store.open(path), SAMPLES)
    assert not list(path.glob("*.tmp"))
    assert Store.open(path).digest() == fill(tmp_path_factory.mktemp("whole")).digest()


def test_samples_appended_but_not_flushed_are_not_counted(tmp_path):
    writer = Store.create(tmp_path, MANIFEST, 2**30)
    writer.append(SAMPLES[0])
    assert len(Store.open(tmp_path)) == 0
    writer.close()
    assert len(Store.open(tmp_path)) == 1


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_flipped_bit_anywhere_is_found(whole_store, data):
    """In any file, at any place: reading ends in one readable error, or the digest is another one, which training refuses."""
    path, digest = whole_store
    file = data.draw(st.sampled_from(sorted(f for f in path.iterdir() if f.name != "lock")))
    before = file.read_bytes()
    where = data.draw(st.integers(0, 8 * len(before) - 1))
    harmed = bytearray(before)
    harmed[where // 8] ^= 1 << where % 8
    file.write_bytes(harmed)
    try:
        store = Store.open(path)
        samples = list(store)
        assert len(samples) < len(SAMPLES) or store.digest() != digest  # a flip in the last line looks like a torn tail
    except Eagle3Error as error:
        assert str(path) in str(error)
    finally:
        file.write_bytes(before)


@pytest.fixture(scope="module")
def whole_store(tmp_path_factory):
    store = fill(tmp_path_factory.mktemp("whole"))
    return store.path, store.digest()


@pytest.mark.parametrize("harm", ["empty", "truncate", "missing", "other"])
def test_a_damaged_shard_is_an_error_that_names_it(tmp_path, harm):
    fill(tmp_path)
    shards = sorted(tmp_path.glob("shard-*"))
    if harm == "empty":
        shards[0].write_bytes(b"")
    elif harm == "truncate":
        os.truncate(shards[0], shards[0].stat().st_size // 2)
    elif harm == "missing":
        shards[0].unlink()
    else:
        shards[0].write_bytes(shards[1].read_bytes())
    with pytest.raises(Eagle3Error, match="shard-00000.*damaged"):
        list(Store.open(tmp_path))


def test_another_fingerprint_is_refused_field_by_field(tmp_path):
    fill(tmp_path)
    other = make_manifest({"weights": "w2", "engine": "0.5.14"}, [2, 4, 5], H, "bfloat16")
    with pytest.raises(Eagle3Error, match="fingerprint.weights: 'w1' there, 'w2' now"):
        Store.create(tmp_path, other)


def test_two_writers_at_once_are_refused_and_a_dead_one_holds_nothing(tmp_path):
    first = Store.create(tmp_path, MANIFEST)
    with pytest.raises(Eagle3Error, match="another extraction"):
        Store.create(tmp_path, MANIFEST)
    first.close()

    def die():
        Store.create(tmp_path, MANIFEST)
        os._exit(9)

    child = multiprocessing.get_context("fork").Process(target=die)
    child.start()
    child.join()
    Store.create(tmp_path, MANIFEST).close()


@pytest.mark.parametrize(("change", "word"), [
    (lambda s: Sample(s.id, s.input_ids, s.loss_mask, s.hidden[:-1]), "hidden states"),
    (lambda s: Sample(s.id, s.input_ids, s.loss_mask, s.hidden.half()), "float16"),
    (lambda s: Sample(s.id, s.input_ids.flip(0), s.loss_mask, s.hidden), "another row"),
    (lambda s: Sample("0" * 32, s.input_ids, s.loss_mask, s.hidden), "another row"),
])
def test_a_sample_that_does_not_fit_is_refused(tmp_path, change, word):
    with Store.create(tmp_path, MANIFEST) as writer, pytest.raises(Eagle3Error, match=word):
        writer.append(change(SAMPLES[3]))


def test_the_same_sample_twice_is_refused(tmp_path):
    with Store.create(tmp_path, MANIFEST) as writer:
        writer.append(SAMPLES[0])
        with pytest.raises(Eagle3Error, match="already"):
            writer.append(SAMPLES[0])


def test_a_full_disk_loses_nothing_that_was_indexed(tmp_path):
    """A real ENOSPC-like failure: the kernel refuses to write past a file-size limit in a child process."""
    fill(tmp_path, SAMPLES[:4])

    def write_under_limit(queue):
        import signal

        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            fill(tmp_path, SAMPLES[4:], shard_bytes=1)
        except Eagle3Error as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=write_under_limit, args=(queue,))
    child.start()
    message = queue.get(timeout=30)
    child.join()
    assert "cannot write" in message and "GB are free" in message
    assert_holds(Store.open(tmp_path), SAMPLES[:4])
    fill(tmp_path, SAMPLES[4:])
    assert_holds(Store.open(tmp_path), SAMPLES)


def test_the_digest_names_the_bytes_and_not_their_order(tmp_path):
    assert fill(tmp_path / "a").digest() == fill(tmp_path / "b", SAMPLES[::-1]).digest()
    assert fill(tmp_path / "c", SAMPLES[:-1]).digest() != Store.open(tmp_path / "a").digest()


def test_the_index_record_is_48_bytes():
    assert RECORD.itemsize == 48 and np.dtype(RECORD["crc"]).itemsize == 4
