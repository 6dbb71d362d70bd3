"""A workbook, a params file and a runs folder of a test's own, and the ways to watch a run from outside."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from workbooks import workbook

from eagle3lib import experiment, forecast, reuse, runner, runs

# A server at its worst: its own session, its parent gone at once, its environment empty. Its ancestry is all there is.
SERVER = """\
import subprocess, sys
launch = "import subprocess as s, sys; n = s.DEVNULL; print(s.Popen(sys.argv[1:], stdin=n, stdout=n, stderr=n, start_new_session=True).pid)"
server = [sys.executable, "-c", "import time; time.sleep(300)"]
said = subprocess.run([sys.executable, "-c", launch, *server], env={}, capture_output=True, text=True).stdout
stage.path("server.pid").write_text(said)
"""
FOREVER = "import time\nprint('on', flush=True)\nwhile True:\n    time.sleep(0.1)"


def prepare_environment(patch: pytest.MonkeyPatch) -> None:
    """No run folder of the caller's, and a library that does not change while the tests run."""
    patch.delenv(runs.ENV_RUN_DIR, raising=False)
    patch.setattr(reuse, "library_digest", lambda: "unchanged")


class Lab:
    """A workbook, a params file and a runs folder of its own."""

    def __init__(self, folder: Path, bodies: dict[str, str] | None = None):
        self.folder, self.log = folder, io.StringIO()
        self.notebooks, self.runs = workbook(folder / "notebooks", bodies), folder / "runs"
        self.params = folder / "small.yaml"
        self.params.write_text("# one small experiment\nlr: 1e-4\nrows: 5\n")

    def order(self, overrides: dict[str, Any] | None = None, **selection: Any) -> experiment.Order:
        return experiment.Order(self.params, overrides or {}, notebooks=self.notebooks, runs_dir=self.runs, **selection)

    def run(self, overrides: dict[str, Any] | None = None, stage_timeout_s: float | None = None, **selection: Any) -> runner.Result:
        return runner.run(self.order(overrides, **selection), stage_timeout_s=stage_timeout_s, out=self.log)

    def describe(self, overrides: dict[str, Any] | None = None, **selection: Any) -> str:
        return forecast.describe(self.order(overrides, **selection))

    @property
    def text(self) -> str:
        return self.log.getvalue()


def state(folder: Path) -> dict[str, str]:
    """Status of each stage by run.json."""
    return {name: entry["status"] for name, entry in runs.read_json(folder / "run.json")["stages"].items()}


def gone(folder: Path, name: str = "server.pid") -> bool:
    """Has the server ended that a notebook of this run started (see SERVER)?"""
    try:
        return psutil.Process(int((folder / name).read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def copy_of(finished: Lab, folder: Path) -> Lab:
    """The good run in another place, for a test that changes it."""
    shutil.copytree(finished.folder, folder / "lab", symlinks=True)
    lab = Lab.__new__(Lab)
    lab.folder, lab.log = folder / "lab", io.StringIO()
    lab.notebooks, lab.runs, lab.params = lab.folder / "notebooks", lab.folder / "runs", lab.folder / "small.yaml"
    return lab


COMMAND = """
import sys
from pathlib import Path
from eagle3lib import runner
from eagle3lib.experiment import Order
runner.GRACE_S = {grace}
lab = Path(sys.argv[1])
sys.exit(runner.run(Order(lab / "small.yaml", run_id="r", notebooks=lab / "notebooks", runs_dir=lab / "runs")).exit_code)
"""


def start(lab: Lab, grace: float = 20.0, seconds: float = 120) -> subprocess.Popen[bytes]:
    """The runner as a process of its own, at the moment when the notebook's body says `on`."""
    said = lab.folder / "console.txt"
    with said.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", COMMAND.format(grace=grace), str(lab.folder)], stdout=out, cwd=runs.repo_root())
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        if "on" in said.read_text().split():
            return process
        time.sleep(0.1)
    process.kill()
    process.wait()
    raise AssertionError(f"the notebook did not come up: {said.read_text()}")


def descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def await_end(processes: list[psutil.Process], seconds: float = 10) -> list[psutil.Process]:
    """Those that are still there after some seconds."""
    return psutil.wait_procs(processes, timeout=seconds)[1]
