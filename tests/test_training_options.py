"""What a run can be told besides: schedules, objectives, sizes, a draft to go on from, bundles of steps, TensorBoard."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from drafts import successor_samples, successor_target
from test_draftcheck import fitting_draft
from test_train import D2T, RECIPE, T2D, VOCAB, lines, make_run, weights

from eagle3lib import checkpoint, export, initial, steplog, targets, warmstart
from eagle3lib.draftcheck import check_draft
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.recipe import Recipe, schedule
from eagle3lib.store import Store, make_manifest
from eagle3lib.train import train

SHORT = replace(RECIPE, epochs=1)
SHAPES = {"3.1": {"fc_norm": True, "norm_output": True}, "two layers": {"num_layers": 2}, "narrow": {"hidden_size": 48, "train_embeddings": True},
          "heads": {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 40, "head_dim": 0}}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    folder, f = successor_target(tmp_path_factory.mktemp("toy") / "target")
    return folder, successor_samples(folder, f, 16)


# Recipe ----------------------------------------------------------------------------------------------------------------


def test_wsd_rises_stays_level_and_falls_over_the_last_fifth():
    factors = [schedule(step, 100, 0.1, "wsd") for step in range(100)]
    assert factors[:10] == pytest.approx([0.1 * n for n in range(1, 11)]) and factors[10:80] == [1.0] * 70
    assert all(a > b > 0 for a, b in zip(factors[80:], factors[81:], strict=False)) and factors[-1] < 0.06
    assert all(0 < schedule(step, n, share, kind) <= 1 for kind in ("wsd", "cosine") for n in (1, 2, 7) for share in (0.0, 1.0) for step in range(n))


@pytest.mark.parametrize("wrong", [{"ttt_steps": 0}, {"ttt_steps": 9}, {"epochs": 0}, {"lr": 0.0}, {"lr": float("nan")}, {"batch_tokens": 0},
                                   {"schedule": "linear"}, {"loss": "mse"}, {"save_steps": 0}, {"warmup_share": 1.5}])
def test_an_impossible_recipe_is_refused_by_name(wrong):
    with pytest.raises(ParamError, match=next(iter(wrong))):
        Recipe(**wrong)


# Shapes and starts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_shape_trains_resumes_and_is_exported(toy, tmp_path, shape):
    target, samples = toy
    run, store = make_run(tmp_path / "run", samples)
    result = train(run, store, target, D2T, T2D, SHORT, heldout={samples[0].id}, shape=shape)
    assert result.loss_last < result.loss_first
    draft = checkpoint.load(result.draft)
    assert {n: getattr(draft.cfg, n) for n, v in shape.items() if v} == {n: v for n, v in shape.items() if v}
    again = train(run, store, target, D2T, T2D, SHORT, heldout={samples[0].id}, shape=shape)
    assert again.heldout == result.heldout
    folder = export.export(draft, tmp_path / "draft", dtype="float32")
    assert [p for p in check_draft(folder, target) if p.fatal] == []
    sample = samples[0]
    found = export.round_trip(draft, folder, sample.hidden[:-1, :-1].flatten(1), sample.input_ids[1:].tolist(), 4)
    assert found.difference <= 1e-5 * max(1.0, found.scale) and found.unread == []


def test_what_sglang_will_not_serve_is_said_before_the_hours_are_spent(toy, tmp_path, capsys):
    target, samples = toy
    run, store = make_run(tmp_path / "run", samples)
    result = train(run, store, target, D2T, T2D, SHORT, shape={"train_embeddings": True})
    assert "will not be exported for SGLang: it has trained embeddings" in capsys.readouterr().out
    draft = checkpoint.load(result.draft)
    assert not torch.equal(draft.embed_tokens.weight, targets.head_weights(target)[1])  # they were trained, and kept
    with pytest.raises(Eagle3Error, match="trained embeddings"):
        export.export(draft, tmp_path / "sglang")
    folder = export.export(draft, tmp_path / "vllm", dtype="float32", layout="vllm")
    assert torch.equal(warmstart.read(folder, target).embed_tokens.weight, draft.embed_tokens.weight)


@pytest.mark.parametrize("distance", ["kl", "lk"])
def test_other_objectives_train(toy, tmp_path, distance):
    target, samples = toy
    run, store = make_run(tmp_path, samples)
    result = train(run, store, target, D2T, T2D, replace(RECIPE, epochs=3, loss=distance))
    assert result.loss_last < result.loss_first


@pytest.mark.parametrize("layout", ["sglang", "vllm"])
def test_a_warm_start_begins_where_the_draft_was(toy, tmp_path, layout):
    target, samples = toy
    heldout = {samples[0].id, samples[5].id}
    first, store = make_run(tmp_path / "first", samples)
    trained = train(first, store, target, D2T, T2D, replace(RECIPE, epochs=8, lr=1e-2), heldout=heldout)
    folder = export.export(checkpoint.load(trained.draft), tmp_path / "draft", dtype="float32", layout=layout)
    run, store = make_run(tmp_path / "second", samples)
    again = train(run, store, target, D2T, T2D, replace(SHORT, lr=1e-9), heldout=heldout, start_from=folder)
    assert again.heldout.length == pytest.approx(trained.heldout.length, abs=0.05) and trained.heldout.length > 1.3
    old, new = checkpoint.load(trained.draft).exported(), checkpoint.load(again.draft).exported()
    assert all(torch.allclose(old[n].float(), new[n].float(), atol=1e-5) for n in old)


def test_a_warm_start_takes_the_scale_of_the_states_out_of_the_weights(toy, tmp_path):
    """Training works on scaled states; the draft that was read must compute the same as before all the same."""
    target, samples = toy
    folder = export.export(fitting_draft(target), tmp_path / "draft", dtype="float32")
    ids = warmstart.read(folder, target)
    _, store = make_run(tmp_path / "run", [replace(s, hidden=s.hidden * 16) for s in samples])
    draft, whence = initial.start(store, target, ids.d2t, ids.t2d, 0, {}, folder, np.arange(4))
    assert (draft.feature_scale > 4).all() and whence["start_from"]
    assert all(torch.equal(t, ids.exported()[n]) for n, t in draft.exported().items())


def test_a_warm_start_that_does_not_fit_is_refused(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path / "run", samples[:6])
    result = train(run, store, target, D2T, T2D, SHORT)
    folder = export.export(checkpoint.load(result.draft), tmp_path / "draft", dtype="float32")
    half = torch.arange(VOCAB) < 100
    with pytest.raises(Eagle3Error, match="another draft vocabulary"):
        train(run, store, target, torch.zeros(100, dtype=torch.int64), half, SHORT, start_from=folder)
    with pytest.raises(ParamError, match="hidden_size is 48, the draft's is 64"):
        train(run, store, target, D2T, T2D, SHORT, start_from=folder, shape={"hidden_size": 48})
    (folder / "model.safetensors").unlink()
    with pytest.raises(Eagle3Error, match="model.safetensors"):
        train(run, store, target, D2T, T2D, SHORT, start_from=folder)
    with pytest.raises(Eagle3Error, match="no such folder"):
        warmstart.folder("no/such/draft")
    assert warmstart.folder("") is None


def test_a_store_of_a_target_with_other_weights_is_refused(toy, tmp_path):
    """Same sizes, other weights: only the fingerprint can tell."""
    target, samples = toy
    other, _ = successor_target(tmp_path / "other", seed=1)
    run, _ = make_run(tmp_path / "run", samples[:2])
    for folder, refused in ((target, False), (other, True)):
        manifest = make_manifest({"target": targets.fingerprint(folder)}, [2, 4, 5], 64, "bfloat16")
        with Store.create(tmp_path / folder.name / "store", manifest) as writer:
            writer.append(samples[0])
        store = Store.open(tmp_path / folder.name / "store")
        (run / "verdict.json").write_text(json.dumps({"passed": True, "digest": store.digest(), "checks": []}))
        if refused:
            with pytest.raises(Eagle3Error, match="extracted with another target"):
                train(run, store, target, D2T, T2D, SHORT)
        else:
            train(run, store, target, D2T, T2D, SHORT)


def test_a_runs_draft_is_exported_for_either_engine_from_the_command_line(toy, tmp_path, capsys):
    from eagle3lib.cli import main

    target, samples = toy
    run, store = make_run(tmp_path / "run", samples)
    train(run, store, target, D2T, T2D, SHORT, heldout={samples[0].id})
    (run / "metrics.json").write_text('{"train.acceptance_length_heldout": 1.25}')
    assert main(["export", str(run), "--layout", "vllm"]) == 0
    folder = run / "draft-vllm"
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors", "training.png"]
    card = (folder / "README.md").read_text()
    for text in ("| train.acceptance_length_heldout | 1.25 |", "![training](training.png)", "vllm serve", "- target: `toy`"):
        assert text in card
    assert "0 errors" in capsys.readouterr().out
    assert main(["export", str(run), "--out", str(tmp_path / "sglang"), "--dtype", "float32"]) == 0
    assert warmstart.read(tmp_path / "sglang", target).cfg == checkpoint.load(run / "checkpoint").cfg


# What is said while it runs --------------------------------------------------------------------------------------------

CLOCK = ("seconds", "tokens_per_s", "wait_share", "left_s")


def plain(run: Path) -> list[dict]:
    return [{k: v for k, v in r.items() if k not in CLOCK} for r in lines(run)]


def test_bundles_of_steps_change_nothing_but_when_it_is_said(toy, tmp_path, monkeypatch):
    """As on a GPU: numbers stay on the device for several steps. Measurements and states come at the same steps all the same."""
    target, samples = toy
    recipe, runs_ = replace(RECIPE, epochs=2, save_steps=5, eval_steps=3), []
    for size in (1, 4):
        monkeypatch.setitem(steplog.WINDOW, "cpu", size)
        run, store = make_run(tmp_path / str(size), samples)
        fetched, original = [], steplog.Window.fetch
        monkeypatch.setattr(steplog.Window, "fetch", lambda self, tell, f=fetched, o=original: f.append(len(self._pending)) or o(self, tell))
        train(run, store, target, D2T, T2D, recipe, heldout={samples[0].id})
        monkeypatch.setattr(steplog.Window, "fetch", original)
        runs_.append(run)
        assert max(fetched) <= size and (size == 1 or max(fetched) > 1)
    assert plain(runs_[0]) == plain(runs_[1])
    one, two = weights(runs_[0]), weights(runs_[1])
    assert all(torch.equal(one[n], two[n]) for n in one)
    measured = [r["step"] for r in lines(runs_[0]) if "heldout" in r]
    total = max(measured)
    assert measured == sorted({*range(3, total + 1, 3), total // 2, total})


@pytest.mark.parametrize("at", [2, 3])
def test_a_signal_at_a_step_that_measures_loses_no_measurement(toy, tmp_path, at):
    target, samples = toy
    recipe, found = replace(RECIPE, epochs=1, eval_steps=3, save_steps=100), []
    for name in ("straight", "stopped"):
        run, store = make_run(tmp_path / name, samples[:21])

        def say(record, stopped=name == "stopped"):
            if stopped and record["step"] == at and "lr" in record:
                os.kill(os.getpid(), signal.SIGTERM)

        if name == "stopped":
            with pytest.raises(KeyboardInterrupt):
                train(run, store, target, D2T, T2D, recipe, heldout={samples[0].id}, on_record=say)
        train(run, store, target, D2T, T2D, recipe, heldout={samples[0].id})
        found.append(plain(run))
    assert found[0] == found[1] and [r["step"] for r in found[0] if "heldout" in r] == [3, 6, 8]


def test_a_line_cut_short_anywhere_is_passed_over_and_dropped(tmp_path, monkeypatch):
    log = steplog.MetricsLog(tmp_path / "metrics.jsonl")
    records = [log.add({"step": n, "heldout": {"length": 1.5}, "buckets": {"context": {"0+": {}}}}) for n in (1, 2)]
    whole = log.path.read_text()
    for length in range(len(whole) // 2, len(whole)):
        log.path.write_text(whole[:length])
        assert log.read() == records[:1] == log.cut(2) and log.path.read_text() == whole[: len(whole) // 2]
    log.path.write_text(whole)

    def died(*_):
        raise OSError("the power went")

    monkeypatch.setattr(os, "replace", died)
    with pytest.raises(Eagle3Error, match="cannot be written"):
        log.cut(1)
    assert log.path.read_text() == whole and [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_bad_number_in_a_bundle_stops_at_its_own_step(toy, tmp_path, monkeypatch):
    target, samples = toy
    monkeypatch.setitem(steplog.WINDOW, "cpu", 50)
    bad = replace(samples[4], hidden=torch.full_like(samples[4].hidden, float("nan")))
    run, store = make_run(tmp_path, [*samples[:4], bad, *samples[5:9]])
    with pytest.raises(Eagle3Error, match=rf"Samples: {bad.id}: their hidden states are not finite"):
        train(run, store, target, D2T, T2D, RECIPE)
    assert checkpoint.last_state(run / "training") is None and all(r["loss"] is not None for r in lines(run))


def test_the_best_measurement_is_kept_and_not_the_last(toy, tmp_path, monkeypatch):
    from eagle3lib import heldout as module

    target, samples = toy
    run, store = make_run(tmp_path, samples)
    original, figures = module.measure, iter([1.5, 1.9, 1.2, 1.1, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0])

    def measured(*args):
        found = original(*args)
        return replace(found, total=replace(found.total, length=next(figures)))

    monkeypatch.setattr(module, "measure", measured)
    result = train(run, store, target, D2T, T2D, replace(RECIPE, epochs=1, eval_steps=2), heldout={samples[0].id})
    assert result.heldout.length == 1.9 and checkpoint.about(result.draft)["step"] == 4 and result.buckets["context"]


def test_records_say_how_long_it_will_take_and_what_was_waited_for(toy, tmp_path):
    target, samples = toy
    run, store = make_run(tmp_path, samples)
    seen: list[dict] = []
    result = train(run, store, target, D2T, T2D, SHORT, on_record=seen.append)
    steps = [r for r in seen if "lr" in r]
    assert all(0 <= r["wait_share"] <= 1 and r["left_s"] >= 0 for r in steps) and steps[-1]["left_s"] == 0 < steps[0]["left_s"]
    assert 0 <= result.wait_share <= 1
    seen.clear()
    train(run, store, target, D2T, T2D, SHORT, on_record=seen.append)
    assert seen == lines(run)  # a run gone on with shows its earlier part


def test_tensorboard_files_hold_the_same_numbers(toy, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    target, samples = toy
    run, store = make_run(tmp_path, samples)
    train(run, store, target, D2T, T2D, SHORT, heldout={samples[0].id}, tensorboard=True)
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    losses = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert losses == [(r["step"], pytest.approx(r["loss"])) for r in lines(run) if "lr" in r]
    assert {"train/lr", "hits/step_0", "heldout/acceptance_length", "heldout/low"} <= set(events.Tags()["scalars"])
    quiet, store = make_run(tmp_path / "quiet", samples)
    train(quiet, store, target, D2T, T2D, SHORT)
    assert not (quiet / "tensorboard").exists()
