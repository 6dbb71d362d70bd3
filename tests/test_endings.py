"""Every way in which a stage can end: its status is true afterwards, and nothing is left running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from labs import FOREVER, SERVER, Lab, await_end, copy_of, descendants, gone, prepare_environment, start, state

from eagle3lib import experiment, runs


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run folder of the caller's, and a library that does not change while the tests run."""
    prepare_environment(monkeypatch)


# ---- every way to fail ----

FAILURES = {
    "an exception": ("{}['x']", "failed", "KeyError: 'x'"),
    "a dead kernel": ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "died", "kernel died without a Python error"),
    "sys.exit(0)": ("import sys\nsys.exit(0)", "failed", "SystemExit: 0"),
    "os._exit(0)": ("import os\nos._exit(0)", "died", "kernel died"),
    "a shell line": ("!echo before; exit 3", "failed", "ended with exit code 3"),
    "a failed check": ("stage.checks.add('c', False, 1, 2, 'p', 'Mend it.')", "failed", "check failed: c: measured 1, limit 2. Mend it."),
    "a NaN": ("stage.finish(loss=float('nan'))", "failed", "prepare.loss is nan"),
    "a wrong stage": ("stage._record['nonce'] = 'of another execution'", "failed", "it wrote no result"),
    "an interrupt from inside": ("raise KeyboardInterrupt", "interrupted", ""),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_stage_that_fails(tmp_path: Path, kind: str) -> None:
    body, status, says = FAILURES[kind]
    lab = Lab(tmp_path, {"prepare": SERVER + body})
    result = lab.run(run_id="r")
    assert (result.exit_code, state(result.dir)) == (130 if status == "interrupted" else 1, {"prepare": status}), lab.text
    record = runs.read_record(result.dir, "prepare")
    assert (record["status"], says in record["error"]) == (status, True), record
    line = next(line for line in lab.text.splitlines() if line.startswith(f"[1/5] prepare: {status}"))
    assert says in line
    page = (result.dir / "report.html").read_text()
    assert (result.dir / "01_prepare.ipynb").exists() and says.split(":")[0] in page
    assert gone(result.dir)


def test_a_notebook_that_never_begins_has_failed(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    path = lab.notebooks / "01_prepare.ipynb"
    book = json.loads(path.read_text())
    book["cells"] = book["cells"][:2]
    path.write_text(json.dumps(book))
    result = lab.run(run_id="r")
    assert result.exit_code == 1 and "it wrote no result" in lab.text


def test_a_stage_that_never_finishes_runs_into_its_limit(tmp_path: Path) -> None:
    tidy = SERVER + "try:\n    import time\n    time.sleep(300)\nfinally:\n    stage.path('tidied').touch()"
    lab = Lab(tmp_path, {"prepare": tidy})
    result = lab.run(run_id="r", stage_timeout_s=8)
    assert (result.exit_code, state(result.dir)) == (1, {"prepare": "failed"})
    assert "ran out of time" in lab.text and (result.dir / "tidied").exists()
    assert gone(result.dir)


def test_an_old_ok_record_is_not_taken_for_a_new_one(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    path = lab.notebooks / "05_evaluate.ipynb"
    book = json.loads(path.read_text())
    book["cells"] = book["cells"][:2]  # runs to its end without a word, beside the record of a good execution
    path.write_text(json.dumps(book))
    result = lab.run({"seed": 3}, run_id=(lab.runs / "latest").resolve().name)
    assert (result.exit_code, state(result.dir)["evaluate"]) == (1, "failed"), lab.text
    assert runs.read_record(result.dir, "evaluate")["status"] == "failed"


# ---- signals ----


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_everything_and_says_interrupted(tmp_path: Path, number: int) -> None:
    lab = Lab(tmp_path, {"prepare": SERVER + FOREVER})
    process = start(lab)
    family = descendants(process)
    assert len(family) >= 3  # papermill, kernel, server
    process.send_signal(number)
    assert process.wait(30) == 130
    assert await_end(family, 1) == []
    assert state(lab.runs / "r") == {"prepare": "interrupted"}
    assert runs.read_record(lab.runs / "r", "prepare")["status"] == "interrupted"
    assert "Interrupted in prepare" in (lab.runs / "r" / "report.html").read_text()


SLOW_TO_LEAVE = "import time\nprint('on', flush=True)\ntry:\n    time.sleep(300)\nfinally:\n    time.sleep(2)\n    stage.path('tidied').touch()"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_a_sweep_reaches_its_runs_once(tmp_path: Path, number: int) -> None:
    lab = Lab(tmp_path, {"prepare": SLOW_TO_LEAVE})
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(lab.notebooks), runs.ENV_RUNS: str(lab.runs)}
    command = [sys.executable, "-m", "eagle3lib", "run", str(lab.params), "--set", "lr=[0.1,0.2]"]
    process = subprocess.Popen(command, env=env, cwd=runs.repo_root(), stdout=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while time.monotonic() < end and not any("on" in log.read_text().split() for log in lab.runs.glob("*-*of2/console.log")):
        time.sleep(0.1)
    process.send_signal(number)
    said = process.communicate(timeout=60)[0]
    (log,) = lab.runs.glob("*-*of2/console.log")  # of the second point there is none
    about = runs.read_json(log.with_name("run.json"))
    assert (process.returncode, about["status"], about["stages"]["prepare"]["status"]) == (130, "interrupted", "interrupted"), said
    assert "Interrupted in prepare" in log.with_name("report.html").read_text() and log.with_name("tidied").exists()
    assert "interrupted" in said and "not started" in said


def test_a_stage_of_a_run_that_is_over_runs_no_more(tmp_path: Path) -> None:
    for status, entry in (("failed", "died"), ("interrupted", "died"), ("running", "running")):
        runs.write_json(tmp_path / "run.json", {"status": status, **runs.me(), "stages": {"prepare": {"status": "running"}}})
        assert experiment.read_run(tmp_path)["stages"]["prepare"]["status"] == entry


def test_a_notebook_that_ignores_the_interrupt_is_killed(tmp_path: Path) -> None:
    deaf = SERVER + "import signal\nfor s in (signal.SIGINT, signal.SIGTERM):\n    signal.signal(s, signal.SIG_IGN)\n" + FOREVER
    lab = Lab(tmp_path, {"prepare": deaf})
    process = start(lab, grace=1)
    family = descendants(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(30) == 130 and await_end(family, 1) == []
    assert state(lab.runs / "r") == {"prepare": "interrupted"}


def test_a_killed_runner_leaves_nothing_and_its_run_is_known_as_dead(tmp_path: Path) -> None:
    lab = Lab(tmp_path, {"prepare": SERVER + FOREVER})
    process = start(lab)
    family = descendants(process)
    process.kill()
    process.wait()
    assert await_end(family) == []
    about = experiment.read_run(lab.runs / "r")
    assert (about["status"], about["stages"]["prepare"]["status"]) == ("died", "died")
    assert "prepare   run (died)" in lab.describe(run_id="r")
