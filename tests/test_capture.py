"""The capture without a server: what the client refuses to believe, and what the plugin does with a batch."""

from __future__ import annotations

import importlib.util
import json
import os
import time
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3lib import capture, preflight
from eagle3lib.errors import Eagle3Error

NONCE, LAYERS, H = "0123456789abcdef", [2, 4, 5], 8
HELLO = {"nonce": NONCE, "layers": LAYERS, "hidden_size": H, "dtype": "bfloat16"}
RID = f"{NONCE}-row"
IDS = list(range(10, 17))


def states(rows: int = len(IDS), seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, len(LAYERS) + 1, H, generator=torch.Generator().manual_seed(seed)).bfloat16()


def put(folder: Path, hidden: torch.Tensor, ids: list[int], start: int = 0, **meta: str) -> None:
    save_file({"hidden": hidden.contiguous(), "input_ids": torch.tensor(ids)}, folder / f"{RID}.{start}.safetensors",
              {"nonce": NONCE, "rid": RID, "start": str(start), "layers": "2,4,5"} | meta)


def read(folder: Path, **handshake: object) -> torch.Tensor:
    return capture.read_dump(folder, RID, IDS, HELLO | handshake, timeout_s=0.05)


# ---- the client's side ----


def test_chunks_are_put_together_in_order(tmp_path: Path) -> None:
    hidden = states()
    put(tmp_path, hidden[4:], IDS[4:], start=4)
    put(tmp_path, hidden[:4], IDS[:4])
    assert torch.equal(read(tmp_path), hidden)
    capture.delete_dump(tmp_path, RID)
    assert not list(tmp_path.iterdir())


def broken(hidden: torch.Tensor, row: int, stream: int, value: float) -> torch.Tensor:
    hidden[row, stream] = value
    return hidden


def one_nan(hidden: torch.Tensor) -> torch.Tensor:
    hidden[6, 3, 2] = float("nan")
    return hidden


def raw(folder: Path, head: bytes) -> None:
    (folder / f"{RID}.0.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)


def header(rows: int) -> dict[str, object]:
    """Of so many rows, true to itself in all but the length of the file."""
    row = (len(LAYERS) + 1) * H * 2
    return {"__metadata__": {"nonce": NONCE, "rid": RID, "start": "0", "layers": "2,4,5"},
            "hidden": {"dtype": "BF16", "shape": [rows, len(LAYERS) + 1, H], "data_offsets": [-rows * row, 0]},
            "input_ids": {"dtype": "I64", "shape": [rows], "data_offsets": [-rows * 8, 0]}}


FAULTS = {
    "missing": (lambda f: put(f, states()[:4], IDS[:4]), "rows 4 to 6 of 7 are missing"),
    "prefix from the cache": (lambda f: put(f, states()[4:], IDS[4:], start=4), "rows 0 to 6 of 7 are missing"),
    "other tokens": (lambda f: put(f, states(), [*IDS[:3], 99, *IDS[4:]]), "row 3 belongs to 99; 13 was sent there"),
    "too many rows": (lambda f: put(f, states(8), [*IDS, 17]), "row 7 belongs to 17; no token was sent there"),
    "rows twice": (lambda f: (put(f, states()[:4], IDS[:4]), put(f, states()[:5], IDS[2:], start=4)), "row 4 belongs to 12; 14 was sent"),
    "another run": (lambda f: put(f, states(), IDS, nonce="fedcba9876543210"), "fedcba9876543210"),
    "another request": (lambda f: put(f, states(), IDS, rid=f"{NONCE}-other"), f"{NONCE}-other"),
    "other layers": (lambda f: put(f, states(), IDS, layers="3,5,6"), "3,5,6"),
    "fewer streams": (lambda f: put(f, states()[:, :3], IDS), r"expected \[7, 4, 8\] bfloat16"),
    "cast to float16": (lambda f: put(f, states().half(), IDS), "F16 for 7 tokens"),
    "rows without tokens": (lambda f: put(f, states(), IDS[:4]), "for 4 tokens"),
    "empty": (lambda f: put(f, states()[:0], []), "for 0 tokens"),
    "NaN": (lambda f: put(f, one_nan(states()), IDS), "the last hidden state at row 6 has NaN"),
    "infinite": (lambda f: put(f, broken(states(), 2, 0, float("inf")), IDS), "r_2 at row 2 has NaN or infinite"),
    "all zero": (lambda f: put(f, broken(states(), 5, 1, 0.0), IDS), "r_4 at row 5 has one single value"),
    "constant": (lambda f: put(f, broken(states(), 5, 2, 1.5), IDS), "r_5 at row 5 has one single value"),
    "cut in half": (lambda f: (f / f"{RID}.0.safetensors").write_bytes(b"\x40\0\0\0\0\0\0\0{"), "cannot be read"),
    "a list for a header": (lambda f: raw(f, b"[1, 2]"), "cannot be read"),
    "a list for a tensor": (lambda f: raw(f, b'{"hidden": [], "input_ids": []}'), "cannot be read"),
    "nested without end": (lambda f: raw(f, b"[" * 100_000), "cannot be read"),
    "no tensors": (lambda f: raw(f, b"{}"), "cannot be read"),
    "more rows than memory": (lambda f: raw(f, json.dumps(header(2**50)).encode()), f"{RID}"),
    "rows beyond numbers": (lambda f: raw(f, json.dumps(header(2**80)).encode()), f"{RID}"),
    "failed write": (lambda f: (f / f"{RID}.0.failed").write_text("OSError: No space left on device"), "No space left on device"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_dump_is_refused_by_name(tmp_path: Path, fault: str) -> None:
    make, message = FAULTS[fault]
    make(tmp_path)
    with pytest.raises(Eagle3Error, match=message) as refusal:
        read(tmp_path)
    assert RID in str(refusal.value)


@pytest.mark.parametrize("said", ["[]", "7", "null", '"error"'])
def test_a_handshake_that_is_no_object_is_a_value_error(tmp_path: Path, said: str) -> None:
    (tmp_path / "handshake-0.json").write_text(said)
    with pytest.raises(ValueError, match="in place of an object"):
        capture.read_handshakes(tmp_path)


def test_a_server_that_dies_ends_the_wait(tmp_path: Path) -> None:
    def look() -> None:
        raise Eagle3Error("the server ended")

    begun = time.monotonic()
    with pytest.raises(Eagle3Error, match="the server ended"):
        capture.read_dump(tmp_path, RID, IDS, HELLO, look=look)
    assert time.monotonic() - begun < 2


def test_a_request_id_never_becomes_a_path(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="letters, digits"):
        capture.dump_rid(NONCE, "../../etc/passwd")
    with pytest.raises(Eagle3Error, match="no request id of ours"):
        capture.read_dump(tmp_path, "../x", IDS, HELLO)
    (tmp_path / "keep").touch()
    capture.delete_dump(tmp_path, "*")
    assert (tmp_path / "keep").exists()


def test_a_refusing_handshake_is_an_error(tmp_path: Path) -> None:
    assert capture.read_handshakes(tmp_path) == []
    (tmp_path / "handshake-0.json").write_text(json.dumps({"nonce": NONCE, "error": "Refused: dp_size is 2"}))
    with pytest.raises(Eagle3Error, match="dp_size is 2"):
        capture.read_handshakes(tmp_path)


# ---- the plugin's side ----


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    monkeypatch.setenv("SGLANG_HS_NONCE", NONCE)
    spec = importlib.util.spec_from_file_location("eagle3_capture", preflight.PLUGIN_DIR / "eagle3_capture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def active(plugin: types.ModuleType, folder: Path) -> object:
    taker = plugin.Capture(folder)
    taker.active, taker.layers, taker.hidden_size = True, LAYERS, H
    return taker


def batch(rids: list[str], lengths: list[int], starts: list[int], verify: bool = False, extend: bool = True) -> types.SimpleNamespace:
    mode = types.SimpleNamespace(is_extend=lambda: extend, is_target_verify=lambda: verify)
    return types.SimpleNamespace(forward_mode=mode, rids=rids, extend_seq_lens_cpu=lengths, extend_prefix_lens_cpu=starts)


def run(taker: object, ids: torch.Tensor, hidden_NAH: torch.Tensor, fields: types.SimpleNamespace, aux: bool = True) -> object:
    """One forward pass through the hook, waited for; returns what the hooked function was called with."""
    streams = list(hidden_NAH[:, :-1].unbind(1)) if aux else None
    seen = taker.around_logits(lambda *args: args, "self", ids, hidden_NAH[:, -1], "head", fields, streams)
    taker.pool.shutdown(wait=True)
    return seen


def test_the_hook_splits_a_batch_and_leaves_padding_and_strangers_out(plugin: types.ModuleType, tmp_path: Path) -> None:
    fields = batch([f"{NONCE}-a", "HEALTH_CHECK_1", f"{NONCE}-b", f"{NONCE[::-1]}-c"], [3, 1, 4, 2], [0, 0, 128, 0])
    ids, hidden = torch.arange(100, 116), states(16)  # 10 rows of requests, 6 rows of padding
    seen = run(active(plugin, tmp_path), ids, hidden, fields)
    assert seen[0] == "self" and seen[1] is ids and seen[4] is fields  # the forward pass itself is untouched
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{NONCE}-a.0.safetensors", f"{NONCE}-b.128.safetensors"]
    for name, rows in ((f"{NONCE}-a.0", slice(0, 3)), (f"{NONCE}-b.128", slice(4, 8))):
        written = load_file(tmp_path / f"{name}.safetensors")
        assert torch.equal(written["hidden"], hidden[rows]) and written["input_ids"].tolist() == ids[rows].tolist()


@pytest.mark.parametrize("fields", [batch([RID], [7], [0], verify=True), batch([RID], [7], [0], extend=False)])
def test_only_prefill_is_dumped(plugin: types.ModuleType, tmp_path: Path, fields: types.SimpleNamespace) -> None:
    run(active(plugin, tmp_path), torch.tensor(IDS), states(), fields)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rid", [f"{NONCE}-../../x", f"{NONCE}-", f"{NONCE}-a.b", "", f"x{NONCE}-a"])
def test_a_hostile_request_id_writes_nothing(plugin: types.ModuleType, tmp_path: Path, rid: str) -> None:
    run(active(plugin, tmp_path), torch.tensor(IDS), states(), batch([rid], [7], [0]))
    assert not list(tmp_path.iterdir())


def test_a_failed_write_is_seen_by_the_client(plugin: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    run(active(plugin, tmp_path), torch.tensor(IDS), states(), batch([RID], [7], [0]))
    with pytest.raises(Eagle3Error, match="No space left on device"):
        read(tmp_path)


@pytest.mark.parametrize(("aux", "rows", "why"), [(False, 7, "0 aux hidden states, 3 were asked for"), (True, 5, "expected at least")])
def test_states_of_another_shape_are_marked_as_failed(plugin: types.ModuleType, tmp_path: Path, aux: bool, rows: int, why: str) -> None:
    run(active(plugin, tmp_path), torch.tensor(IDS), states(rows), batch([RID], [7], [0]), aux=aux)
    with pytest.raises(Eagle3Error, match=why):
        read(tmp_path)


def test_the_server_may_reuse_its_buffers_at_once(plugin: types.ModuleType, tmp_path: Path) -> None:
    taker, ids, hidden = active(plugin, tmp_path), torch.tensor(IDS), states()
    kept = hidden.clone()
    streams = list(hidden.unbind(1))
    taker.around_logits(lambda *_: (ids.zero_(), hidden.zero_()), "self", ids, streams[-1], "head", batch([RID], [7], [0]), streams[:-1])
    taker.pool.shutdown(wait=True)
    assert torch.equal(read(tmp_path), kept)


class Model(torch.nn.Module):
    """Stands for SGLang's models: `rule` turns the ids that it is given into what it captures."""

    def __init__(self, rule: object):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers_to_capture, self.rule = [], rule

    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = self.rule(ids)


def deepseek(ids: list[int]) -> list[int]:
    return [k + 1 for k in ids] if ids[0] == 1 else list(ids)


@pytest.mark.parametrize("layers", [[2, 4, 5], [3, 30, 58]])
@pytest.mark.parametrize("rule", [lambda ids: [k + 1 for k in ids], deepseek])
def test_layers_are_set_by_what_the_model_says_afterwards(plugin: types.ModuleType, rule: object, layers: list[int]) -> None:
    model = Model(rule)
    assert plugin.set_layers(model, layers) == layers == model.model.layers_to_capture


def test_a_model_that_captures_other_layers_is_refused(plugin: types.ModuleType) -> None:
    with pytest.raises(plugin.Refused, match=r"would capture \[\[4, 6, 7\]\]"):
        plugin.set_layers(Model(lambda ids: [k + 2 for k in ids]), LAYERS)
    with pytest.raises(plugin.Refused, match=r"would capture \[\[2, 3, 4\]\]"):
        plugin.set_layers(Model(deepseek), [1, 2, 3])  # ids [0, 1, 2] stay, ids [1, 2, 3] are shifted: r_1 cannot be had
    with pytest.raises(plugin.Refused, match="ascend"):
        plugin.set_layers(Model(lambda ids: [k + 1 for k in ids]), [4, 2])
    with pytest.raises(plugin.Refused, match="cannot capture"):
        plugin.set_layers(torch.nn.Linear(1, 1), LAYERS)


@pytest.mark.parametrize(("name", "value"), [("disable_radix_cache", False), ("enable_dp_attention", True), ("pp_size", 2),
                                             ("speculative_algorithm", "EAGLE3")])
def test_a_server_that_cannot_dump_whole_rows_is_refused(plugin: types.ModuleType, tmp_path: Path, name: str, value: object) -> None:
    args = types.SimpleNamespace(**plugin.REQUIRED_ARGS)
    plugin.require_arguments(args)
    setattr(args, name, value)
    with pytest.raises(plugin.Refused, match=f"{name} is {value!r}"):
        plugin.require_arguments(args)
    delattr(args, name)
    with pytest.raises(plugin.Refused, match=f"no argument {name}"):
        plugin.require_arguments(args)


def test_a_refusal_becomes_a_handshake_and_the_server_goes_on(plugin: types.ModuleType, tmp_path: Path, monkeypatch) -> None:
    def newer() -> None:
        raise plugin.Refused("ForwardBatch has no rids")

    monkeypatch.setattr(plugin, "require_known_internals", newer)
    taker = plugin.Capture(tmp_path)
    taker.after_init(None, types.SimpleNamespace(tp_rank=0))
    assert not taker.active
    with pytest.raises(Eagle3Error, match="capture refused .* ForwardBatch has no rids"):
        capture.read_handshakes(tmp_path)


def test_with_the_variable_unset_nothing_is_registered(plugin: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SGLANG_HS_DUMP_DIR", raising=False)
    monkeypatch.setitem(__import__("sys").modules, "sglang", None)  # an import of SGLang would fail here
    plugin.register()
    assert "SGLANG_HS_DUMP_DIR" not in os.environ


def test_the_plugin_stays_small_and_alone() -> None:
    source = (preflight.PLUGIN_DIR / "eagle3_capture.py").read_text()
    assert len(source.splitlines()) < 250 and "eagle3lib" not in source


def test_deleting_dumps_of_a_server_that_took_its_folder_along_is_no_error(tmp_path):
    """Clean-up runs while a death is being told; it must not hide it behind a missing folder."""
    capture.delete_dump(tmp_path / "gone", capture.dump_rid("0123456789abcdef", "a1"))
