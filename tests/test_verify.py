"""The gate: a faultless dump passes every check, and each kind of silent failure is caught by the check made for it."""

from __future__ import annotations

import pytest
import torch
from dumps import LAYERS, as_dataset, greedy_rows, hidden_states, write_dump

from eagle3lib import quarantine, targets, verify
from eagle3lib.checks import Checks
from eagle3lib.errors import CheckFailed, Eagle3Error
from eagle3lib.runs import read_json
from eagle3lib.store import FP8, Store, sample_id


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


def test_a_probe_row_that_is_no_longer_in_the_store_is_a_failed_check(tmp_path, tiny, model, rows):
    """The probes are of the first two rows; `verify --drop` may have taken one out, or both."""
    for gone in (1, 2):
        store = write_dump(tmp_path / str(gone), tiny, rows, model, store_rows=rows[gone:])
        checks = Checks()
        verify.check_logprobs(checks, tmp_path / str(gone) / "probes.safetensors", store, tiny)
        assert "probe rows are there" in [check.name for check in checks.failed] and checks.failed[0].measured == gone


def test_the_rounding_of_another_batch_is_no_false_alarm(tmp_path, tiny, model, rows):
    """An engine's bf16 result depends on the batch: 1.5 per cent a token was seen between two passes over the same row."""
    generator = torch.Generator().manual_seed(0)

    def spoil(hidden, row):
        noise = torch.randn(hidden.shape, generator=generator)
        return hidden + 0.015 * hidden.norm(dim=-1, keepdim=True) * noise / noise.norm(dim=-1, keepdim=True)

    checks = run_checks(tmp_path, tiny, rows, write_dump(tmp_path, tiny, rows, model, spoil))
    assert not checks.failed, checks.table()


def test_an_fp8_dump_passes_with_the_limits_named_for_it(tmp_path, tiny, model, rows):
    checks = run_checks(tmp_path, tiny, rows, write_dump(tmp_path, tiny, rows, model, store_dtype=FP8))
    assert not checks.failed, checks.table()
    limits = {c.name: c.limit for c in checks}
    assert limits["log-probabilities, median"] == verify.LOGPROB_MEDIAN[FP8] and limits["parity last"].startswith("0.08")


@pytest.mark.parametrize(("fault", "by", "caught"), [(None, 0, set()), ("layer", 1, {"parity r_2"}), ("layer", -1, {"parity r_2"})])
def test_a_target_too_big_for_this_machine_is_compared_in_its_first_layers(tmp_path, tiny, model, rows, fault, by, caught, capsys):
    """300 kB for weights of 1.4 MB: the embeddings are held, the layers are read from the checkpoint when they compute."""
    store = write_dump(tmp_path, tiny, rows, model, shift_layer(model, by) if fault else None)
    checks = Checks()
    errors = verify.check_parity(checks, store, tiny, rows=2, free=600_000)
    assert {c.name for c in checks.failed} == caught and [c.name for c in checks] == ["parity r_2"]
    assert set(errors["r_2"]) == {1, 2, 3}
    assert "the first 4 of 8 layers" in capsys.readouterr().out


def test_without_parity_rows_it_is_said_that_nothing_was_compared(tmp_path, tiny, model, rows):
    checks = Checks()
    assert verify.check_parity(checks, write_dump(tmp_path, tiny, rows, model), tiny, rows=0) == {}
    assert "not asked for" in str(checks.table())


def test_rows_in_quarantine_are_missing_by_intent_up_to_a_share(tmp_path, tiny, model, rows):
    store = write_dump(tmp_path, tiny, rows, model, store_rows=rows[:-1])
    quarantine.add(store.path, {"sample_id": rows[-1]["sample_id"], "tokens": 5, "reasons": ["NaN"]})
    for share, failed in ((0.1, set()), (0.05, {"rows in quarantine"})):
        checks = Checks()
        verify.check_rows(checks, as_dataset(rows), store, share)
        assert {c.name for c in checks.failed} == failed, checks.table()


def test_rows_that_differ_in_their_mask_only_may_share_their_states(tmp_path, tiny, model, rows):
    mask = [not m for m in rows[0]["loss_mask"]]
    twin = dict(rows[0], loss_mask=mask, sample_id=sample_id(rows[0]["input_ids"], mask))
    store = write_dump(tmp_path, tiny, [*rows, twin], model)
    checks = Checks()
    verify.check_rows(checks, as_dataset([*rows, twin]), store)
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


def repeat_far(_model, _by):
    def spoil(hidden, row):
        hidden = hidden.clone()
        hidden[20, 3] = hidden[3, 3]
        return hidden
    return spoil


def faint_row(_model, _by):
    def spoil(hidden, row):
        hidden = hidden.clone()
        hidden[9, 2] *= 1e-5
        return hidden
    return spoil


def one_layer_twice(_model, _by):
    return lambda hidden, row: hidden[:, [0, 1, 1, 3]]


def one_request_for_all(model, _by):
    kept = {}
    return lambda hidden, row: kept.setdefault("states", hidden)


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
    (repeat_far, 0, "no row repeats"),
    (faint_row, 0, "no row is near zero"),
    (one_layer_twice, 0, "streams differ"),
    (one_layer_twice, 0, "parity r_5"),
    (one_request_for_all, 0, "states of their own"),
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
