"""A server that is alive and silent: extraction ends at a limit, keeps what is there, and waits for nobody."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, RestartingEngine, fake_target
from test_extract import ROWS, assert_right, go

from eagle3lib import client, extract
from eagle3lib.client import Client, Reply
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import Store


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return fake_target(tmp_path / "target")


class Stuck(RestartingEngine):
    """Alive, and silent from the fourth request on; only its end ends the waiting."""

    stopped = 0

    def prefill(self, prompts: list[list[int]], rids: list[str]) -> list[Reply]:
        if self.batches >= 3:
            while not self.dead:
                time.sleep(0.01)
        return super().prefill(prompts, rids)

    def stop(self) -> None:
        self.dead, self.stopped = True, self.stopped + 1


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_server_that_is_alive_and_silent_ends_the_run_at_the_limit_and_at_once_on_ctrl_c(
        tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool) -> None:
    engine, look, begun = Stuck(tmp_path / "shm"), extract._Run._look, time.monotonic()

    def looking(run: Any, began: float, bar: Any) -> None:
        look(run, began, bar)
        if interrupted and not engine.stopped and time.monotonic() - begun > 0.5:
            raise KeyboardInterrupt

    monkeypatch.setattr(extract, "ABORT_S", 0.2)
    monkeypatch.setattr(extract, "STALL_S", 60 if interrupted else 0.5)
    monkeypatch.setattr(extract._Run, "_look", looking)
    with pytest.raises(KeyboardInterrupt if interrupted else Eagle3Error, match=None if interrupted else "no row came for .*stuck"):
        go(engine, target)
    assert time.monotonic() - begun < 6 and engine.stopped == 1 and engine.restarts == 0
    assert 0 < len(Store.open(target.parent / "store")) < len(ROWS)
    monkeypatch.undo()
    go(FakeEngine(tmp_path / "b"), target)
    assert_right(target)


def test_a_restart_that_takes_long_is_no_standstill(tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RestartingEngine(tmp_path / "shm", dies_after=2)
    begin = engine.begin
    engine.begin = lambda: (time.sleep(1.5), begin())[1]
    monkeypatch.setattr(extract, "STALL_S", 0.7)
    go(engine, target)
    assert_right(target)
    assert engine.restarts == 1


@pytest.mark.parametrize(("many", "times"), [(True, 1), (False, client.ATTEMPTS)])
def test_a_batch_that_a_silent_server_kept_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch, many: bool, times: int) -> None:
    """A single request is: another server error is more likely there, and its limit is shorter."""
    asked: list[str] = []
    release = threading.Event()

    class Silent(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            release.wait(10)

    monkeypatch.setattr(client, "BACK_OFF_S", 0.01)
    monkeypatch.setattr(client, "STALL_S", 0.2)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    asker = Client(f"http://127.0.0.1:{server.server_address[1]}", 1000, lambda: None)
    with pytest.raises(Eagle3Error, match=f"failed {times} times; last: ReadTimeout"):
        asker.prefill([[1, 2], [3]], ["a", "b"]) if many else asker.post([1], "a", {}, 0.2)
    release.set()
    server.shutdown()
    server.server_close()
    assert len(asked) == times
