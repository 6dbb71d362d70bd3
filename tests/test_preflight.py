"""What is looked at before a start, by itself. The faults that it finds are in tests/faults."""

from __future__ import annotations

import os
import socket
import types
from pathlib import Path

import pytest

from eagle3lib import preflight, readiness
from eagle3lib.checks import Checks
from eagle3lib.errors import CheckFailed


def test_secrets_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/somewhere")
    environment = preflight.engine_environment({})
    assert "HF_TOKEN" not in environment and "SGLANG_HS_DUMP_DIR" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(preflight.PLUGIN_DIR)


@pytest.mark.parametrize("named", ["dumps", "./dumps", "~/dumps", "../{here}/dumps"])
def test_the_dump_folder_is_absolute_however_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", named.format(here=tmp_path.name))
    assert preflight.dump_base() == tmp_path / "dumps"


def test_a_port_that_nobody_holds_proves_no_socket() -> None:
    """It answered a moment ago, so another network namespace or a process that has gone since did."""
    engine = types.SimpleNamespace(port=preflight.free_port(), pid=os.getpid(), own_pids=lambda: {os.getpid()}, require_alive=lambda: None,
                                   checks=Checks(), log_path="engine.log", log_tail=lambda: "")
    with pytest.raises(CheckFailed, match=r"engine\.socket.*nobody listens"):
        readiness._prove_socket(engine)
    with socket.create_server(("127.0.0.1", engine.port)):
        readiness._prove_socket(engine)
