"""Several engines: which GPUs they take, and that an interrupt or a death leaves none behind and none asked for. No server is started."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, fake_target

from eagle3lib import extract, fleet
from eagle3lib.errors import Eagle3Error


class Server:
    """Stands for an engine: `seconds` until it is up, and a note of its end."""

    up: list[Server]
    timer: threading.Timer | None  # set off by the last start

    def __init__(self) -> None:
        self.stopped = False
        self.up.append(self)

    def stop(self) -> None:
        self.stopped = True

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


@pytest.fixture
def up(monkeypatch: pytest.MonkeyPatch) -> list[Server]:
    """The servers that came up; engine n takes n x 0.3 s, the one named "bad" fails."""
    monkeypatch.setattr(Server, "up", [], raising=False)
    monkeypatch.setattr(Server, "timer", None, raising=False)

    def start(target: Path, run_dir: Path, **settings: Any) -> Server:
        if run_dir.name == "2" and Server.timer:
            Server.timer.start()
        time.sleep(0.3 * int(run_dir.name if run_dir.name.isdigit() else 0))
        if settings.get("dtype") == "bad" and run_dir.name == "1":
            raise Eagle3Error("engine: no")
        return Server()

    monkeypatch.setattr(fleet.Engine, "start", start)
    return Server.up


@pytest.mark.parametrize("seconds", [0.1, 0.4])
def test_an_interrupt_while_engines_start_leaves_none_that_nobody_owns(tmp_path: Path, up: list[Server], seconds: float) -> None:
    Server.timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), fleet.start(3, [], fake_target(tmp_path / "target"), tmp_path / "run", device="cpu"):
        raise AssertionError("it was interrupted before")
    assert len(up) == 3 and all(server.stopped for server in up)


def test_one_that_does_not_start_ends_the_others_and_all_end_with_the_block(tmp_path: Path, up: list[Server]) -> None:
    target = fake_target(tmp_path / "target")
    with pytest.raises(Eagle3Error, match="engine: no"), fleet.start(3, [], target, tmp_path / "run", device="cpu", dtype="bad"):
        pass
    assert len(up) == 2 and all(server.stopped for server in up)
    up.clear()
    with fleet.start(2, [], target, tmp_path / "run", device="cpu") as engines:
        assert engines == up and not any(server.stopped for server in up)
    assert all(server.stopped for server in up)


@pytest.mark.parametrize(("words", "width"), [([], 1), (["--tp-size", "2"], 2), (["--tp-size=2"], 2), (["--tp=4"], 4), (["--tp_size", "8"], 8),
                                              (["--tensor-parallel-size=2", "--trust-remote-code"], 2)])
def test_the_gpus_of_an_engine_come_behind_those_before_it_however_the_width_is_spelled(words: list[str], width: int) -> None:
    settings = {"device": "cuda", "extra_args": words, "port": 30000}
    assert fleet.on_gpus(0, settings) == settings
    assert fleet.on_gpus(3, settings) == {"device": "cuda", "extra_args": [*words, "--base-gpu-id", str(3 * width)], "port": 0}


def test_the_probes_go_to_an_engine_that_lives(tmp_path: Path) -> None:
    dead, other = FakeEngine(tmp_path / "a"), FakeEngine(tmp_path / "b")
    dead.dead = True
    assert extract.living([dead, other]) is other and extract.living([other, dead]) is other
    other.dead = True
    assert extract.living([dead, other]) is dead  # it may start itself again
