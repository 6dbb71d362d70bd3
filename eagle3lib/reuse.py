"""Reuse: a stage is skipped when everything that decides its result is unchanged and its files are still there.

A stage's key has these parts: the code cells of its notebook, its parameters, the library's code, the content of files
that its parameters name, package versions, and the key of the stage before.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lib import places, runs
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.params import STAGES, notebook_path

WORKBENCH = {
    "__main__",
    "cli",
    "compare",
    "console",
    "execute",
    "experiment",
    "forecast",
    "folded",
    "harmless",
    "openrun",
    "overlays",
    "procs",
    "redact",
    "report",
    "report_style",
    "reuse",
    "runner",
    "sweep",
}
WHOLE = 64 * 2**20  # bytes; a larger input file is known by its size and time, not by its content

Key = dict[str, str]
REASONS = {
    "notebook": "its notebook changed",
    "params": "its parameters changed",
    "library": "the library's code changed",
    "inputs": "a file that its parameters name changed",
    "versions": "package versions changed",
    "before": "the stage before changed",
}


def stage_key(notebooks: Path, stage: str, values: Mapping[str, Any], before: Key | None) -> Key:
    """The key of a stage that runs with these parameter values after a stage with key `before`."""
    path = notebook_path(notebooks, stage)
    assert path is not None
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return {
        "notebook": _digest(["".join(c["source"]) for c in cells if c["cell_type"] == "code"]),
        "params": _digest(dict(values)),
        "library": library_digest(),
        "inputs": _digest({k: _content(v, notebooks) for k, v in values.items() if k != "run_dir"}),
        "versions": _digest(runs.versions()),
        "before": _digest(before),
    }


def library_digest() -> str:
    """Over every source file of the library that can change a stage's result."""
    root = Path(__file__).parent
    files = [p for p in sorted(root.rglob("*.py")) if p.parent != root or p.stem not in WORKBENCH]
    return _digest({str(p.relative_to(root)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files})


def _digest(obj: Any) -> str:
    return hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()[:32]


def _content(value: Any, kernel_folder: Path) -> Any:
    """What a text parameter (or each text of a list) stands for on disk: files, a folder, a glob; `@N` or `@N%` behind is cut off.
    Both places count where a stage may look for a relative name (see places.py), so it does not matter which one it takes."""
    if isinstance(value, list):
        return [_content(item, kernel_folder) for item in value]
    if not isinstance(value, str) or not value:
        return None
    bases = (Path(kernel_folder).resolve(), runs.repo_root())
    try:
        found = _found(value, bases) or _found(re.sub(r"@(\d+|[^@]*%)$", "", value), bases)
        return {str(path): _below(path) for path in found}
    except (OSError, ParamError):  # a name that can be no path, or a folder that may not be read
        return None


def _found(name: str, bases: tuple[Path, ...]) -> list[Path]:
    return [path for base in bases for path in places.in_folder(base, name)]


def _below(path: Path) -> Any:
    if path.is_dir():
        return {str(p.relative_to(path)): _file(p) for p in sorted(path.rglob("*")) if p.is_file()}
    return _file(path)


def _file(path: Path) -> list[Any]:
    stat = path.stat()
    if stat.st_size > WHOLE:
        return [stat.st_size, stat.st_mtime_ns]
    return [stat.st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def why_run(run: Path, stage: str, key: Key, noted: Mapping[str, Any]) -> str:
    """Why the stage cannot be skipped in this run folder; "" when it can. noted: the stage's entry in run.json."""
    record = runs.read_record(run, stage)
    status = record.get("status", "not run yet")
    if status != "ok":
        return f"stage {record['stale_because']} ran again" if status == "stale" else status
    if record.get("nonce") != noted.get("nonce") or not noted.get("key"):
        return "it was last run by hand"
    if changed := [REASONS[part] for part in key if key[part] != noted["key"].get(part)]:
        return ", ".join(changed)
    return missing_output(run, record)


def missing_output(run: Path, record: Mapping[str, Any]) -> str:
    """The first file that the stage wrote and that is gone or changed since; "" when all are as they were."""
    for name, size, modified in record.get("outputs", []):
        path = Path(run) / name
        if not path.is_file():
            return f"{name} is gone"
        stat = path.stat()
        if [stat.st_size, stat.st_mtime_ns] != [size, modified]:
            return f"{name} changed"
    return ""


def adopt(source: Path, into: Path, stage: str) -> None:
    """Take a finished stage of another run over: its files as hard links, its record, metrics, notebook and run.json entry."""
    record = runs.read_record(source, stage)
    for name, _, _ in record["outputs"]:
        _link(source / name, into / name)
    for notebook in source.glob(f"[0-9][0-9]_{stage}.ipynb"):
        shutil.copy2(notebook, into / notebook.name)
    runs.write_json(runs.record_path(into, stage), {**record, "adopted_from": source.name})
    metrics = {k.partition(".")[2]: v for k, v in runs.read_metrics(source).items() if k.startswith(f"{stage}.")}
    runs.merge_metrics(into, stage, metrics)
    fresh: dict[str, Any] = {"id": into.name, "status": "new", "stages": {}}
    about = runs.read_json(into / "run.json") if (into / "run.json").exists() else fresh
    about["stages"][stage] = runs.read_json(source / "run.json")["stages"][stage]
    runs.write_json(into / "run.json", about)


def _link(source: Path, into: Path) -> None:
    into.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, into)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, into)


def require(run: Path, stage: str, key: Key, noted: Mapping[str, Any]) -> str:
    """For a stage that is to be taken as it is (`--from`, `--only` of a later one): refuse when its results are not those asked for.

    Returns a warning, or "". Changed code is only warned of; changed parameters or inputs are refused.
    """
    status = runs.read_record(run, stage).get("status", "not run yet")
    where = runs.show_path(run)
    if status != "ok":
        raise Eagle3Error(f"stage {stage} is {status} in {where}: start from it (--from {stage}) or earlier")
    old = noted.get("key") or {}
    for part in ("params", "inputs"):
        if old and old.get(part) != key[part]:
            raise Eagle3Error(f"stage {stage} in {where} does not fit: {REASONS[part]}; start from it (--from {stage}) or in a new run")
    changed = [REASONS[part] for part in key if old and old.get(part) != key[part]]
    return f"{stage} is taken as it is, although {', '.join(changed)}" if changed else ""


def stages_between(names: list[str], start: str, only: str) -> list[str]:
    """The stages that --from and --only select. ParamError on an unknown name."""
    for name in filter(None, (start, only)):
        if name not in names:
            raise ParamError(f"unknown stage {name}; the stages are {', '.join(names)}")
    if only:
        return [only]
    return names[names.index(start) :] if start else names


assert set(STAGES).isdisjoint(WORKBENCH)  # a stage's own module always counts
