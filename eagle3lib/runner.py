"""The runner: executes the stages' notebooks into one run folder and keeps a true account of how it went.

A stage is done when its own record says so, written by this very execution; what papermill reports is not asked. The
runner waits for one process per stage (see execute.py), so that a dead kernel, a time-out, Ctrl-C and SIGTERM all end
in the same place: everything that the stage started is ended, its status is noted, and the report is written.
"""

from __future__ import annotations

import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

import psutil

from eagle3lib import params, redact, reuse, runs
from eagle3lib.console import GREEN, RED, Console, duration
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.experiment import Experiment, Order, Plan, link_latest, new_run, read_run, write_params
from eagle3lib.procs import Family

GRACE_S = 20.0  # for a notebook to clean up after an interrupt
RESERVE_BYTES = 6_000_000  # a report and the records
EXIT = {"ok": 0, "interrupted": 130}


@dataclass
class Result:
    exit_code: int  # 0 done, 1 a check or stage failed, 130 interrupted
    status: str  # "ok", "failed" or "interrupted"
    dir: Path


# ---- entry ----


def run(order: Order, *, stage_timeout_s: float | None = None, out: TextIO | None = None) -> Result:
    """Run the stages of one experiment. ParamError or Eagle3Error when it cannot even start."""
    require_limits(stage_timeout_s)
    with catch_signals() as signals:
        experiment, where, plan = order.checked()
        where = where or new_run(order.runs_dir, order.params.stem, order.run_id)
        return Run(where, experiment, Console(out or sys.stdout), signals, stage_timeout_s).go(plan)


def require_limits(stage_timeout_s: float | None, jobs: int = 1) -> None:
    """ParamError on a time limit or a number of jobs with which nothing could run."""
    if stage_timeout_s is not None and not 0 < stage_timeout_s < float("inf"):
        raise ParamError(f"--stage-timeout is {stage_timeout_s:g}; it must be a number of seconds above 0")
    if jobs < 1:
        raise ParamError(f"--jobs is {jobs}; it must be at least 1")


@contextmanager
def catch_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP in a list instead of dying; the third one is a KeyboardInterrupt after all."""
    received: list[int] = []

    def note(number: int, _frame: Any) -> None:
        received.append(number)
        if len(received) > 2:
            raise KeyboardInterrupt

    try:
        wanted = [s for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if signal.getsignal(s) != signal.SIG_IGN]
        before = {s: signal.signal(s, note) for s in wanted}
    except ValueError:  # not the main thread: signals are the caller's business
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def reserve(folder: Path) -> Iterator[None]:
    """Keep some of the disk while a stage runs, so that there is room to tell the truth after it has filled the rest."""
    kept = folder / runs.RESERVE
    try:
        kept.write_bytes(os.urandom(RESERVE_BYTES))  # random: a file system that compresses would keep no room for zeros
    except OSError as err:
        kept.unlink(missing_ok=True)
        raise Eagle3Error(f"{runs.show_path(folder)}: no room for a run: {err.strerror}; free some space or choose another place") from None
    try:
        yield
    finally:
        kept.unlink(missing_ok=True)


# ---- the run ----


class Run:
    """One execution of a plan in a run folder."""

    def __init__(self, where: Path, experiment: Experiment, console: Console, signals: list[int], stage_timeout_s: float | None):
        old = read_run(where)
        if old.get("status") == "running":
            raise Eagle3Error(f"{runs.show_path(where)} is in use by process {old['pid']}; wait for it or choose another --run-id")
        self.dir, self.experiment, self.console, self.signals = where, experiment, console, signals
        self.stage_timeout_s = stage_timeout_s
        self.record: dict[str, Any] = {
            "id": where.name,
            "status": "running",
            **runs.me(),
            "params_file": experiment.source.name,
            "started": _now(),
            "params": {name: asdict(s) for name, s in experiment.settings.items()},
            "versions": runs.versions(),
            "git": git_state(),
            "machine": machine(),
            "stages": old.get("stages", {}),
        }

    def go(self, plan: Plan) -> Result:
        """Run the planned stages, then write the report, whatever happened."""
        self._start(plan)
        status = "failed"
        try:
            status = self._stages(plan)
        except KeyboardInterrupt:
            status = "interrupted"
            raise
        finally:
            self._close(status)
        return Result(EXIT.get(status, 1), status, self.dir)

    def _start(self, plan: Plan) -> None:
        self._save()
        write_params(self.dir / "params.yaml", self.experiment)
        link_latest(self.dir)
        self.console.say(f"run {self.dir.name}: {self.experiment.source.name} -> {runs.show_path(self.dir)}")
        for warning in plan.warnings:
            self.console.say(f"warning: {warning}")

    def _stages(self, plan: Plan) -> str:
        for number, (stage, reason) in enumerate(plan.reasons.items(), 1):
            title = f"[{number}/{len(plan.reasons)}] {stage}"
            if not reason:
                self.console.say(f"{title}: skipped, nothing changed")
                self.record["stages"][stage]["skipped"] = True
                continue
            if self.signals:
                return "interrupted"
            self.console.say(f"{title}: {reason}" if reason != "new run" else title)
            entry = self._stage(stage, plan.keys[stage])
            self._tell(title, entry)
            if entry["status"] != "ok":
                return "interrupted" if entry["status"] == "interrupted" else "failed"
        return "ok"

    def _stage(self, stage: str, key: reuse.Key) -> dict[str, Any]:
        nonce, began = uuid.uuid4().hex, time.monotonic()
        entry = {"status": "running", "started": _now(), "nonce": nonce, "key": key, "skipped": False}
        self.record["stages"][stage] = entry
        self._save()
        notebook = self._path(stage)
        notebook.unlink(missing_ok=True)  # what stands there was written by an earlier execution
        with reserve(self.dir):
            end, family = self._execute(stage, nonce)
        hide_secrets(notebook)
        entry |= outcome(self.dir, stage, nonce, end, notebook)
        entry |= {"seconds": round(time.monotonic() - began, 2), "peak_memory": family.peak_memory}
        entry["bytes"] = sum(item[1] for item in runs.read_record(self.dir, stage).get("outputs", []))
        self._save()
        return entry

    def _execute(self, stage: str, nonce: str) -> tuple[str, Family]:
        """Run the stage's process to its end. "" , "interrupted" or "timeout", and the (ended) family."""
        job = {
            "input": str(params.notebook_path(self.experiment.folder, stage)),
            "output": str(self._path(stage)),
            "parameters": self._arguments(stage),
            "cwd": str(self.experiment.folder),
        }
        with tempfile.TemporaryDirectory(prefix="eagle3-", ignore_cleanup_errors=True) as private:
            job["private"] = private
            environment = self._environment(nonce)
            worker = subprocess.Popen(
                [sys.executable, "-m", "eagle3lib.execute"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                start_new_session=True,  # Ctrl-C comes to the runner alone, which then decides
            )
            with worker:
                family = Family(worker.pid, nonce)
                try:
                    end = self._attend(worker, family, json.dumps(job).encode())
                finally:
                    family.end()
        return end, family

    def _attend(self, worker: subprocess.Popen[bytes], family: Family, job: bytes) -> str:
        """Pass the worker's output on until it exits, is interrupted, or runs out of time."""
        assert worker.stdin and worker.stdout and worker.stderr
        with suppress(BrokenPipeError):  # it died at once; its output says why
            worker.stdin.write(job)
        with suppress(BrokenPipeError):
            worker.stdin.close()
        pipes = {worker.stdout.fileno(): 0, worker.stderr.fileno(): 1}
        limit = time.monotonic() + (self.stage_timeout_s or float("inf"))
        reason, give_up = "", float("inf")
        while worker.poll() is None and time.monotonic() < give_up and len(self.signals) < 2:
            self._pass_on(pipes, 0.25)
            family.look()
            if not reason and (self.signals or time.monotonic() > limit):
                reason = "interrupted" if self.signals else "timeout"
                self.console.say("    stopping: the notebook may clean up; press Ctrl-C again to end it at once")
                give_up = time.monotonic() + (GRACE_S if family.interrupt() else 0)
        for _ in range(100):  # kernels inherit the pipes, so their end is not waited for
            if not self._pass_on(pipes, 0):
                break
        self.console.flush()
        return reason

    def _pass_on(self, pipes: dict[int, int], wait_s: float) -> bool:
        """Pass on what is there, after waiting at most wait_s for something. pipes: file descriptor -> source."""
        ready = select.select(list(pipes), [], [], wait_s)[0]
        for pipe in ready:
            if data := os.read(pipe, 65536):
                self.console.stream(data, pipes[pipe])
            else:
                del pipes[pipe]
        return bool(ready)

    def _arguments(self, stage: str) -> dict[str, Any]:
        """What papermill injects: the changed parameters, and the run folder when the notebook knows that parameter."""
        where = {"run_dir": runs.show_path(self.dir)} if "run_dir" in self.experiment.notebooks[stage] else {}
        return {**self.experiment.changed(stage), **where}

    def _environment(self, nonce: str) -> dict[str, str]:
        ours = {runs.ENV_RUN_DIR: str(self.dir), runs.ENV_NONCE: nonce, runs.ENV_NOTEBOOKS: str(self.experiment.folder.resolve())}
        kept = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}  # figures belong into the notebook
        quiet = {"PYTHONWARNINGS": "ignore:IProgress not found"}  # progress is plain text here, not a widget
        return {**quiet, **kept, **ours}

    def _path(self, stage: str) -> Path:
        path = params.notebook_path(self.experiment.folder, stage)
        assert path is not None
        return self.dir / path.name

    def _tell(self, title: str, entry: Mapping[str, Any]) -> None:
        if entry["status"] == "ok":
            return self.console.say(f"{title}: ok in {duration(entry['seconds'])}", GREEN)
        self.console.say(f"{title}: {entry['status']} after {duration(entry['seconds'])}: {entry['error']}", RED)

    def _close(self, status: str) -> None:
        done = self.record["stages"].values()
        seconds = round(sum(entry.get("seconds", 0.0) for entry in done), 2)
        self.record |= {"status": status, "finished": _now(), "seconds": seconds}
        self._save()
        runs.merge_metrics(self.dir, "run", {"seconds": seconds})
        write_report(self.dir, self.console)
        self.console.say(f"{'done' if status == 'ok' else status} in {duration(seconds)}; results:")
        for name, path in results(self.dir):
            self.console.say(f"  {name:<12}{path}")

    def _save(self) -> None:
        runs.write_json(self.dir / "run.json", self.record)


def outcome(where: Path, stage: str, nonce: str, end: str, notebook: Path) -> dict[str, Any]:
    """How a stage ended, by its own record; the record is made true where the stage could not do so itself."""
    record = runs.read_record(where, stage)
    ours = record.get("nonce") == nonce
    status = record["status"] if ours else "failed"
    error = record.get("error", "") if ours else ""
    if status == "ok":
        return {"status": "ok"}
    if end == "interrupted":
        status, error = "interrupted", "stopped by Ctrl-C or a signal"
    elif end == "timeout":
        status, error = "failed", f"ran out of time; the notebook was at: {error or 'an unknown cell'}"
    elif status == "died":
        error = "its kernel died without a Python error; the usual cause is memory (see the system's log), else a crash in native code"
    error = error or notebook_error(notebook) or "it wrote no result: its notebook has to call begin() first and finish() last"
    entry = {"status": status, "error": error}
    base = record if ours else {"stage": stage, "nonce": nonce}
    runs.write_json(runs.record_path(where, stage), {**base, **entry})
    return entry


def notebook_error(path: Path) -> str:
    """The first error that stands in an executed notebook, on one line; "" if there is none."""
    try:
        cells = runs.read_json(path)["cells"]
    except Eagle3Error:
        return ""
    for cell in cells:
        for output in cell.get("outputs", []):
            if output["output_type"] == "error":
                first = (output["evalue"].splitlines() or [""])[0]
                ours = output["ename"] in ("Eagle3Error", "ParamError", "CheckFailed")
                return first if ours else f"{output['ename']}: {first}"
    return ""


def hide_secrets(notebook: Path) -> None:
    """Rewrite an executed notebook without secrets and without absolute paths in its metadata."""
    if not notebook.exists():
        return
    try:
        content = runs.read_json(notebook)
        about = content["metadata"].get("papermill", {})
        about |= {k: Path(about[k]).name for k in ("input_path", "output_path") if about.get(k)}
        runs.write_text(notebook, json.dumps(redact.hide(content), indent=1, ensure_ascii=False) + "\n")
    except Eagle3Error:  # cut off in the middle of a write: better gone than with a secret in it
        notebook.unlink()


def write_report(where: Path, console: Console) -> None:
    """Render report.html and the index; a failure to do so is told but changes nothing else."""
    try:
        from eagle3lib import report

        report.write(where)
        report.write_index(where.parent)
    except Exception as err:
        console.say(f"warning: the report could not be written: {runs.one_line(err)}")


def results(where: Path) -> list[tuple[str, str]]:
    """What a run left, and where."""
    names = {"report": "report.html", "metrics": "metrics.json", "notebooks": "", "engine log": "engine.log", "draft": "draft"}
    return [(label, runs.show_path(where / name)) for label, name in names.items() if (where / name).exists()]


def git_state() -> dict[str, Any]:
    """Commit of the repository and whether files differ from it; empty outside of git."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", *args], cwd=runs.repo_root(), capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        return {"commit": git("rev-parse", "HEAD"), "changed": bool(git("status", "--porcelain"))}
    except (OSError, subprocess.SubprocessError):
        return {}


def machine() -> dict[str, Any]:
    """What the run had to work with; nothing that names the machine."""
    return {"system": platform.system(), "cpus": os.cpu_count(), "memory": psutil.virtual_memory().total}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
