"""The plugin: what it relies on in two versions of SGLang, its back-pressure, and a real run on the newer one."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import subprocess
import sys
import threading
import types
import venv
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from servers import CHUNK, LAYERS, START_S, until

from eagle3lib import preflight
from eagle3lib.engine import Engine

NEWER = "0.5.15.post1"
NONCE, H = "0123456789abcdef", 8


@pytest.fixture(scope="session")
def newer() -> Path:
    """A folder that holds SGLang 0.5.15.post1, fetched once."""
    folder = Path(__file__).resolve().parents[1] / ".cache" / f"sglang-{NEWER}"
    if not (folder / "sglang").is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), f"sglang=={NEWER}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode:
            pytest.skip(f"SGLang {NEWER} cannot be fetched: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    return folder / "sglang"


@pytest.fixture(params=["0.5.14", NEWER])
def sources(request: pytest.FixtureRequest) -> Path:
    if request.param == NEWER:
        return request.getfixturevalue("newer")
    spec = importlib.util.find_spec("sglang")
    assert spec and spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0])


def load_plugin() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("eagle3_capture", preflight.PLUGIN_DIR / "eagle3_capture.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- the contract with SGLang, read from its sources ----


def body(path: Path, name: str) -> ast.ClassDef:
    return next(n for n in ast.parse(path.read_text()).body if isinstance(n, ast.ClassDef) and n.name == name)


def method(path: Path, dotted: str) -> ast.FunctionDef:
    owner, name = dotted.split(".")
    return next(n for n in body(path, owner).body if isinstance(n, ast.FunctionDef) and n.name == name)


def parameters(function: ast.FunctionDef) -> list[str]:
    return [a.arg for a in function.args.args]


def fields(path: Path, name: str) -> set[str]:
    return {n.target.id for n in body(path, name).body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}


def test_the_hooked_functions_are_what_the_plugin_knows(sources: Path) -> None:
    plugin, srt = load_plugin(), sources / "srt"
    for dotted in (plugin.RUNNER, plugin.LOGITS):
        module, owner, name = dotted.rsplit(".", 2)
        path = sources.parent / (module.replace(".", "/") + ".py")
        assert parameters(method(path, f"{owner}.{name}"))[0] == "self"
    assert parameters(method(srt / "layers/logits_processor.py", "LogitsProcessor.forward"))[:6] == plugin.LOGITS_PARAMETERS
    assert parameters(method(srt / "model_executor/model_runner.py", "ModelRunner.init_aux_hidden_state_capture")) == ["self"]
    text = (srt / "plugins/hook_registry.py").read_text()
    assert 'AFTER = "after"' in text and 'AROUND = "around"' in text and "functools.wraps" in text  # wraps: the plugin looks for __wrapped__
    register = method(srt / "plugins/hook_registry.py", "HookRegistry.register")
    assert parameters(register) == ["cls", "target", "hook", "hook_type"]
    assert '"sglang.srt.plugins"' in (srt / "plugins/__init__.py").read_text()


def test_the_batch_and_the_arguments_are_what_the_plugin_knows(sources: Path) -> None:
    plugin, srt = load_plugin(), sources / "srt"
    batch = srt / "model_executor/forward_batch_info.py"
    assert set(plugin.BATCH_FIELDS) <= fields(batch, "ForwardBatch")
    modes = {n.name for n in body(batch, "ForwardMode").body if isinstance(n, ast.FunctionDef)}
    assert {"is_extend", "is_target_verify"} <= modes
    assert set(plugin.REQUIRED_ARGS) | {"cuda_graph_config"} <= fields(srt / "server_args.py", "ServerArgs")
    assert 'DISABLED = "disabled"' in (srt / "model_executor/cuda_graph_config.py").read_text()


@pytest.mark.parametrize(("model", "rule"), [("llama", "[val + 1 for val in layer_ids]"), ("deepseek_v2", "layer_ids[0] == 1")])
def test_the_models_take_layer_ids_as_the_plugin_tries_them(sources: Path, model: str, rule: str) -> None:
    text = (sources / f"srt/models/{model}.py").read_text()
    assert "def set_eagle3_layers_to_capture" in text and "layers_to_capture" in text
    function = text[text.index("def set_eagle3_layers_to_capture"):][:1500]
    assert rule in function, function


# ---- back-pressure ----


class Batches:
    """A plugin with a folder, fed batch after batch as a server would."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, high_water: int = 0):
        monkeypatch.setenv("SGLANG_HS_NONCE", NONCE)
        monkeypatch.setenv("SGLANG_HS_HIGH_WATER", str(high_water))
        self.module, self.folder = load_plugin(), folder
        self.taker = self.module.Capture(folder)
        self.taker.active, self.taker.layers, self.taker.hidden_size = True, LAYERS, H

    def forward(self, number: int, rows: int = 100) -> None:
        mode = types.SimpleNamespace(is_extend=lambda: True, is_target_verify=lambda: False)
        batch = types.SimpleNamespace(forward_mode=mode, rids=[f"{NONCE}-{number}"], extend_seq_lens_cpu=[rows], extend_prefix_lens_cpu=[0])
        states = [torch.full((rows, H), float(number)) for _ in range(4)]
        self.taker.around_logits(lambda *_: None, "self", torch.full((rows,), number), states[-1], "head", batch, states[:-1])

    def path(self, number: int) -> Path:
        return self.folder / f"{NONCE}-{number}.0.safetensors"


def in_thread(work: object) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_above_the_high_water_mark_a_batch_waits_until_the_client_has_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(tmp_path, monkeypatch, high_water=10_000)
    batches.forward(0)
    assert until(batches.path(0).exists, 5) and batches.path(0).stat().st_size > 10_000
    waiting = in_thread(lambda: batches.forward(1))
    waiting.join(0.3)
    assert waiting.is_alive() and not batches.path(1).exists()
    batches.path(0).unlink()  # the client has it
    waiting.join(5)
    assert not waiting.is_alive() and until(batches.path(1).exists, 5)
    assert (load_file(batches.path(1))["hidden"] == 1).all()


def test_a_client_that_never_fetches_does_not_hang_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reply that would make it fetch may hang on the batch that waits."""
    batches = Batches(tmp_path, monkeypatch, high_water=10_000)
    monkeypatch.setattr(batches.module, "PATIENCE_S", 0.2)
    batches.forward(0)
    assert until(batches.path(0).exists, 5)
    batches.forward(1)
    assert until(batches.path(1).exists, 5) and batches.path(0).exists()


def test_writers_that_lag_behind_hold_the_forward_pass_and_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches, gate = Batches(tmp_path, monkeypatch), threading.Event()
    write = batches.taker._write
    monkeypatch.setattr(batches.taker, "_write", lambda *args: (gate.wait(10), write(*args)))
    count = batches.module.BATCHES_IN_FLIGHT
    feeding = in_thread(lambda: [batches.forward(n) for n in range(count + 3)])
    feeding.join(0.5)
    assert feeding.is_alive() and batches.taker.buffers.empty() and not list(tmp_path.iterdir())
    gate.set()
    feeding.join(5)
    assert not feeding.is_alive()
    assert until(lambda: all(batches.path(n).exists() for n in range(count + 3)), 5)
    for n in range(count + 3):
        assert (load_file(batches.path(n))["hidden"] == n).all() and not list(tmp_path.glob("*.part"))


def test_one_rank_of_a_tensor_parallel_group_writes_and_every_rank_may_refuse(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = load_plugin()
    for rank in (0, 1):
        taker = plugin.Capture(tmp_path)
        monkeypatch.setattr(taker, "_prepare", lambda runner: {"layers": LAYERS, "hidden_size": H, "dtype": "float32"})
        taker.after_init(None, types.SimpleNamespace(tp_rank=rank))
        assert taker.active == (rank == 0)
    assert [p.name for p in tmp_path.iterdir()] == ["handshake-0.json"]
    monkeypatch.setattr(plugin, "require_known_internals", lambda: None)
    plugin.Capture(tmp_path).after_init(None, types.SimpleNamespace(tp_rank=3))  # it has none of the attributes that are needed
    assert '"error"' in (tmp_path / "handshake-3.json").read_text()


class NoGpu:
    """Stands for CUDA's streams and events, so that the arithmetic of the ring can be seen without a GPU; it notes what was asked for."""

    def __init__(self, *_: object, **__: object):
        self.calls: list[str] = []

    def __getattr__(self, name: str):
        return lambda *_: self.calls.append(name)


def test_the_ring_of_pinned_buffers_grows_is_reused_and_keeps_every_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    taker = Batches(tmp_path, monkeypatch).taker
    empty, pinned = torch.empty, []

    def without_pin(*args: object, pin_memory: bool = False, **kwargs: object) -> torch.Tensor:
        pinned.append(pin_memory)
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, "empty", without_pin)
    monkeypatch.setattr(torch.cuda, "Stream", NoGpu)
    monkeypatch.setattr(torch.cuda, "Event", NoGpu)
    monkeypatch.setattr(torch.cuda, "current_stream", NoGpu)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    buffer = None
    places = []
    for rows in (10, 30, 20):
        states, ids = torch.randn(rows, 4, H).bfloat16(), torch.arange(rows)
        on_host, ids_host, buffer, arrived = taker._to_host(states, ids, buffer)
        assert torch.equal(on_host, states) and torch.equal(ids_host, ids) and on_host.is_contiguous()
        assert on_host.data_ptr() == buffer.data_ptr() and arrived.calls == ["record"]
        places.append(buffer.data_ptr())
    assert all(pinned) and buffer.numel() == 30 * 4 * H * 2 and places[1] == places[2]


# ---- the newer version, really ----


def test_the_newer_sglang_is_proved_too(tiny: Path, tmp_path: Path, newer: Path) -> None:
    """Every probe of a start passes there; an interpreter of its own, which sees the newer version first."""
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    packages = next((tmp_path / "venv").glob("lib/python3*/site-packages"))
    (packages / "borrowed.pth").write_text("\n".join([str(newer.parent), *(p for p in sys.path if p.endswith("site-packages"))]))
    with Engine.start(tiny, tmp_path / "run", capture_layers=LAYERS, device="cpu", dtype="float32", chunked_prefill_size=CHUNK,
                      python=str(tmp_path / "venv/bin/python"), start_timeout_s=START_S, versions=[f"sglang=={NEWER}"]) as engine:
        assert engine.server_info["version"] == engine.handshake["sglang"] == NEWER
        assert engine.fingerprint["engine"] == f"sglang {NEWER}" and not engine.checks.failed and len(engine.checks) >= 20
