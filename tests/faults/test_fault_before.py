"""Faults that are found before anything is started."""

from __future__ import annotations

import os
import shutil
import socket
import venv
from collections.abc import Callable
from pathlib import Path

import pytest
from servers import LAYERS, fake_python
from table import BEFORE

from eagle3lib import preflight
from eagle3lib.engine import Engine

Start = Callable[..., Engine]


def bare_python(folder: Path) -> str:
    venv.EnvBuilder(symlinks=True).create(folder / "venv")
    return str(folder / "venv" / "bin" / "python")


def without_entry_point(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "plugin").mkdir()
    shutil.copy(preflight.PLUGIN_DIR / "eagle3_capture.py", folder / "plugin")
    monkeypatch.setattr(preflight, "PLUGIN_DIR", folder / "plugin")
    start()


def with_busy_port(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        start(port=holder.getsockname()[1])


def beside_another(start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start() as first:
        try:
            start()
        finally:
            first.require_alive()


SPECULATION = ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/draft"]
CHAIN = [*SPECULATION, "--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "8"]
DO: dict[str, Callable[[Start, Path, pytest.MonkeyPatch], object]] = {
    "no interpreter": lambda start, folder, _: start(python=str(folder / "nothing")),
    "no Python": lambda start, folder, _: start(python=shutil.which("false")),
    "no SGLang": lambda start, folder, _: start(python=bare_python(folder)),
    "wrong version": lambda start, folder, _: start(versions=["sglang==0.4.9"]),
    "no entry point": without_entry_point,
    "busy port": with_busy_port,
    "two of us": beside_another,
    "no model": lambda start, folder, _: start(target=folder / "nothing"),
    "no room": lambda start, folder, _: start(max_total_tokens=10**12),
    "capture and speculation": lambda start, folder, _: start(device="cuda", extra_args=SPECULATION),
    "capture and graphs": lambda start, folder, _: start(extra_args=["--cuda-graph-backend-prefill", "tc_piecewise"]),
    "chain of wrong length": lambda start, folder, _: start(device="cuda", capture_layers=None, extra_args=CHAIN),
    "layer beyond": lambda start, folder, _: start(capture_layers=[2, 4, 8]),
}
BAD_PARAMETERS = {"capture and speculation", "capture and graphs", "chain of wrong length", "layer beyond"}


@pytest.mark.parametrize("name", DO)
def test_it_is_refused_before_the_start(name: str, tiny: Path, tmp_path: Path, judge, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**options: object) -> Engine:
        chosen = {"target": tiny, "capture_layers": LAYERS, "device": "cpu", "dtype": "float32", "python": fake_python(tmp_path)} | options
        return Engine.start(chosen.pop("target"), tmp_path / "run", **chosen)

    message = judge(BEFORE[name], lambda: DO[name](start, tmp_path, monkeypatch), exit_code=2 if name in BAD_PARAMETERS else 1)
    if name == "busy port":
        assert f"process {os.getpid()} (" in message and "s old" in message
    if name == "no SGLang":
        assert "venv/bin/python" in message and "sglang absent" in message and "wanted: SGLang 0.5.14" in message
    if name != "two of us":
        assert not (tmp_path / "run" / "engine.log").exists(), "something was started"
