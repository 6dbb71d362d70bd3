"""Ends that nobody chose, at every stage: the status is true afterwards, and the run goes on where it stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from labs import FOREVER, SERVER, Lab, await_end, copy_of, descendants, gone, prepare_environment, start, state
from workbooks import workbook

from eagle3lib import runs
from eagle3lib.params import STAGES

KILLED = "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)"  # what the kernel's memory killer does
OTHER = SERVER.replace("server.pid", "other.pid")
# Beside the kill, each stage meets one other end; test_endings has all of them at the first stage.
ENDS = {
    "prepare": ("raise KeyboardInterrupt", "interrupted", "", None),
    "extract": ("import time\ntime.sleep(300)", "failed", "ran out of time", 10.0),
    "verify": ("import sys\nsys.exit(0)", "failed", "SystemExit: 0", None),
    "train": ("!exit 3", "failed", "ended with exit code 3", None),
    "evaluate": ("stage.finish(length=float('nan'))", "failed", "evaluate.length is nan", None),
}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_environment(monkeypatch)


@pytest.mark.parametrize("stage", STAGES)
def test_every_end_at_every_stage_and_on_again_from_there(finished: Lab, tmp_path: Path, stage: str) -> None:
    lab = copy_of(finished, tmp_path)
    name = (lab.runs / "latest").resolve().name
    n = STAGES.index(stage)
    for body, status, says, limit in ((KILLED, "died", "its kernel died without a Python error", None), ENDS[stage]):
        workbook(lab.notebooks, {stage: OTHER + body, **({"extract": SERVER} if stage != "extract" else {})})
        result = lab.run({"seed": 3}, run_id=name, stage_timeout_s=limit)
        noted = state(result.dir)
        assert (result.exit_code, noted[stage]) == (130 if status == "interrupted" else 1, status), lab.text
        record = runs.read_record(result.dir, stage)
        assert record["status"] == status and says in record["error"], record
        assert [noted[s] for s in STAGES[:n]] == ["ok"] * n and gone(result.dir, "other.pid")
        assert [runs.read_record(result.dir, s).get("status") for s in STAGES[n + 1 :]] == ["stale"] * (4 - n)
        assert f"{status.capitalize()} in {stage}" in (result.dir / "report.html").read_text()
    workbook(lab.notebooks, {} if stage == "extract" else {"extract": SERVER})
    before = len(lab.text)
    assert lab.run({"seed": 3}, run_id=name, only=stage).exit_code == 0, lab.text[before:]
    assert state(lab.runs / name)[stage] == "ok"
    plan = lab.describe({"seed": 3}, run_id=name)
    assert plan.count("skip (unchanged)") == n + 1 and plan.count(f"(stage {stage} ran again)") <= 1, plan


def test_a_kernel_killed_from_outside(tmp_path: Path) -> None:
    lab = Lab(tmp_path, {"prepare": SERVER + FOREVER})
    process = start(lab)
    family = descendants(process)
    kernel = next(p for p in family if "ipykernel_launcher" in " ".join(p.cmdline()))
    kernel.send_signal(signal.SIGKILL)
    assert process.wait(60) == 1 and await_end(family, 5) == []
    assert state(lab.runs / "r") == {"prepare": "died"} and "Died in prepare" in (lab.runs / "r" / "report.html").read_text()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(folder)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.parametrize("stage", ["prepare", "train"])
def test_a_full_disk_is_told_in_every_file(tmp_path: Path, small_disk: Path, stage: str) -> None:
    lab = Lab(tmp_path / "lab", {stage: "with stage.path('dump').open('wb') as file:\n    while True:\n        file.write(b'x' * 100_000)"})
    lab.runs = small_disk / "runs"
    result = lab.run(run_id="r")
    assert (result.exit_code, state(result.dir)[stage]) == (1, "failed"), lab.text
    record = runs.read_record(result.dir, stage)
    assert record["status"] == "failed" and "No space left on device" in record["error"], record
    assert f"Failed in {stage}" in (result.dir / "report.html").read_text() and "No space left on device" in lab.text
    (result.dir / "dump").unlink()
    workbook(lab.notebooks)
    assert lab.run(run_id="r").exit_code == 0


def test_a_disk_without_room_for_a_run_is_refused_at_once(tmp_path: Path, small_disk: Path) -> None:
    lab = Lab(tmp_path / "lab")
    lab.runs = small_disk / "runs"
    (small_disk / "other").write_bytes(b"x" * 13_000_000)
    result = None
    with pytest.raises(Exception, match="no room for a run: No space left on device"):
        result = lab.run(run_id="r")
    assert result is None


@pytest.mark.parametrize("stage", ["extract", "evaluate"])
def test_sigterm_in_a_later_stage(tmp_path: Path, stage: str) -> None:
    lab = Lab(tmp_path, {stage: SERVER + FOREVER})
    process = start(lab)
    family = descendants(process)
    process.terminate()
    assert process.wait(60) == 130 and await_end(family, 5) == []
    n = STAGES.index(stage)
    assert state(lab.runs / "r") == {**dict.fromkeys(STAGES[:n], "ok"), stage: "interrupted"} and gone(lab.runs / "r")


def test_thirty_papermill_runs_at_once_are_all_good(tmp_path: Path) -> None:
    book, many = workbook(tmp_path / "nb") / "01_prepare.ipynb", 30
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(book.parent), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "papermill", "--no-progress-bar", "--log-level", "ERROR", "--start-timeout", "600", str(book)]
    together = []
    for n in range(many):
        out, words = tmp_path / f"{n}.ipynb", ["-p", "run_dir", str(tmp_path / f"run-{n}"), "-p", "rows", str(n + 1)]
        together.append(subprocess.Popen([*command, str(out), *words], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    said = [process.communicate(timeout=600)[1] for process in together]
    assert [p.returncode for p in together] == [0] * many, [s[-800:] for s in said if s]
    records = [runs.read_record(tmp_path / f"run-{n}", "prepare") for n in range(many)]
    assert [(r["status"], r["params"]["rows"]) for r in records] == [("ok", n + 1) for n in range(many)]


LOOP = """\
from eagle3lib.progress import tqdm
import time
for n in tqdm(range(10_000), desc="steps", mininterval=0.01):
    time.sleep(0.0002)
for n in range(10_000):
    print(f"loss of step {n}: {1 / (n + 1):.6f}, and some more words to make a line of it", flush=n % 50 == 0)"""


def test_a_loop_of_ten_thousand_steps_leaves_a_small_notebook(tmp_path: Path) -> None:
    lab = Lab(tmp_path, {"prepare": LOOP})
    began = time.monotonic()
    result = lab.run(run_id="r", stage_timeout_s=300)
    assert result.exit_code == 0, lab.text
    book = runs.read_json(result.dir / "01_prepare.ipynb")
    outputs = [o for cell in book["cells"] for o in cell.get("outputs", [])]
    assert len(outputs) <= 50, len(outputs)
    assert (result.dir / "01_prepare.ipynb").stat().st_size < 1_000_000
    text = "".join("".join(o.get("text", "")) for o in outputs)
    assert len(re.findall(r"\d+/10000", text)) <= 1 and "loss of step 9999" in text
    assert time.monotonic() - began < 120
