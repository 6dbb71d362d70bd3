"""Faults of the capture on real SGLang: one server with a plugin that is sabotaged while it runs, and a few starts with a fault."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import Judge
from servers import CHUNK, LAYERS, START_S, Witness
from table import CAPTURE, PLUGIN

from eagle3lib import preflight, probes
from eagle3lib.engine import Engine
from eagle3lib.settings import Settings

TESTED = set(CAPTURE) | set(PLUGIN)
ORIGINAL = preflight.PLUGIN_DIR


def sabotaged_plugin(folder: Path) -> Path:
    copy = shutil.copytree(ORIGINAL, folder / "plugin", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(Path(__file__).with_name("sabotage.py"), copy / "eagle3_capture.py")
    return copy


def start(target: Path, run: Path) -> Engine:
    return Engine.start(target, run, capture_layers=LAYERS, device="cpu", dtype="float32", chunked_prefill_size=CHUNK, start_timeout_s=START_S)


@pytest.fixture(scope="module")
def server(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Path, Witness]]:
    """A proved server whose plugin does what the fault file says, from one request to the next."""
    folder = tmp_path_factory.mktemp("sabotage")
    witness, file = Witness(folder), folder / "fault"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**witness.environment, "EAGLE3_TEST_PLUGIN": str(ORIGINAL / "eagle3_capture.py"),
                            "EAGLE3_TEST_FAULT": str(file)}.items():
            patch.setenv(name, value)
        patch.setattr(tempfile, "tempdir", str(witness.tmp))
        patch.setattr(preflight, "PLUGIN_DIR", sabotaged_plugin(folder))
        with start(tiny, folder / "run") as engine:
            shared, ports = witness.shared_memory(), witness.ports()
            assert shared and ports
            yield engine, file, witness
        witness.require_nothing(shared=shared, ports=ports)


@pytest.mark.parametrize("name", CAPTURE)
def test_wrong_dumps_are_refused_by_the_probes(server: tuple[Engine, Path, Witness], capsys, name: str) -> None:
    engine, file, witness = server
    file.write_text(name)
    try:
        engine.client.generate([5, 6], f"between-{engine.nonce}", {"temperature": 0, "max_new_tokens": 1})  # faults of the model need a pass
        Judge(witness, capsys)(CAPTURE[name], lambda: probes.prove(engine, probes.start_reference(engine)))
    finally:
        file.unlink()
        engine.client.generate([5, 6], f"after-{engine.nonce}", {"temperature": 0, "max_new_tokens": 1})
    assert [path.name for path in engine.dump_dir.iterdir()] == ["handshake-0.json"]


def test_the_same_server_without_a_fault_is_accepted(server: tuple[Engine, Path, Witness]) -> None:
    probes.prove(server[0], probes.start_reference(server[0]))


@pytest.mark.parametrize("name", PLUGIN)
def test_a_start_with_a_fault_in_it_is_refused(tiny: Path, tmp_path: Path, judge, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    target = tiny
    monkeypatch.setenv("EAGLE3_TEST_PLUGIN", str(ORIGINAL / "eagle3_capture.py"))
    monkeypatch.setenv("EAGLE3_TEST_FAULT", str(tmp_path / "fault"))
    monkeypatch.setenv("EAGLE3_TEST_FAULT_AT_START", name)
    monkeypatch.setattr(preflight, "PLUGIN_DIR", sabotaged_plugin(tmp_path))
    if name == "weights cut in half":
        target = shutil.copytree(tiny, tmp_path / "target")
        weights = next(target.glob("*.safetensors"))
        weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    if name == "prefix cache on":
        arguments = Settings.arguments.fget
        without = property(lambda self: {k: v for k, v in arguments(self).items() if k != "disable_radix_cache"})
        monkeypatch.setattr(Settings, "arguments", without)
    judge(PLUGIN[name], lambda: start(target, tmp_path / "run"))
