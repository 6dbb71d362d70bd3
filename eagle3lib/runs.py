"""Run folders: what each stage was told, what it proved, and whether it is done.

A run folder holds `stages/<stage>.json` (the stage's own word on how it went), `metrics.json` (flat
`"<stage>.<name>"` keys) and whatever the stages write. A notebook calls `stage = begin("prepare", globals())` first
and `stage.finish(rows=...)` last; the record says "running" in between, and nothing but `finish` can make it "ok".
"""

from __future__ import annotations

import ast
import importlib.metadata
import json
import math
import os
import platform
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from eagle3lib import params, redact
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.params import STAGES

ENV_RUN_DIR = "EAGLE3_RUN_DIR"  # the run folder, when no parameter names one
ENV_NONCE = "EAGLE3_STAGE_NONCE"  # set by the runner: proves that a record was written by this execution
ENV_RUNS = "EAGLE3_RUNS"  # the folder of all runs, for example on a larger disk
ENV_NOTEBOOKS = "EAGLE3_NOTEBOOKS"  # the folder of the notebooks, when it is not the repository's
DISTRIBUTIONS = ("eagle3lib", "torch", "transformers", "sglang", "datasets", "safetensors", "numpy", "papermill")
RESERVE = ".reserve"  # room that the runner keeps while a stage runs
SPARED = {RESERVE, "run.json", "engine.json", "params.yaml", "point.yaml", "metrics.json", "report.html"}  # files of a run that are no stage's output


# ---- paths and files ----


def repo_root() -> Path:
    """The folder that holds `eagle3lib/` and `notebooks/`."""
    return Path(__file__).resolve().parents[1]


def notebooks_dir() -> Path:
    return Path(os.environ.get(ENV_NOTEBOOKS) or repo_root() / "notebooks")


def runs_dir() -> Path:
    return Path(os.environ.get(ENV_RUNS) or repo_root() / "runs")


def run_folder(run_dir: str = "") -> Path:
    """run_dir, else $EAGLE3_RUN_DIR, else runs/lab. A relative path is taken from the repository, not the caller's folder."""
    named = run_dir or os.environ.get(ENV_RUN_DIR) or runs_dir() / "lab"
    return (repo_root() / Path(named).expanduser()).resolve()


def write_json(path: Path, obj: Any) -> None:
    """Write obj atomically as JSON, secrets of the environment hidden. A reader sees the old file or the new one."""
    text = json.dumps(redact.hide(obj), indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write a file atomically. Eagle3Error when the disk refuses."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            try:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, path)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as err:
        raise Eagle3Error(f"{path}: cannot be written: {err.strerror}; free some space or choose another run folder") from None


def read_json(path: Path) -> Any:
    """The file's content; Eagle3Error when it is missing or no JSON."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Eagle3Error(f"{path}: no such file") from None
    except (OSError, ValueError) as err:
        raise Eagle3Error(f"{path}: cannot be read as JSON: {err}") from None


def plain(value: Any, name: str) -> Any:
    """value as plain JSON: numpy and torch scalars become numbers, NaN and anything that JSON cannot say is refused."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        raise Eagle3Error(f"{name} is {value}; a result must be a finite number: find out where it came from")
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{name}.{k}") for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    raise Eagle3Error(f"{name}: a {type(value).__name__} cannot be written to JSON; give numbers, text, lists or dictionaries")


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a result; a package that is not installed is left out."""
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


# ---- stage records ----


def record_path(run: Path, stage: str) -> Path:
    return Path(run) / "stages" / f"{stage}.json"


def read_record(run: Path, stage: str) -> dict[str, Any]:
    """The stage's record with its *true* status: "running" becomes "died" when its process is gone. {} if there is none."""
    path = record_path(run, stage)
    if not path.exists():
        return {}
    record = read_json(path)
    if record.get("status") == "running" and not alive(record):
        record["status"] = "died"
    return record


def me() -> dict[str, Any]:
    """This process, told apart from a later one with the same number."""
    return {"pid": os.getpid(), "process_started": psutil.Process().create_time()}


def alive(record: Mapping[str, Any]) -> bool:
    """Is the process that wrote this record (see `me`) still there?"""
    try:
        process = psutil.Process(record["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - record["process_started"]) < 1
    except (KeyError, psutil.Error):
        return False


def read_metrics(run: Path) -> dict[str, Any]:
    path = Path(run) / "metrics.json"
    return read_json(path) if path.exists() else {}


def merge_metrics(run: Path, prefix: str, new: Mapping[str, Any]) -> None:
    """Replace all metrics named `<prefix>.*` by new."""
    kept = {k: v for k, v in read_metrics(run).items() if not k.startswith(f"{prefix}.")}
    write_json(Path(run) / "metrics.json", {**kept, **{f"{prefix}.{k}": v for k, v in new.items()}})


def discard(run: Path, stage: str) -> None:
    """Forget the stage's record and metrics, and mark every later stage stale: it was computed from what is about to change."""
    later = STAGES[STAGES.index(stage) + 1 :]
    for name in (stage, *later):
        record = read_record(run, name)
        if record.get("adopted_from"):  # its files are shared with another run and must not be written to
            for output in record["outputs"]:
                (Path(run) / output[0]).unlink(missing_ok=True)
        if name == stage or record.get("adopted_from"):
            record_path(run, name).unlink(missing_ok=True)
        elif record:
            write_json(record_path(run, name), {**record, "status": "stale", "stale_because": stage})
    gone = (stage, "run", *later)
    metrics = read_metrics(run)
    kept = {k: v for k, v in metrics.items() if k.split(".")[0] not in gone}
    if kept != metrics:
        write_json(Path(run) / "metrics.json", kept)


# ---- what a notebook calls ----


class Stage:
    """One stage under way: its run folder, its parameters, its checks."""

    def __init__(self, name: str, run: Path, values: dict[str, Any]):
        self.name, self.dir, self.params, self.checks = name, run, values, Checks()
        self._clock = time.monotonic()
        self._record: dict[str, Any] = {
            "stage": name,
            "status": "running",
            **me(),
            "nonce": os.environ.get(ENV_NONCE, ""),
            "token": uuid.uuid4().hex,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "params": values,
            "versions": versions(),
        }
        self._write()

    @property
    def status(self) -> str:
        return self._record["status"]

    @property
    def seconds(self) -> float:
        """Seconds since begin."""
        return round(time.monotonic() - self._clock, 3)

    def path(self, name: str) -> Path:
        """The path of a file or folder of this run. Eagle3Error when the name leads out of the run folder."""
        path = (self.dir / name).resolve()
        if not path.is_relative_to(self.dir):
            raise Eagle3Error(f"{name!r} leads out of the run folder; give a relative name")
        return path

    def finish(self, **metrics: Any) -> None:
        """Write the metrics and the record. CheckFailed when a check failed, after both are written.

        metrics: numbers, text, lists or dictionaries; numpy and torch scalars are converted, NaN is refused.
        """
        self._refuse_when_over()
        try:
            merge_metrics(self.dir, self.name, {k: plain(v, f"{self.name}.{k}") for k, v in metrics.items()})
            self._record["checks"] = plain(self.checks.records, "checks")
            self.checks.raise_failed()
            self._end("ok")
        except Exception as err:
            self.fail(err)
            raise
        print(f"{self.name}: ok, {len(self.checks)} of {len(self.checks)} checks passed, {self.seconds:.1f} s")

    def _refuse_when_over(self) -> None:
        """In batch a stage ends once. In JupyterLab a cell that failed may be mended and run again, and so may finish()."""
        if self._record["nonce"] and self.status != "running":
            raise Eagle3Error(f"stage {self.name} is already {self.status}: {self._record.get('error', 'finish() was called before')}")
        there = read_record(self.dir, self.name)
        if there.get("token") != self._record["token"] or there["status"] == "stale":
            raise Eagle3Error(f"stage {self.name} was begun again elsewhere, or one before it ran again; run its notebook from the top")

    def fail(self, err: BaseException) -> None:
        """Note how the stage ended without a result; the error's first line is kept."""
        self._end("interrupted" if isinstance(err, KeyboardInterrupt) else "failed", error=one_line(err))

    def _end(self, status: str, **more: Any) -> None:
        self._record |= {"status": status, "seconds": self.seconds, "outputs": self._outputs(), "error": "", **more}
        try:
            self._write()
        except Eagle3Error:  # the disk is full: the runner keeps some room for these words and for the notebook
            (self.dir / RESERVE).unlink(missing_ok=True)
            self._write()

    def _write(self) -> None:
        write_json(record_path(self.dir, self.name), self._record)

    def _outputs(self) -> list[list[Any]]:
        """[relative path, bytes, modified ns] of every file in the run folder that is this stage's: no other one claims it."""
        others = [read_record(self.dir, name) for name in STAGES if name != self.name]
        claimed = {item[0] for record in others for item in record.get("outputs", [])}
        found = []
        for path in sorted(self.dir.rglob("*")):
            name = str(path.relative_to(self.dir))
            if name in claimed | SPARED or name.startswith("stages/") or path.suffix in (".ipynb", ".log") or not path.is_file():
                continue
            stat = path.stat()
            found.append([name, stat.st_size, stat.st_mtime_ns])
        return found


def begin(stage: str, namespace: Mapping[str, Any]) -> Stage:
    """Start a stage from its notebook: `stage = begin("prepare", globals())`.

    Checks the parameters against the notebook's own annotations, finds the run folder, forgets this stage's earlier
    result. ParamError on a wrong parameter; Eagle3Error when the stage before is not done in that run folder.
    """
    global _current
    _current = None
    if stage not in STAGES:
        raise Eagle3Error(f"unknown stage {stage!r}; the stages are {', '.join(STAGES)}")
    if code := namespace.get("_exit_code"):
        raise Eagle3Error(f"a shell line in this notebook ended with exit code {code}; repair it or take it out")
    values = read_namespace(stage, namespace)
    redact.remember(values)
    run = run_folder(values.get("run_dir", ""))
    _refuse_when_busy(run)
    discard(run, stage)
    _refuse_without_input(run, stage)
    _current = Stage(stage, run, values)
    _watch_cells()
    return _current


def read_namespace(stage: str, namespace: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters in a notebook's namespace, typed as its parameters cell declares. ParamError on anything else."""
    annotations = {name: t if isinstance(t, str) else _spell(t) for name, t in namespace.get("__annotations__", {}).items()}
    declared = {name: t for name, t in annotations.items() if t in params.TYPES and name in namespace}
    for name in _injected(namespace):
        if name not in declared and name not in _known_names():
            raise params.unknown(name, {*declared, *_known_names()})
    return {name: params.typed(name, t, namespace[name], f"parameter of the {stage} notebook") for name, t in declared.items()}


def _spell(annotation: Any) -> str:
    return annotation.__name__ if type(annotation) is type else str(annotation)


def _known_names() -> set[str]:
    """Names that any stage's notebook declares: a params file may hold them all."""
    try:
        return {name for declared in params.read_notebooks(notebooks_dir()).values() for name in declared}
    except ParamError:
        return set()


def _injected(namespace: Mapping[str, Any]) -> list[str]:
    """Names assigned by papermill's injected cell, which starts with the comment `# Parameters`.

    Scratch variables of someone who works in JupyterLab are none of our business, so only that cell is read.
    """
    cells = [source for source in namespace.get("In", []) if source.startswith("# Parameters\n")]
    statements = [s for source in cells for s in ast.parse(source).body if isinstance(s, ast.Assign)]
    return [target.id for s in statements for target in s.targets if isinstance(target, ast.Name)]


def _refuse_when_busy(run: Path) -> None:
    for stage in STAGES:
        record = read_record(run, stage)
        if record.get("status") == "running" and record["pid"] != os.getpid():
            raise Eagle3Error(
                f"{show_path(run)} is in use: {stage} is running in process {record['pid']}; "
                "wait for it, shut that kernel down, or set run_dir"
            )


def _refuse_without_input(run: Path, stage: str) -> None:
    if stage == STAGES[0]:
        return
    before = STAGES[STAGES.index(stage) - 1]
    record = read_record(run, before)
    status = record.get("status", "missing")
    if status != "ok":
        number = STAGES.index(before) + 1
        why = f" ({record['error']})" if record.get("error") else ""
        what = f"{stage} needs {before}, which is {status} in {show_path(run)}{why}"
        raise Eagle3Error(f"{what}; run notebooks/{number:02d}_{before}.ipynb first")


def show_path(path: Path) -> str:
    """The path as a reader wants it: relative to the repository where it can be."""
    path = Path(path)
    return str(path.relative_to(repo_root())) if path.is_relative_to(repo_root()) else str(path)


def one_line(err: BaseException) -> str:
    """`Name: first line of the message`; our own errors speak for themselves."""
    first = (str(err).splitlines() or [""])[0][:500]
    return first if isinstance(err, Eagle3Error) else f"{type(err).__name__}: {first}".rstrip(": ")


# ---- IPython: a cell that fails between begin and finish has failed the stage ----

_current: Stage | None = None


def _watch_cells() -> None:
    """Hear of failing cells, and make a failing shell line (`!cmd`) fail its cell, which IPython does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None or getattr(shell, "_eagle3_watched", False):
        return
    shell._eagle3_watched = True
    shell.events.register("post_run_cell", _cell_ran)
    run_line = shell.system

    def system(command: str) -> None:
        run_line(command)
        if code := shell.user_ns.get("_exit_code"):
            raise Eagle3Error(f"shell line `{command}` ended with exit code {code}")

    shell.system = system


def _cell_ran(result: Any) -> None:
    err = result.error_before_exec or result.error_in_exec
    if err is None or _current is None:
        return
    # In batch a failing cell after finish() is a failure too; in JupyterLab it may be anybody's scratch cell.
    if _current.status == "running" or (_current.status == "ok" and _current._record["nonce"]):
        _current.fail(err)
