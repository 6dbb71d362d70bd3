"""The gate: a faultless dump passes every check, and each kind of silent failure is caught by the check made for it."""

from __future__ import annotations

import pytest
import torch
from dumps import LAYERS, as_dataset, greedy_rows, hidden_states, write_dump

from eagle3lib import targets, verify
from eagle3lib.checks import Checks
from eagle3lib.errors import CheckFailed, Eagle3Error
from eagle3lib.runs import read_json
from eagle3lib.store import Store


@pytest.fixture(scope="module")
def model(tiny):
    return targets.load_model(tiny)


@pytest.fixture(scope="module")
def rows(model):
    return greedy_rows(model, 10)


def run_checks(run, target, rows, store) -> Checks:
    checks = Checks()
    record = {"nonce": "abc", "handshake": {"nonce": "abc", "layers": LAYERS}}
    verify.check_identity(checks, record, store, target)
    verify.check_rows(checks, as_dataset(rows), store)
    verify.check_values(checks, store)
    verify.check_logprobs(checks, run / "probes.safetensors", store, target)
    verify.check_agreement(checks, store, target)
    verify.check_parity(checks, store, target, rows=3)
    return checks


def test_a_faultless_dump_passes_every_check(tmp_path, tiny, model, rows):
    checks = run_checks(tmp_path, tiny, rows, write_dump(tmp_path, tiny, rows, model))
    assert not checks.failed, checks.table()
    assert len(checks) >= 14


def test_the_rounding_of_another_batch_is_no_false_alarm(tmp_path, tiny, model, rows):
    """An engine's bf16 result depends on the batch: 1.5 per cent a token was seen between two passes over the same row."""
    generator = torch.Generator().manual_seed(0)

    def spoil(hidden, row):
        noise = torch.randn(hidden.shape, generator=generator)
        return hidden + 0.015 * hidden.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True)

    checks = run_checks(tmp_path, tiny, rows, write_dump(tmp_path, tiny, rows, model, spoil))
    assert not checks.failed, checks.table()


def shift_layer(model, by):
    return lambda hidden, row: hidden_states(model, row["input_ids"], [k + by for k in LAYERS])


def norm_again(model, _by):
    return lambda hidden, row: torch.cat([hidden[:, :-1], model.model.norm(hidden[:, -1:])], 1)


def last_is_early(model, _by):
    def spoil(hidden, row):
        with torch.inference_mode():
            before = model(input_ids=torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states[-2][0]
        return torch.cat([hidden[:, :-1], before[:, None]], 1)
    return spoil


def swap_streams(_model, _by):
    return lambda hidden, row: hidden[:, [1, 0, 2, 3]]


def shift_rows(_model, _by):
    return lambda hidden, row: hidden.roll(1, 0)


def zero_row(_model, _by):
    def spoil(hidden, row):
        hidden = hidden.clone()
        hidden[7, 1] = 0
        return hidden
    return spoil


def repeat_row(_model, _by):
    def spoil(hidden, row):
        hidden = hidden.clone()
        hidden[8] = hidden[7]
        return hidden
    return spoil


def not_finite(_model, _by):
    def spoil(hidden, row):
        hidden = hidden.clone()
        hidden[3, 2, 5] = float("nan")
        return hidden
    return spoil


@pytest.mark.parametrize(("fault", "by", "caught"), [
    (shift_layer, 1, "parity r_2"),
    (shift_layer, -1, "parity r_5"),
    (swap_streams, 0, "parity r_2"),
    (norm_again, 0, "log-probabilities, median"),
    (last_is_early, 0, "parity last"),
    (last_is_early, 0, "log-probabilities, median"),
    (shift_rows, 0, "log-probabilities, worst"),
    (shift_rows, 0, "greedy agreement"),
    (zero_row, 0, "rows that vary"),
    (repeat_row, 0, "no row repeats"),
    (not_finite, 0, "finite"),
])
def test_each_kind_of_wrong_state_is_caught(tmp_path, tiny, model, rows, fault, by, caught):
    store = write_dump(tmp_path, tiny, rows, model, fault(model, by))
    failed = {c.name for c in run_checks(tmp_path, tiny, rows, store).failed}
    assert caught in failed


def test_rows_lost_added_or_swapped_are_caught(tmp_path, tiny, model, rows):
    lost = write_dump(tmp_path / "lost", tiny, rows, model, store_rows=rows[:-1])
    assert "every row is there" in {c.name for c in run_checks(tmp_path / "lost", tiny, rows, lost).failed}
    more = write_dump(tmp_path / "more", tiny, rows, model)
    assert "nothing else is there" in {c.name for c in run_checks(tmp_path / "more", tiny, rows[:-1], more).failed}
    relabelled = [dict(r, loss_mask=[not m for m in r["loss_mask"]]) for r in rows]
    assert "token ids and masks" in {c.name for c in run_checks(tmp_path / "more", tiny, relabelled, more).failed}


def test_a_dump_of_another_target_or_without_handshake_is_caught(tmp_path, tiny, model, rows):
    from tiny import tiny_target

    store = write_dump(tmp_path, tiny, rows, model)
    checks = Checks()
    other = tiny_target(tmp_path / "other", seed=1)
    verify.check_identity(checks, {"nonce": "abc", "handshake": None}, store, other)
    assert {c.name for c in checks.failed} == {"plugin handshake", "captured layers", "target fingerprint"}


def test_the_verdict_is_about_exactly_these_bytes(tmp_path, tiny, model, rows):
    store = write_dump(tmp_path, tiny, rows, model)
    with pytest.raises(Eagle3Error, match="never verified"):
        verify.require_verdict(tmp_path, store)
    assert verify.write_verdict(tmp_path, store, run_checks(tmp_path, tiny, rows, store))
    verify.require_verdict(tmp_path, store)
    (more,) = greedy_rows(model, 1, seed=9)
    grown = write_dump(tmp_path, tiny, rows, model, store_rows=[more])
    with pytest.raises(Eagle3Error, match="other bytes"):
        verify.require_verdict(tmp_path, grown)


def test_a_failed_check_is_one_red_line_and_a_refusal(tmp_path, tiny, model, rows):
    store = write_dump(tmp_path, tiny, rows, model, zero_row(model, 0))
    checks = run_checks(tmp_path, tiny, rows, store)
    assert not verify.write_verdict(tmp_path, store, checks)
    with pytest.raises(Eagle3Error, match="failed verification"):
        verify.require_verdict(tmp_path, Store.open(tmp_path / "store"))
    with pytest.raises(CheckFailed) as caught:
        checks.raise_failed()
    first = caught.value._render_traceback_()[0]
    assert "\x1b[31m" in first and "rows that vary" in first and "limit" in first
    assert read_json(tmp_path / "verdict.json")["passed"] is False


def test_no_checks_is_no_pass(tmp_path, tiny, model, rows):
    store = write_dump(tmp_path, tiny, rows, model)
    assert not verify.write_verdict(tmp_path, store, Checks())
