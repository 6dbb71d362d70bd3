"""Extraction against an engine whose faults are scripted: what is stored is right, whatever happens on the way."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_engine import FakeEngine, RestartingEngine, fake_target, make_rows, states

from eagle3lib import capture, extract, quarantine
from eagle3lib import plan as planning
from eagle3lib.arrivals import ENOUGH, Norms
from eagle3lib.checks import Checks
from eagle3lib.client import Reply
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import FP8, Store
from eagle3lib.work import Work


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "WAIT_S", 0.2)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return fake_target(tmp_path / "target")


ROWS = make_rows(150)


def go(engines: Any, target: Path, rows: Any = ROWS, store_dtype: str = "", **more: Any) -> extract.Extraction:
    return extract.extract(engines, rows, target.parent / "store", target, shard_mb=1, tokens_in_flight=800, store_dtype=store_dtype, **more)


def assert_right(target: Path, rows: Any = ROWS) -> Store:
    store = Store.open(target.parent / "store")
    wanted = {row["sample_id"]: row for row in rows}
    assert sorted(store.ids) == sorted(wanted)
    for sample in store:
        assert torch.equal(sample.hidden, states(sample.input_ids.tolist()))
        assert sample.input_ids.tolist() == wanted[sample.id]["input_ids"] and sample.loss_mask.tolist() == wanted[sample.id]["loss_mask"]
    return store


def test_every_row_arrives_once_in_batches_and_shared_memory_is_left_empty(tmp_path: Path, target: Path) -> None:
    engine = FakeEngine(tmp_path / "shm")
    result = go(engine, target)
    store = assert_right(target)
    assert engine.asked == len(ROWS) and engine.batches < len(ROWS) / 3
    assert (result.samples, result.tokens, result.retried, result.quarantined) == (len(ROWS), store.tokens, 0, [])
    assert not list(engine.dump_dir.iterdir())
    assert result.course[-1][1] == store.tokens
    go(engine, target)
    assert engine.asked == len(ROWS)  # nothing is asked for twice


def spoiled(change: Any) -> Any:
    return lambda folder, rid, ids, hidden: change(hidden)


def poke(row: int, stream: int, value: float) -> Any:
    def change(hidden: torch.Tensor) -> torch.Tensor:
        hidden[row, stream, 3] = value
        return hidden
    return spoiled(change)


def other_ids(folder: Path, rid: str, ids: list[int], hidden: torch.Tensor) -> None:
    from safetensors.torch import save_file
    save_file({"hidden": hidden, "input_ids": torch.tensor(ids[::-1])}, folder / f"{rid}.0.safetensors",
              {"nonce": rid.split("-")[0], "rid": rid, "start": "0", "layers": "2,4,5"})


def shm_full(folder: Path, rid: str, ids: list[int], hidden: torch.Tensor) -> None:
    (folder / f"{rid}.0.failed").write_text("OSError: [Errno 28] No space left on device")


FAULTS = {
    "nothing": (lambda folder, rid, ids, hidden: None, "are missing"),
    "half of it": (spoiled(lambda hidden: hidden[: len(hidden) // 2]), "holds"),
    "other tokens": (other_ids, "another request's"),
    "shared memory full": (shm_full, "No space left on device"),
    "not finite": (poke(1, 2, float("nan")), "NaN or infinite"),
    "infinite": (poke(0, 0, float("-inf")), "NaN or infinite"),
    "zero row": (spoiled(lambda hidden: hidden * torch.tensor([1.0, 0, 1, 1], dtype=torch.bfloat16)[None, :, None]), "one single value"),
    "one value far off": (poke(1, 1, 3e4), "r_4 at row 1 has a norm of"),
    "scaled": (spoiled(lambda hidden: hidden * 6), "typical norm"),
    "faint": (spoiled(lambda hidden: hidden / 6), "typical norm"),
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_bad_dump_is_asked_for_again_alone(tmp_path: Path, target: Path, kind: str) -> None:
    """Once wrong: repeated. Always wrong: quarantined with its reason, the others stored."""
    fault, reason = FAULTS[kind]
    engine = FakeEngine(tmp_path / "shm")
    engine.faults |= {120: fault, 121: fault}  # neighbours in a batch
    result = go(engine, target)
    assert_right(target)
    assert result.retried == 2 and engine.asked == len(ROWS) + 2
    assert sum(rid.endswith("-1") for rid in engine.alone) == 2  # the second attempt, each by itself


@pytest.mark.parametrize("kind", FAULTS)
def test_a_row_that_is_always_wrong_goes_into_quarantine_with_its_reasons(tmp_path: Path, target: Path, kind: str) -> None:
    fault, reason = FAULTS[kind]
    engine = FakeEngine(tmp_path / "shm")
    victim = sorted(ROWS, key=lambda row: len(row["input_ids"]))[20]
    answer = engine._answer
    engine._answer = lambda number, ids, rid: (fault_or(engine, fault, ids, rid, victim) or answer(number, ids, rid))
    result = go(engine, target)
    store = assert_right(target, [row for row in ROWS if row is not victim])
    (entry,) = quarantine.read(store.path)
    assert entry["sample_id"] == victim["sample_id"] and len(entry["reasons"]) == 3 and reason in entry["reasons"][-1]
    assert result.quarantined == [entry] and reason in quarantine.summary(store.path)
    checks = Checks()
    extract.check(checks, ROWS, store, extract.plan(as_columns(ROWS), target, store.path, dtype="bfloat16", shard_mb=1))
    assert not checks.failed, checks.table()
    engine._answer = answer
    go(engine, target)  # mended: the next run asks for it again
    assert_right(target)
    assert quarantine.read(store.path) == []


def fault_or(engine: FakeEngine, fault: Any, ids: list[int], rid: str, victim: dict[str, Any]) -> Any:
    if ids != victim["input_ids"]:
        return None
    hidden = fault(engine.dump_dir, rid, ids, states(ids))
    if hidden is not None:
        engine.write(rid, ids, hidden)
    return extract_reply(ids, rid)


def extract_reply(ids: list[int], rid: str) -> Reply:
    return Reply([1], "length", len(ids), 0, rid)


def as_columns(rows: Any) -> Any:
    from datasets import Dataset
    return Dataset.from_list(rows)


def test_too_many_bad_rows_stop_the_stage_and_keep_the_good(tmp_path: Path, target: Path) -> None:
    engine = FakeEngine(tmp_path / "shm")
    engine.faults = {n: FAULTS["not finite"][0] for n in range(60, 1000)}
    with pytest.raises(Eagle3Error, match=r"of 150 rows failed 3 times, and 1 is the limit.*NaN") as stopped:
        go(engine, target)
    assert "quarantine_share" in str(stopped.value)
    assert 0 < len(Store.open(target.parent / "store")) < len(ROWS)
    engine.faults = {}
    go(engine, target)
    assert_right(target)


def test_a_dump_that_is_never_right_stops_at_the_first_row(tmp_path: Path, target: Path) -> None:
    engine = FakeEngine(tmp_path / "shm")
    engine.faults = {n: FAULTS["zero row"][0] for n in range(10000)}
    with pytest.raises(Eagle3Error, match="0 is the limit"):
        go(engine, target, quarantine_share=0.5)
    assert engine.asked < 2 * len(ROWS) + 20


def test_a_prompt_that_the_engine_refuses_does_not_take_its_neighbours_along(tmp_path: Path, target: Path) -> None:
    """SGLang refuses a request of many prompts as a whole when one of them is too long."""
    engine, poison = FakeEngine(tmp_path / "shm"), ROWS[17]
    answer = engine.client.prefill

    def prefill(prompts: list[list[int]], rids: list[str]) -> list[Reply]:
        if poison["input_ids"] in prompts:
            return [Reply([], "refused", len(ids), 0, rid, "longer than the context") for ids, rid in zip(prompts, rids, strict=True)]
        return answer(prompts, rids)

    engine.client.prefill = prefill
    result = go(engine, target)
    assert_right(target, [row for row in ROWS if row is not poison])
    assert [entry["sample_id"] for entry in result.quarantined] == [poison["sample_id"]]
    assert "longer than the context" in result.quarantined[0]["reasons"][0]


def refusing(engine: FakeEngine, poison: Any) -> FakeEngine:
    """Refuses, at once, every request with a prompt that is `poison(ids)`."""
    answer = engine.client.prefill

    def prefill(prompts: list[list[int]], rids: list[str]) -> list[Reply]:
        if any(map(poison, prompts)):
            return [Reply([], "refused", len(ids), 0, rid, "longer than the context") for ids, rid in zip(prompts, rids, strict=True)]
        return answer(prompts, rids)

    engine.client.prefill = prefill
    return engine


def test_a_row_too_long_that_comes_first_and_alone_ends_nothing_neither_now_nor_when_run_again(tmp_path: Path, target: Path) -> None:
    """The longest row goes first; the others are under way when it is given up."""
    long = make_rows(1, 900, seed=4)[0]
    rows = [*ROWS, long]
    assert len(long["input_ids"]) > 100
    for _ in range(2):  # the second finds everything else in the store: nothing new, and still one row in quarantine
        engine = refusing(FakeEngine(tmp_path / "shm", seconds_a_batch=0.1), lambda ids: len(ids) > 100)
        result = go(engine, target, rows)
        assert [entry["sample_id"] for entry in result.quarantined] == [long["sample_id"]]
        assert_right(target)
    broken = FakeEngine(tmp_path / "c")
    broken.client.prefill = lambda prompts, rids: [extract_reply(ids, rid) for ids, rid in zip(prompts, rids, strict=True)]
    assert [entry["sample_id"] for entry in go(broken, target, rows).quarantined] == [long["sample_id"]]  # a bad dump, likewise


def test_an_engine_that_refuses_everything_is_found_out_soon_and_a_lone_row_at_the_end(tmp_path: Path, target: Path) -> None:
    assert extract.REFUSALS == 3  # one more is too many; the other three threads may have counted theirs by then
    with pytest.raises(Eagle3Error, match=r"\D[4-7] of 150 rows failed.*0 is the limit.*longer than the context"):
        go(refusing(FakeEngine(tmp_path / "a"), lambda ids: True), target)
    with pytest.raises(Eagle3Error, match="1 of 1 rows failed 3 times"):
        go(refusing(FakeEngine(tmp_path / "b"), lambda ids: True), target, ROWS[:1])
    with pytest.raises(Eagle3Error, match="1 of 9 rows failed.* 0 is the limit"):  # all others stored, and a ninth is more than a hundredth
        go(refusing(FakeEngine(tmp_path / "c"), lambda ids: ids == ROWS[3]["input_ids"]), target, ROWS[:9])


def test_an_interrupt_stops_soon_and_keeps_what_is_there(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, aborted, look = FakeEngine(tmp_path / "shm", seconds_a_batch=0.05), [], extract._Run._look

    def interrupted(run: Any, began: float, bar: Any) -> None:
        look(run, began, bar)
        if run.result.samples and not aborted:
            raise KeyboardInterrupt

    engine.client.abort_all = lambda: aborted.append(True)
    monkeypatch.setattr(extract._Run, "_look", interrupted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        go(engine, target)
    assert aborted and time.monotonic() - begun < 5
    kept = len(Store.open(target.parent / "store"))
    assert 0 < kept < len(ROWS) and not list(engine.dump_dir.iterdir())
    monkeypatch.undo()
    go(FakeEngine(tmp_path / "b"), target)
    assert_right(target)


# ---- several engines, and their deaths ----


def test_several_engines_share_the_work_and_a_slow_one_only_slows(tmp_path: Path, target: Path) -> None:
    slow, fast = FakeEngine(tmp_path / "a", seconds_a_batch=0.3), FakeEngine(tmp_path / "b")
    go([slow, fast], target)
    assert_right(target)
    assert 0 < slow.asked < fast.asked


@pytest.mark.parametrize("after", [1, 2, 7, 15])
def test_a_dead_engine_leaves_the_work_to_the_others(tmp_path: Path, target: Path, after: int) -> None:
    dying, other = FakeEngine(tmp_path / "a", dies_after=after), FakeEngine(tmp_path / "b", seconds_a_batch=0.02)
    result = go([dying, other], target)
    assert_right(target)
    assert len(result.lost_engines) == 1 and "exit code -9" in result.lost_engines[0] and result.retried == 0


@pytest.mark.parametrize("after", [1, 5, 15])
def test_an_engine_that_can_restart_goes_on_where_it_was(tmp_path: Path, target: Path, after: int) -> None:
    engine = RestartingEngine(tmp_path / "a", dies_after=after)
    result = go(engine, target)
    assert_right(target)
    assert engine.restarts == 1 and not result.lost_engines and not list(engine.dump_dir.iterdir())


def test_with_no_engine_left_the_reason_is_given_and_the_store_is_kept(tmp_path: Path, target: Path) -> None:
    with pytest.raises(Eagle3Error, match="no engine is left.*exit code -9"):
        go(FakeEngine(tmp_path / "a", dies_after=9), target)
    assert len(Store.open(target.parent / "store")) > 0
    go(FakeEngine(tmp_path / "b"), target)
    assert_right(target)


def test_engines_that_compute_other_states_are_never_mixed(tmp_path: Path, target: Path) -> None:
    with pytest.raises(Eagle3Error, match="target.weights: 'w1' there, 'w2' now"):
        go([FakeEngine(tmp_path / "a"), FakeEngine(tmp_path / "b", weights="w2")], target)
    go(FakeEngine(tmp_path / "c"), target)
    with pytest.raises(Eagle3Error, match="fingerprint.target.weights: 'w1' there, 'w2' now"):
        go(FakeEngine(tmp_path / "d", weights="w2"), target)


# ---- forecast, fp8 ----


@pytest.mark.parametrize("store_dtype", ["", FP8])
def test_the_forecast_is_within_a_per_cent_of_what_is_written(tmp_path: Path, target: Path, store_dtype: str) -> None:
    rows = make_rows(800, 400, seed=3)
    forecast = extract.plan(as_columns(rows), target, target.parent / "store", dtype="bfloat16", shard_mb=1, store_dtype=store_dtype)
    go(FakeEngine(tmp_path / "shm"), target, as_columns(rows), store_dtype)
    store = Store.open(target.parent / "store")
    written = sum(f.stat().st_size for f in store.path.iterdir())
    assert written > 5e6 and abs(forecast.bytes / written - 1) < 0.01
    assert abs(forecast.files - len(list(store.path.iterdir()))) <= 1 and forecast.tokens == store.tokens
    checks = Checks()
    extract.check(checks, rows, store, forecast)
    assert not checks.failed, checks.table()


def test_an_extraction_that_goes_on_needs_no_room_for_what_is_there(tmp_path: Path, target: Path) -> None:
    rows = make_rows(400, 400, seed=3)
    folder = target.parent / "store"
    first = extract.plan(as_columns(rows), target, folder, dtype="bfloat16", shard_mb=1)
    go(FakeEngine(tmp_path / "shm"), target, rows)
    again = extract.plan(as_columns(rows), target, folder, dtype="bfloat16", shard_mb=1)
    used = sum(f.stat().st_blocks * 512 for f in folder.iterdir())
    assert used > 5e6 and again.disk_free > used
    assert planning.written(folder) == used and planning.written(tmp_path / "none") == 0
    assert again.bytes == first.bytes and again.fits


def test_fp8_halves_the_disk_and_stays_close(tmp_path: Path, target: Path) -> None:
    go(FakeEngine(tmp_path / "shm"), target, store_dtype=FP8)
    store = Store.open(target.parent / "store")
    assert store.manifest["store_dtype"] == FP8 and store.manifest["dtype"] == "bfloat16"
    for sample in store:
        wanted = states(sample.input_ids.tolist()).float()
        peak = wanted.abs().amax(-1, keepdim=True)
        assert sample.hidden.dtype == torch.bfloat16
        assert ((sample.hidden.float() - wanted).abs() <= wanted.abs() / 16 + peak * 2.0**-18).all()


def test_a_warm_up_gives_a_rate_and_leaves_nothing(tmp_path: Path, target: Path) -> None:
    engine = FakeEngine(tmp_path / "shm", seconds_a_batch=0.05)
    asked: list[str] = []
    prefill = engine.client.prefill
    engine.client.prefill = lambda prompts, rids: (asked.extend(rids), prefill(prompts, [engine.rid(r) for r in rids]))[1]
    assert 0 < extract.warm_up(engine, ROWS) < 1e6
    assert asked and not any(rid.startswith(engine.nonce) for rid in asked)  # a stranger's request is never dumped


# ---- the parts ----


def test_work_is_cut_by_tokens_longest_first_and_shrinks_towards_the_end() -> None:
    lengths = np.array([5, 900, 40, 40, 7, 300, 300, 60] * 20)
    work = Work(np.arange(len(lengths)), lengths, 1000, 2)
    sizes, rows = [], []
    while batch := work.take():
        sizes.append(sum(task.tokens for task in batch))
        rows += [task.row for task in batch]
        work.done()
    assert sorted(rows) == list(range(len(lengths)))
    taken = lengths[rows]
    assert (taken[:-1] >= taken[1:]).all()
    assert max(sizes) <= 1000 and sizes[-1] <= 1000 / 8


def test_the_sink_at_token_0_raises_no_alarm_and_drift_is_followed() -> None:
    norms, rng = Norms(["r_2", "last"]), np.random.default_rng(0)
    starts = np.array([0, 50])
    for n in range(200):
        samples = np.exp(rng.normal(5 + n / 2000, 0.2, (100, 2)))
        samples[starts] *= 170
        assert norms.judge(samples, starts) == {}
    assert norms._count > ENOUGH
    sink = np.exp(rng.normal(5, 0.2, (5, 2)))
    sink[[0, 3]] *= 170  # a second sink, in short rows
    assert norms.judge(sink, np.array([0, 2])) == {}
    spiked = np.exp(rng.normal(5, 0.2, (100, 2)))
    spiked[57, 0] = 1e8
    assert norms.judge(spiked, starts).keys() == {1} and "r_2 at row 7 has a norm of 1e+08" in norms.judge(spiked, starts)[1]
    scaled = np.exp(rng.normal(5, 0.2, (100, 2)))
    scaled[:50, 1] *= 5
    assert norms.judge(scaled, starts).keys() == {0} and "last: the sample's typical norm" in norms.judge(scaled, starts)[0]
