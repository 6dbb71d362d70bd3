"""What every fault is judged by: the exit code, the message, and that nothing is left."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from servers import Witness
from table import Fault

from eagle3lib import cli, probes


class Judge:
    """Runs something that must fail as the command line would, and holds its exit code and message against a fault of the table."""

    def __init__(self, witness: Witness, capsys: pytest.CaptureFixture[str]):
        self.witness, self.capsys = witness, capsys

    def __call__(self, fault: Fault, command: Callable[[], object], exit_code: int = 1) -> str:
        code = cli.guarded(lambda: bool(command()) * 0)
        shown = self.capsys.readouterr().err
        errors = shown[shown.index("error: "):] if "error: " in shown else shown
        assert code == exit_code, shown
        assert re.search(fault.pattern, errors), f"wanted {fault.says!r} in:\n{errors}"
        assert "Traceback" not in errors.split("\n")[0]
        return errors


@pytest.fixture
def judge(witness: Witness, capsys: pytest.CaptureFixture[str]) -> Judge:
    return Judge(witness, capsys)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3lib.client.BACK_OFF_S", 0.05)
    monkeypatch.setattr(probes, "DUMP_WAIT_S", 1.0)
