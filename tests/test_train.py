"""Whole runs on a toy target: it learns, it can be killed and goes on to the bit, it refuses what it must."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafts import successor_samples, successor_target

from eagle3lib import acceptance, batches, checkpoint, runs
from eagle3lib.batches import plan
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.precision import fast_products
from eagle3lib.store import Sample, Store, make_manifest, sample_id
from eagle3lib.train import Recipe, Result, check, device, metrics, schedule, train

VOCAB = 320
D2T, T2D = torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool)
EPOCHS = 25
RECIPE = Recipe(ttt_steps=4, epochs=2, batch_tokens=64, save_steps=20, lr=3e-3)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """(target folder, samples) of the target that continues x with f(x)."""
    folder, f = successor_target(tmp_path_factory.mktemp("toy") / "target")
    return folder, successor_samples(folder, f, 88)


def make_run(folder: Path, samples: list[Sample], passed: bool = True) -> tuple[Path, Store]:
    """A run folder with a store of `samples` and a verdict over it."""
    manifest = make_manifest({"target": "toy"}, [2, 4, 5], 64, "bfloat16")
    with Store.create(folder / "store", manifest) as writer:
        for sample in samples:
            writer.append(sample)
    store = Store.open(folder / "store")
    runs.write_json(folder / "verdict.json", {"passed": passed, "digest": store.digest(), "checks": [{"name": "toy", "passed": passed}]})
    return folder, store


def lines(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights(run: Path) -> dict[str, torch.Tensor]:
    path, _ = checkpoint.last_state(run / "training")
    return checkpoint.load(path, embeddings=torch.zeros(VOCAB, 64)).exported()


def test_a_fixed_function_is_learnt_to_the_end_of_the_chain(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples)
    seen: list[dict] = []
    recipe, heldout = replace(RECIPE, epochs=EPOCHS, batch_tokens=128, lr=1e-2), {s.id for s in samples[::6]}
    result = train(run, store, target, D2T, T2D, recipe, heldout=heldout, on_record=seen.append)
    assert result.heldout.length > 4.85, result  # K + 1 = 5
    assert result.loss_last < 0.1 * result.loss_first
    assert seen == lines(run)
    steps = [r for r in seen if "loss" in r]
    assert [r["step"] for r in steps] == list(range(1, result.steps + 1))
    assert all(len(r["hits"]) == len(r["losses"]) == 4 and r["tokens_per_s"] > 0 and r["grad_norm"] > 0 for r in steps)
    assert [r["epoch"] for r in seen if "heldout" in r] == list(range(EPOCHS))
    about = checkpoint.about(result.draft)
    assert about["acceptance_length"] == result.heldout.length == max(r["acceptance_length"] for r in seen if "heldout" in r)
    draft = checkpoint.load(result.draft)  # finds its target by itself
    assert draft.embed_tokens.weight.std() > 0


def test_held_out_samples_are_never_trained_on(toy, tmp_path):
    target, samples = toy
    poisoned = [s if n else replace(s, hidden=torch.full_like(s.hidden, float("nan"))) for n, s in enumerate(samples)]
    run, store = make_run(tmp_path, poisoned)
    train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1), heldout={samples[0].id})  # else: not finite


CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, {tests!r})
from test_train import D2T, RECIPE, T2D
from eagle3lib.store import Store
from eagle3lib.train import train
run = Path({run!r})
say = lambda record: print(record["step"], flush=True)
train(run, Store.open(run / "store"), Path({target!r}), D2T, T2D, RECIPE, heldout={{{heldout!r}}}, on_record=say)
"""


def child(run: Path, target: Path, heldout: str) -> subprocess.Popen:
    code = CHILD.format(tests=str(Path(__file__).parent), run=str(run), target=str(target), heldout=heldout)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=env)


def stop_at(process: subprocess.Popen, step: int, number: int) -> None:
    for line in process.stdout:
        if line.strip() == str(step):
            os.kill(process.pid, number)
            break
    process.communicate(timeout=60)  # reads on: a closed pipe would be a second reason to stop


def ended(process: subprocess.Popen) -> int:
    process.communicate(timeout=120)
    return process.returncode


def test_killed_and_started_again_equals_never_stopped(toy, tmp_path):
    """kill -9 behind the state of step 20, SIGTERM later on: the same weights, metrics and best draft as in one go."""
    target, samples = toy
    straight, _ = make_run(tmp_path / "straight", samples[:41])  # 1 held out; 40 of 30 tokens: 20 steps of two samples an epoch
    stopped, _ = make_run(tmp_path / "stopped", samples[:41])
    assert ended(child(straight, target, samples[0].id)) == 0

    process = child(stopped, target, samples[0].id)
    stop_at(process, 27, signal.SIGKILL)
    path, state = checkpoint.last_state(stopped / "training")
    assert (process.returncode, state["step"]) == (-signal.SIGKILL, 20)

    process = child(stopped, target, samples[0].id)
    stop_at(process, 33, signal.SIGTERM)
    path, state = checkpoint.last_state(stopped / "training")
    assert process.returncode not in (0, -signal.SIGTERM) and 33 <= state["step"] <= 36  # it saved, then raised

    assert ended(child(stopped, target, samples[0].id)) == 0
    one, two = weights(straight), weights(stopped)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert (straight / "checkpoint/draft.safetensors").stat().st_size == (stopped / "checkpoint/draft.safetensors").stat().st_size
    clock = ("seconds", "tokens_per_s", "wait_share", "left_s")
    plain, again = ([{k: v for k, v in r.items() if k not in clock} for r in lines(run)] for run in (straight, stopped))
    assert plain == again and len([r for r in plain if "lr" in r]) == 40


def test_a_finished_run_started_again_does_nothing(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:10])
    first = train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1), heldout={samples[0].id})
    before = (run / "metrics.jsonl").read_text()
    again = train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1), heldout={samples[0].id})
    assert (run / "metrics.jsonl").read_text() == before
    assert again == replace(first, tokens_per_s=0.0, wait_share=0.0)


def test_another_recipe_starts_afresh_and_says_why(toy, tmp_path, capsys):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:10])
    train(run, store, target, D2T, T2D, RECIPE)
    train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1, lr=1e-4))
    assert "recipe.lr: 0.003 there, 0.0001 now" in capsys.readouterr().out
    steps = [r["step"] for r in lines(run) if "loss" in r]
    assert steps == list(range(1, steps[-1] + 1))
    _, state = checkpoint.last_state(run / "training")
    assert (state["step"], state["about"]["recipe"]["lr"]) == (steps[-1], 1e-4)  # not the longer run's later state


@pytest.mark.parametrize("change", ["held out", "order"])
def test_a_state_of_other_samples_or_another_order_is_not_gone_on_from(toy, tmp_path, capsys, change):
    """The store's digest knows neither: the same bytes, gone through otherwise, are another run."""
    target, samples = toy
    run, store = make_run(tmp_path / "run", samples[:10])
    train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1), heldout={samples[0].id})
    _, other = make_run(tmp_path / "other", samples[:10] if change == "held out" else samples[9::-1])
    assert other.digest() == store.digest()
    capsys.readouterr()
    train(run, other, target, D2T, T2D, replace(RECIPE, epochs=1), heldout={samples[change == "held out"].id})
    said = capsys.readouterr().out
    assert "starting afresh" in said and "samples: " in said


# Refusals --------------------------------------------------------------------------------------------------------------


def test_a_store_without_a_passing_verdict_is_refused(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path / "failed", samples[:3], passed=False)
    with pytest.raises(Eagle3Error, match="failed verification"):
        train(run, store, target, D2T, T2D, RECIPE)
    run, store = make_run(tmp_path / "other", samples[:3])
    with Store.create(run / "store", store.manifest) as writer:
        writer.append(samples[3])
    with pytest.raises(Eagle3Error, match="other bytes"):
        train(run, Store.open(run / "store"), target, D2T, T2D, RECIPE)


def test_a_store_of_another_target_is_refused(toy, tmp_path):
    _, samples = toy
    run, store = make_run(tmp_path / "run", samples[:3])
    wide, _ = successor_target(tmp_path / "wide", hidden=32)
    with pytest.raises(Eagle3Error, match="width 64 .* width 32"):
        train(run, store, wide, D2T, T2D, RECIPE)


def test_no_supervised_row_at_all_is_an_error(toy, tmp_path):
    target, samples = toy
    mask = torch.arange(30) == 29  # a reply of one token
    run, store = make_run(tmp_path, [Sample(sample_id(s.input_ids, mask), s.input_ids, mask, s.hidden) for s in samples[:3]])
    with pytest.raises(Eagle3Error, match="no supervised row"):
        train(run, store, target, D2T, T2D, RECIPE)


def test_everything_held_out_is_an_error(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:2])
    with pytest.raises(Eagle3Error, match="no sample to train on"):
        train(run, store, target, D2T, T2D, RECIPE, heldout={s.id for s in samples})


def test_states_that_are_not_finite_stop_with_the_sample_named(toy, tmp_path):
    target, samples = toy
    bad = replace(samples[4], hidden=samples[4].hidden.clone())
    bad.hidden[12, 1, 3] = float("inf")
    run, store = make_run(tmp_path, [*samples[:4], bad, *samples[5:9]])
    with pytest.raises(Eagle3Error, match=rf"Samples: {bad.id}: their hidden states are not finite"):
        train(run, store, target, D2T, T2D, replace(RECIPE, batch_tokens=1000))


def test_a_diverging_run_names_its_batch(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:2])
    with pytest.raises(Eagle3Error, match=rf"{samples[0].id}.*their states are finite; lower lr"):
        train(run, store, target, D2T, T2D, replace(RECIPE, lr=1e38, batch_tokens=1000))


# What the notebook shows -----------------------------------------------------------------------------------------------


def figure(length: float) -> acceptance.Acceptance:
    return acceptance.from_counts(np.array([[round(100 * (length - 1))]]), np.array([[100]]))


@pytest.mark.parametrize(("last", "length", "coverage", "failed"), [
    (2.0, 1.4, 0.95, []), (5.0, 1.4, 0.95, ["loss fell"]), (2.0, 1.0, 0.95, ["held-out acceptance above 1"]),
    (2.0, None, 0.5, ["draft vocabulary coverage"])])
def test_checks_and_metrics_of_a_result(last, length, coverage, failed):
    heldout = None if length is None else figure(length)
    result, checks = Result(9, 900, 100.0, 4.0, last, heldout, 1, Path("draft")), Checks()
    check(checks, result, coverage)
    assert [c.name for c in checks.failed] == failed
    assert {"steps": 9, "tokens": 900, "loss_last": last}.items() <= metrics(result).items()
    assert ("acceptance_length_heldout" in metrics(result)) == (length is not None)


def test_the_device_is_there_or_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device("auto") == device("cpu") == "cpu"
    with pytest.raises(Eagle3Error, match="no GPU"):
        device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert (device("auto"), device("cuda"), device("cpu")) == ("cuda", "cuda", "cpu")


# Order and schedule ----------------------------------------------------------------------------------------------------


def test_every_sample_once_an_epoch_within_the_budget_in_a_new_order():
    lengths = np.random.default_rng(3).integers(5, 120, size=200)
    samples = np.arange(0, 200, 2)
    first, again, other = (plan(lengths, samples, 256, seed=1, epoch=e) for e in (0, 0, 1))
    assert first == again != other
    for cut in (first, other):
        assert sorted(i for b in cut for i in b) == samples.tolist()
        assert all(lengths[b].sum() <= 256 for b in cut)
    assert plan(np.array([9]), np.array([0]), 4, 0, 0) == [[0]]  # too long for the budget: a batch of its own


def test_the_schedule_warms_up_and_falls_to_zero():
    factors = [schedule(step, 100, 0.1) for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert factors[10] == 1.0 and all(a > b for a, b in zip(factors[10:], factors[11:], strict=False)) and factors[-1] < 1e-3


def test_fast_products_leave_the_setting_as_it_was():
    before = torch.backends.mkldnn.matmul.fp32_precision
    with fast_products() as fast:
        assert torch.backends.mkldnn.matmul.fp32_precision == ("bf16" if fast else before)
    assert torch.backends.mkldnn.matmul.fp32_precision == before


def test_greedy_tokens_are_computed_once_a_sample_not_once_an_epoch(toy, tmp_path, monkeypatch):
    target, samples = toy
    run, store = make_run(tmp_path, samples[:6])
    calls, original = [], batches.greedy_tokens
    monkeypatch.setattr(batches, "greedy_tokens", lambda *a: calls.append(len(a[0])) or original(*a))
    train(run, store, target, D2T, T2D, replace(RECIPE, epochs=3))
    assert sum(calls) == sum(len(batches.document(s)) for s in samples[:6])
