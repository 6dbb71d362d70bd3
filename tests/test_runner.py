"""The runner on real kernels: every way in which a stage can end, and nothing left running after any of them."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from workbooks import workbook

from eagle3lib import experiment, reuse, runner, runs
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.params import STAGES

# A server at its worst: its own session, its parent gone at once, its environment empty. Its ancestry is all there is.
SERVER = """\
import subprocess, sys
launch = "import subprocess as s, sys; n = s.DEVNULL; print(s.Popen(sys.argv[1:], stdin=n, stdout=n, stderr=n, start_new_session=True).pid)"
server = [sys.executable, "-c", "import time; time.sleep(300)"]
said = subprocess.run([sys.executable, "-c", launch, *server], env={}, capture_output=True, text=True).stdout
stage.path("server.pid").write_text(said)
"""
FOREVER = "import time\nprint('on', flush=True)\nwhile True:\n    time.sleep(0.1)"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """No run folder of the caller's, and a library that does not change while the tests run."""
    prepare_environment(monkeypatch)


def prepare_environment(patch: pytest.MonkeyPatch) -> None:
    patch.delenv(runs.ENV_RUN_DIR, raising=False)
    patch.setattr(reuse, "library_digest", lambda: "unchanged")


class Lab:
    """A workbook, a params file and a runs folder of its own."""

    def __init__(self, folder: Path, bodies: dict[str, str] | None = None):
        self.folder, self.log = folder, io.StringIO()
        self.notebooks, self.runs = workbook(folder / "notebooks", bodies), folder / "runs"
        self.params = folder / "small.yaml"
        self.params.write_text("# one small experiment\nlr: 1e-4\nrows: 5\n")

    def run(self, overrides: dict[str, Any] | None = None, **options: Any) -> runner.Result:
        where = {"notebooks": self.notebooks, "runs_dir": self.runs}
        return runner.run(self.params, overrides, out=self.log, **where, **options)

    def describe(self, overrides: dict[str, Any] | None = None, **options: Any) -> str:
        return experiment.describe(self.params, overrides, notebooks=self.notebooks, runs_dir=self.runs, **options)

    @property
    def text(self) -> str:
        return self.log.getvalue()


def state(folder: Path) -> dict[str, str]:
    """Status of each stage by run.json."""
    return {name: entry["status"] for name, entry in runs.read_json(folder / "run.json")["stages"].items()}


def gone(folder: Path) -> bool:
    """Has the server ended that a notebook of this run started (see SERVER)?"""
    try:
        return psutil.Process(int((folder / "server.pid").read_text())).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A complete good run, with a progress bar, a planted secret and a server that nobody stopped."""
    bar = "import os, sys, tqdm\nfor _ in tqdm.tqdm(range(9), file=sys.stdout, mininterval=0): pass\nprint(os.environ['PLANTED_TOKEN'])"
    lab = Lab(tmp_path_factory.mktemp("good"), {"prepare": bar, "extract": SERVER})
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLANTED_TOKEN", "planted-secret-value")
        prepare_environment(patch)
        result = lab.run({"seed": 3})
    assert (result.exit_code, result.status) == (0, "ok"), lab.text
    return lab


def copy_of(finished: Lab, folder: Path) -> Lab:
    """The good run in another place, for a test that changes it."""
    shutil.copytree(finished.folder, folder / "lab", symlinks=True)
    lab = Lab.__new__(Lab)
    lab.folder, lab.log = folder / "lab", io.StringIO()
    lab.notebooks, lab.runs, lab.params = lab.folder / "notebooks", lab.folder / "runs", lab.folder / "small.yaml"
    return lab


# ---- a good run ----


def test_a_good_run_leaves_everything_in_place(finished: Lab) -> None:
    latest = finished.runs / "latest"
    assert latest.is_symlink() and latest.resolve().name.endswith("-small")
    names = {p.name for p in latest.iterdir()}
    assert {"run.json", "params.yaml", "metrics.json", "report.html", *(f"{n:02d}_{s}.ipynb" for n, s in enumerate(STAGES, 1))} <= names
    assert state(latest) == dict.fromkeys(STAGES, "ok")
    metrics = runs.read_metrics(latest)
    assert metrics["prepare.length"] == 1 and metrics["run.seconds"] > 1
    assert (finished.runs / "index.html").exists()


def test_each_notebook_got_its_own_parameters_only(finished: Lab) -> None:
    book = runs.read_json(finished.runs / "latest" / "04_train.ipynb")
    assert set(book["metadata"]["papermill"]["parameters"]) == {"lr", "seed", "run_dir"}
    assert runs.read_record(finished.runs / "latest", "train")["params"]["lr"] == 1e-4
    about = runs.read_json(finished.runs / "latest" / "run.json")["params"]
    assert (about["lr"]["origin"], about["seed"]["origin"], about["show"]["origin"]) == ("file", "override", "default")


def test_params_yaml_repeats_the_run(finished: Lab) -> None:
    text = (finished.runs / "latest" / "params.yaml").read_text()
    assert "lr: 0.0001\n" in text and "seed: 3  # override\n" in text


def test_progress_is_one_clean_line_in_notebook_and_log(finished: Lab) -> None:
    assert finished.text.count("9/9") == 1 and "\r" not in finished.text and "\x1b" not in finished.text
    book = (finished.runs / "latest" / "01_prepare.ipynb").read_text()
    assert book.count("9/9") == 1 and "\\r" not in book


def test_a_planted_secret_lands_nowhere(finished: Lab) -> None:
    everything = [p for p in finished.runs.rglob("*") if p.is_file()]
    assert len(everything) > 10
    assert not [p for p in everything if b"planted-secret-value" in p.read_bytes()]
    assert "planted-secret-value" not in finished.text and "[hidden PLANTED_TOKEN]" in finished.text


def test_a_server_that_a_notebook_forgot_is_ended(finished: Lab) -> None:
    folder = finished.runs / "latest"
    assert gone(folder)
    assert f"({(folder / 'server.pid').read_text().strip()})" in finished.text and "ended what the notebook left running" in finished.text


# ---- parameters fail before a kernel starts ----


@pytest.mark.parametrize(
    ("overrides", "says"),
    [({"rowz": 3}, "nearest: rows"), ({"rows": "3"}, "wanted int"), ({"run_dir": "/x"}, "--run-id")],
)
def test_bad_parameters_leave_no_trace(tmp_path: Path, overrides: dict[str, Any], says: str) -> None:
    lab = Lab(tmp_path)
    began = time.monotonic()
    with pytest.raises(ParamError, match=says):
        lab.run(overrides)
    assert time.monotonic() - began < 0.5 and not lab.runs.exists()


def test_run_ids_are_names_and_never_paths(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for bad in ("../x", "a/b", "", "latest", "lab", ".hidden", "x" * 81):
        if bad:
            with pytest.raises(ParamError, match="run id"):
                lab.run(run_id=bad)
    with pytest.raises(ParamError, match="no earlier run"):
        lab.run(start="train")
    assert [runner.new_run(lab.runs, "a b", "").name[13:] for _ in range(2)] == ["-a-b", "-a-b-2"]


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


def test_an_old_ok_record_is_not_taken_for_a_new_one(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    path = lab.notebooks / "05_evaluate.ipynb"
    book = json.loads(path.read_text())
    book["cells"] = book["cells"][:2]  # runs to its end without a word, beside the record of a good execution
    path.write_text(json.dumps(book))
    result = lab.run({"seed": 3}, run_id=(lab.runs / "latest").resolve().name)
    assert (result.exit_code, state(result.dir)["evaluate"]) == (1, "failed"), lab.text
    assert runs.read_record(result.dir, "evaluate")["status"] == "failed"


def test_a_stage_that_never_finishes_runs_into_its_limit(tmp_path: Path) -> None:
    tidy = SERVER + "try:\n    import time\n    time.sleep(300)\nfinally:\n    stage.path('tidied').touch()"
    lab = Lab(tmp_path, {"prepare": tidy})
    result = lab.run(run_id="r", stage_timeout_s=8)
    assert (result.exit_code, state(result.dir)) == (1, {"prepare": "failed"})
    assert "ran out of time" in lab.text and (result.dir / "tidied").exists()
    assert gone(result.dir)


def test_runs_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for stage in STAGES[1:]:
        next(lab.notebooks.glob(f"*_{stage}.ipynb")).unlink()
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(lab.notebooks), runs.ENV_RUNS: str(lab.runs)}
    command = [sys.executable, "-m", "eagle3lib", "run", str(lab.params), "--stage-timeout", "60"]
    lab.params.write_text("rows: 5\n")
    together = [subprocess.Popen(command, env=env, cwd=tmp_path, stdout=subprocess.PIPE, text=True) for _ in range(5)]
    said = [process.communicate()[0] for process in together]
    assert [process.returncode for process in together] == [0] * 5, said
    assert len({(text.split()[1]) for text in said}) == 5  # five run ids
    assert [p.suffix for p in lab.notebooks.iterdir()] == [".ipynb"]


# ---- signals ----

COMMAND = """
import sys
from pathlib import Path
from eagle3lib import runner
runner.GRACE_S = {grace}
lab = Path(sys.argv[1])
sys.exit(runner.run(lab / "small.yaml", notebooks=lab / "notebooks", runs_dir=lab / "runs", run_id="r").exit_code)
"""


def start(lab: Lab, grace: float = 20.0) -> subprocess.Popen[str]:
    """The runner as a process of its own, at the moment when the first notebook's body says `on`."""
    process = subprocess.Popen(
        [sys.executable, "-c", COMMAND.format(grace=grace), str(lab.folder)], stdout=subprocess.PIPE, text=True, cwd=runs.repo_root()
    )
    assert process.stdout
    for line in process.stdout:
        if line.strip() == "on":
            return process
    raise AssertionError("the notebook did not come up")


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def await_end(processes: list[psutil.Process], seconds: float = 10) -> list[psutil.Process]:
    """Those that are still there after some seconds."""
    return psutil.wait_procs(processes, timeout=seconds)[1]


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


# ---- skipping, continuing, dry run ----


def test_nothing_runs_twice_and_only_what_changed_runs_again(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    name = (lab.runs / "latest").resolve().name
    before = runs.read_metrics(lab.runs / name)
    assert lab.run({"seed": 3}, run_id=name).exit_code == 0
    assert lab.text.count("skipped, nothing changed") == 5
    assert runs.read_metrics(lab.runs / name) == before
    assert lab.run({"seed": 3, "draft_steps": 3}, run_id=name).exit_code == 0
    assert lab.text.count("skipped, nothing changed") == 9 and "[5/5] evaluate: its parameters changed" in lab.text
    assert "'draft_steps': 3" in (lab.runs / name / "evaluate.txt").read_text()


def change_code(lab: Lab, folder: Path) -> None:
    path = lab.notebooks / "03_verify.ipynb"
    path.write_text(path.read_text().replace("stage.finish(", "stage.finish(more=1, "))


def change_text(lab: Lab, folder: Path) -> None:
    path = lab.notebooks / "03_verify.ipynb"
    path.write_text(path.read_text().replace("A stage of the test workbook.", "Other words."))


def lose_output(lab: Lab, folder: Path) -> None:
    (folder / "extract.txt").unlink()


def edit_output(lab: Lab, folder: Path) -> None:
    (folder / "train.txt").write_text("other")


@pytest.mark.parametrize(
    ("change", "first", "why"),
    [
        (change_code, "verify", "its notebook changed"),
        (change_text, "", ""),
        (lose_output, "extract", "extract.txt is gone"),
        (edit_output, "train", "train.txt changed"),
    ],
)
def test_what_makes_a_stage_run_again(finished: Lab, tmp_path: Path, change: Callable[[Lab, Path], None], first: str, why: str) -> None:
    lab = copy_of(finished, tmp_path)
    folder = (lab.runs / "latest").resolve()
    change(lab, folder)
    plan = lab.describe({"seed": 3}, run_id=folder.name)
    skipped = STAGES[: STAGES.index(first)] if first else STAGES
    assert plan.count("skip (unchanged)") == len(skipped)
    assert not first or f"{first:<10}run ({why})" in plan


def test_an_input_file_that_changed_counts(tmp_path: Path) -> None:
    data, book = tmp_path / "data.jsonl", workbook(tmp_path / "nb")
    data.write_text("one")
    for value in (str(data), [f"{data}@3"], [str(tmp_path / "*.jsonl")], str(tmp_path)):
        key = reuse.stage_key(book, "prepare", {"prompts": value}, None)
        assert reuse.stage_key(book, "prepare", {"prompts": value}, None) == key
        data.write_text(data.read_text() + "more")
        changed = reuse.stage_key(book, "prepare", {"prompts": value}, None)
        assert [part for part in key if key[part] != changed[part]] == ["inputs"]


def test_from_and_only_take_earlier_stages_as_they_are(finished: Lab, tmp_path: Path) -> None:
    lab = copy_of(finished, tmp_path)
    assert lab.run({"seed": 3}, only="verify", force=True).exit_code == 0
    assert "[1/1] verify: forced" in lab.text
    folder = lab.runs / "latest"
    assert [runs.read_record(folder, s)["status"] for s in STAGES] == ["ok", "ok", "ok", "stale", "stale"]
    assert set(runs.read_metrics(folder)) == {"prepare.length", "extract.length", "verify.length", "run.seconds"}
    with pytest.raises(Eagle3Error, match="stage train is stale"):
        lab.run({"seed": 3}, only="evaluate")
    with pytest.raises(Eagle3Error, match="prepare in .* does not fit: its parameters changed"):
        lab.run({"seed": 4}, start="verify")
    assert lab.run({"seed": 3}, start="train").exit_code == 0
    assert [runs.read_record(folder, s)["status"] for s in STAGES] == ["ok"] * 5


def test_dry_run_writes_nothing_and_tells_origins(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    text = lab.describe({"seed": 3})
    assert "prepare   run (new run)" in text and not lab.runs.exists()
    origins = {line.split()[0]: line.split()[-1] for line in text.splitlines() if line.startswith("  ")}
    assert (origins["lr"], origins["seed"], origins["show"]) == ("file", "override", "default")
    assert "disk free" in text and "memory available" in text


# ---- without the runner, and the command line ----


def test_plain_papermill_works_with_the_same_checks(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    base = [sys.executable, "-m", "papermill", str(lab.notebooks / "01_prepare.ipynb"), str(tmp_path / "out.ipynb"), "--log-level", "ERROR"]
    env = {**os.environ, runs.ENV_NOTEBOOKS: str(lab.notebooks)}
    where = ["-p", "run_dir", str(tmp_path / "run")]
    good = subprocess.run([*base, *where, "-p", "rows", "7", "-p", "lr", "1.0e-4"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert runs.read_record(tmp_path / "run", "prepare")["params"]["rows"] == 7
    bad = subprocess.run([*base, *where, "-p", "rowz", "7"], env=env, cwd=tmp_path, capture_output=True, text=True)
    assert bad.returncode != 0 and "unknown parameter rowz; nearest: rows" in bad.stderr


def command(*args: str, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "eagle3lib", *args], capture_output=True, text=True, cwd=runs.repo_root(), **more)


def test_the_command_line_says_errors_in_one_line_and_by_exit_code(tmp_path: Path) -> None:
    gone = command("run", str(tmp_path / "gone.yaml"))
    assert gone.returncode == 2 and gone.stderr.startswith("error: ") and "Traceback" not in gone.stderr
    assert command("report", "no-such-run").returncode == 1
    assert command("frobnicate").returncode == 2
    assert "Traceback" in command("--debug", "run", str(tmp_path / "gone.yaml")).stderr
