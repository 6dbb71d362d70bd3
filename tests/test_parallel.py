"""Two gloo processes under torchrun are one: the same batches, loss and weights; asked to stop, they save and are gone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from drafts import successor_samples, successor_target
from test_train import D2T, RECIPE, T2D, lines, make_run, weights

from eagle3lib import checkpoint, launch, train
from eagle3lib.batches import plan
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.parallel import Group
from eagle3lib.store import Sample, Store, sample_id

TWO = replace(RECIPE, epochs=2, batch_tokens=100, eval_steps=7)
CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_parallel import D2T, T2D, TWO
from eagle3lib.launch import run
from eagle3lib.store import Store
folder = Path({folder!r})
say = lambda record: print(record["step"], flush=True)
run(folder, Store.open(folder / "store"), Path({target!r}), D2T, T2D, TWO, processes=2, heldout={{{heldout!r}}}, on_record=say)
"""


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """Samples of many lengths: some batches hold one sample and one process nothing, some samples have no supervised row."""
    folder, f = successor_target(tmp_path_factory.mktemp("toy") / "target")
    short, long = successor_samples(folder, f, 14), successor_samples(folder, f, 5, reply=110, seed=2)
    mask = torch.arange(30) == 29
    empty = [Sample(sample_id(s.input_ids, mask), s.input_ids, mask, s.hidden) for s in successor_samples(folder, f, 3, seed=3)]
    return folder, [*short, *long, *empty]


def test_two_processes_do_what_one_does(toy, tmp_path):
    target, samples = toy
    heldout = {samples[0].id, samples[14].id}
    one, store = make_run(tmp_path / "one", samples)
    alone = train.train(one, store, target, D2T, T2D, TWO, heldout=heldout)
    two, store = make_run(tmp_path / "two", samples)
    seen: list[dict] = []
    together = launch.run(two, store, target, D2T, T2D, TWO, processes=2, heldout=heldout, on_record=seen.append)
    assert seen == lines(two) and [r["step"] for r in seen] == [r["step"] for r in lines(one)]
    for a, b in zip(lines(one), seen, strict=True):
        if "loss" in a:
            assert (a["tokens"], a["supervised"], a["lr"]) == (b["tokens"], b["supervised"], b["lr"])
            assert (a["loss"] is None) == (b["loss"] is None) == (not a["supervised"])
            if a["loss"] is not None:  # products may round their factors to bfloat16; sums in another order then drift apart
                assert a["loss"] == pytest.approx(b["loss"], rel=1e-5 if a["step"] == 1 else 2e-3)
                assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=1e-4 if a["step"] == 1 else 2e-2)
        else:
            assert a["heldout"]["rounds"] == b["heldout"]["rounds"] and a["acceptance_length"] == pytest.approx(b["acceptance_length"], abs=0.02)
            assert {k: sorted(v) for k, v in a["buckets"].items()} == {k: sorted(v) for k, v in b["buckets"].items()}
    x, y = weights(one), weights(two)
    assert all(torch.allclose(x[n].float(), y[n].float(), atol=2e-3) for n in x)
    assert together.heldout.length == pytest.approx(alone.heldout.length, abs=0.02) and together.tokens == alone.tokens
    assert any(r["loss"] is None for r in seen if "lr" in r)  # a step without a supervised row anywhere
    assert any(len(batch) == 1 for batch in plan(store.lengths, np.arange(len(samples)), TWO.batch_tokens, TWO.seed, 0))  # one idle process


def launched(run, target, heldout, until):
    """A process that trains with two others under torchrun, at step `until`; and all of its children."""
    code = CHILD.format(tests=str(Path(__file__).parent), folder=str(run), target=str(target), heldout=heldout)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)
    for line in process.stdout:
        if line.strip() == str(until):
            break
    return process, psutil.Process(process.pid).children(recursive=True)


def test_sigterm_to_the_launcher_writes_a_state_and_nothing_is_left(toy, tmp_path):
    target, samples = toy
    run, _ = make_run(tmp_path, samples)
    process, family = launched(run, target, samples[0].id, until=3)
    assert len(family) >= 3  # torchrun and two processes
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    _, state = checkpoint.last_state(run / "training")
    assert process.returncode in (130, -signal.SIGINT) and state["step"] >= 3
    assert not [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert [r["step"] for r in lines(run) if "lr" in r] == list(range(1, state["step"] + 1))
    seen: list[dict] = []  # and it goes on, with another number of processes if need be
    result = launch.run(run, Store.open(run / "store"), target, D2T, T2D, TWO, heldout={samples[0].id}, on_record=seen.append)
    assert [r["step"] for r in seen if "lr" in r] == list(range(1, result.steps + 1))


def test_a_dead_launcher_takes_the_processes_with_it(toy, tmp_path):
    target, samples = toy
    run, _ = make_run(tmp_path, samples)
    process, family = launched(run, target, samples[0].id, until=2)
    process.kill()
    process.communicate(timeout=60)
    _, left = psutil.wait_procs(family, timeout=60)
    assert not left, left


def test_an_error_in_the_processes_is_the_launchers_own(toy, tmp_path):
    target, samples = toy
    bad = replace(samples[4], hidden=torch.full_like(samples[4].hidden, float("nan")))
    run, store = make_run(tmp_path, [*samples[:4], bad, *samples[5:9]])
    start = time.monotonic()
    with pytest.raises(Eagle3Error, match=rf"Samples: {bad.id}: their hidden states are not finite"):
        launch.run(run, store, target, D2T, T2D, TWO, processes=2)
    assert time.monotonic() - start < 60
    assert checkpoint.last_state(run / "training") is None  # nothing that is not finite was kept


def test_an_error_in_one_process_ends_all(toy, tmp_path):
    """A damaged sample is read by one process only; the others must not wait for it for ever."""
    target, samples = toy
    run, store = make_run(tmp_path, samples)
    shard = next((run / "store").glob("shard-*"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 255
    shard.write_bytes(data)
    start = time.monotonic()
    with pytest.raises(Eagle3Error, match="checksum"):
        launch.run(run, store, target, D2T, T2D, TWO, processes=2)
    assert time.monotonic() - start < 90


def test_impossible_numbers_of_processes_are_refused(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:3])
    with pytest.raises(ParamError, match="processes is 0"):
        launch.run(run, store, target, D2T, T2D, TWO, processes=0)
    with pytest.raises(ParamError, match="GPU"):
        launch.run(run, store, target, D2T, T2D, TWO, processes=64, device="cuda")


def test_a_batch_is_dealt_out_whole_and_evenly():
    lengths = np.random.default_rng(0).integers(5, 400, size=60)
    for size in (1, 2, 3, 8, 70):
        parts = [Group(rank, size).deal(range(60), lengths) for rank in range(size)]
        assert sorted(i for part in parts for i in part) == list(range(60))
        loads = [sum(lengths[i] for i in part) for part in parts]
        assert max(loads) - min(loads) <= max(lengths)
