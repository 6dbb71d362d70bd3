"""Faults of the server, shown by a scripted one in SGLang's place. Each ends the start; nothing of it stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from servers import CHUNK, HERE, LAYERS, fake_python, until
from table import SERVER

from eagle3lib import preflight
from eagle3lib.engine import Engine

ALONE = {"a foreign server answers", "killed from outside"}
TESTED = set(SERVER)


def start(tiny: Path, folder: Path, fault: str, **options: object) -> Engine:
    chosen = {"capture_layers": LAYERS, "device": "cpu", "dtype": "float32", "chunked_prefill_size": CHUNK, "start_timeout_s": 30} | options
    return Engine.start(tiny, folder / "run", python=fake_python(folder, fault), **chosen)


def test_the_scripted_server_without_a_fault_is_accepted_and_its_speed_is_said_aloud(tiny: Path, tmp_path: Path, witness, capsys) -> None:
    with start(tiny, tmp_path, "none") as engine:
        assert engine.handshake["layers"] == LAYERS and not engine.checks.failed and len(engine.checks) >= 20
    assert "implausibly fast" in capsys.readouterr().out


@pytest.mark.parametrize("fault", [name for name in SERVER if name not in ALONE])
def test_a_server_that_is_not_ours_not_ready_or_not_capturing_is_refused_by_name(tiny: Path, tmp_path: Path, judge, fault: str) -> None:
    limit = 3 if fault in ("hangs", "never answers") else 30
    begun = time.monotonic()
    message = judge(SERVER[fault], lambda: start(tiny, tmp_path, fault, start_timeout_s=limit))
    assert "Log: " in message or "engine.log" in message or "See the engine log" in message
    assert time.monotonic() - begun < 20
    assert json.loads((tmp_path / "run" / "engine.json").read_text())["state"] == "stopped"


def test_a_server_that_is_killed_while_it_starts_is_noticed_within_two_seconds(tiny: Path, tmp_path: Path, judge) -> None:
    killed: list[float] = []

    def kill() -> None:
        record = tmp_path / "run" / "engine.json"
        assert until(lambda: record.exists() and json.loads(record.read_text())["pid"], 20)
        time.sleep(0.5)
        psutil.Process(json.loads(record.read_text())["pid"]).kill()
        killed.append(time.monotonic())

    thread = threading.Thread(target=kill)
    thread.start()
    noticed: list[float] = []

    def watched() -> None:
        try:
            start(tiny, tmp_path, "hangs")
        except BaseException:
            noticed.append(time.monotonic())
            raise

    judge(SERVER["killed from outside"], watched)
    thread.join()
    assert noticed[0] - killed[0] < 2 + 1  # and a second at most to stop what is left


def test_a_foreign_server_that_says_yes_to_everything_is_never_accepted(tiny: Path, tmp_path: Path, judge, monkeypatch) -> None:
    """It took the port after our look at it; our own process hangs. Its word is not even asked for."""
    monkeypatch.setattr(preflight, "require_port_free", lambda port: None)
    port = preflight.free_port()
    command = [sys.executable, str(HERE / "fake_server.py"), "none", "--port", str(port), "--served-model-name", "x", "--model-path", str(tiny)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SGLANG_HS_", "EAGLE3_TEST"))}
    with subprocess.Popen(command, env=environment) as foreign:
        try:
            assert until(lambda: preflight.holders(port), 20)
            message = judge(SERVER["a foreign server answers"], lambda: start(tiny, tmp_path, "hangs", port=port))
            assert f"process {foreign.pid} (" in message
        finally:
            foreign.kill()
