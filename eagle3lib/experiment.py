"""An experiment before its first kernel starts: parameters checked, run folder chosen, stages planned."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from eagle3lib import params, redact, reuse, runs
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.params import Setting

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


@dataclass(frozen=True)
class Order:
    """What was asked for: a params file with overrides, and which stages of which run.

    start, only: begin at, or run nothing but, one stage of an existing run (run_id, by default the latest).
    """

    params: Path
    overrides: Mapping[str, Any] = field(default_factory=dict)
    run_id: str = ""
    start: str = ""
    only: str = ""
    force: bool = False
    notebooks: Path = field(default_factory=runs.notebooks_dir)
    runs_dir: Path = field(default_factory=runs.runs_dir)

    def checked(self) -> tuple[Experiment, Path | None, Plan]:
        """The experiment, its run folder (None: a new one) and what has to run. ParamError or Eagle3Error when it cannot even start."""
        experiment = Experiment.load(self.params, self.overrides, self.notebooks)
        refuse_secret_flags(experiment.settings)
        where = choose_run(self.runs_dir, self.run_id, self.start or self.only)
        return experiment, where, make_plan(experiment, where, self.start, self.only, self.force)


@dataclass(frozen=True)
class Experiment:
    """A params file and overrides, checked against the notebooks."""

    source: Path
    folder: Path  # of the notebooks
    notebooks: params.Notebooks
    given: dict[str, Any]
    overrides: dict[str, Any]
    settings: dict[str, Setting]

    @classmethod
    def load(cls, source: Path, overrides: Mapping[str, Any], folder: Path) -> Experiment:
        notebooks = params.read_notebooks(folder)
        given = params.load(source)
        redact.remember(given)  # also what an override replaces: the file is copied into the run
        redact.remember(overrides)
        if "run_dir" in {**given, **overrides}:
            raise ParamError("run_dir: the runner makes the run folder; name it with --run-id")
        section = given.pop("sweep", {})
        if not isinstance(section, dict) or section.keys() - overrides.keys():
            raise ParamError(f"{Path(source).name} has a sweep section: that is several runs, not one")
        return cls(Path(source), Path(folder), notebooks, given, dict(overrides), params.resolve(notebooks, given, dict(overrides)))

    def values(self, stage: str) -> dict[str, Any]:
        """All parameter values of one stage's notebook."""
        return {name: self.settings[name].value for name in self.notebooks[stage] if name != "run_dir"}

    def keys(self) -> dict[str, reuse.Key]:
        """Stage -> key (see reuse.py)."""
        found: dict[str, reuse.Key] = {}
        before: reuse.Key | None = None
        for stage in self.notebooks:
            before = found[stage] = reuse.stage_key(self.folder, stage, self.values(stage), before)
        return found

    def changed(self, stage: str) -> dict[str, Any]:
        """Only those that differ from the notebook's defaults: what is handed to papermill."""
        return {name: v for name, v in self.values(stage).items() if self.settings[name].origin != "default"}


def refuse_secret_flags(settings: Mapping[str, Setting]) -> None:
    """ParamError when a list of words holds a flag that takes a secret: the engine would refuse it, but only once it stood in files."""
    taken = sorted({name for setting in settings.values() for name, _ in redact.flags(setting.value) if redact.is_secret_flag(name)})
    if taken:
        from eagle3lib.settings import OURS  # imports torch

        raise ParamError(f"engine arguments {', '.join(taken)}: {OURS}")


def choose_run(base: Path, run_id: str, continuing: str) -> Path | None:
    """The existing run folder to work in; None when a new one is wanted."""
    if run_id:
        if not RUN_ID.fullmatch(run_id) or run_id in ("latest", "lab"):
            raise ParamError(f"run id {run_id!r}: wanted letters, digits, `.`, `_` or `-` (at most 80), and neither latest nor lab")
        found = base / run_id
        if continuing and not found.is_dir():
            raise ParamError(f"run {run_id}: no such run in {runs.show_path(base)}")
        return found.resolve() if found.is_dir() else None
    if not continuing:
        return None
    if not (base / "latest").is_dir():
        raise ParamError("there is no earlier run to continue; run all stages first, or name one with --run-id")
    return (base / "latest").resolve()


def new_run(base: Path, name: str, run_id: str = "") -> Path:
    """Make a run folder: run_id, or date, time and name of the params file, with a number when that is taken."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    wanted = run_id or f"{datetime.now():%Y%m%d-%H%M}-{name}"
    base.mkdir(parents=True, exist_ok=True)
    for number in range(1, 1000):
        folder = base / (wanted if number == 1 else f"{wanted}-{number}")
        try:
            folder.mkdir()
            return folder.resolve()
        except FileExistsError:
            continue
    raise Eagle3Error(f"{base}: no free run id like {wanted}")


def link_latest(folder: Path) -> None:
    """Point runs/latest at this run, atomically."""
    link, temporary = folder.parent / "latest", folder.parent / f".latest-{os.getpid()}"
    if link.exists() and not link.is_symlink():
        return  # somebody's own folder
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(folder.name)
    os.replace(temporary, link)


def write_params(path: Path, experiment: Experiment) -> None:
    """A params file that repeats this run: the given one as it is, or, with overrides or `extends`, all values spelled out."""
    text = experiment.source.read_text(encoding="utf-8")
    if experiment.overrides or "extends" in (params.parse_yaml(text, path.name) or {}):
        values = {n: s.value for n, s in experiment.settings.items() if s.origin != "default"}
        about = f"# {experiment.source.name}, with what it extends and what was overridden\n"
        text = about + params.dump(values, {n: "override" for n, s in experiment.settings.items() if s.origin == "override"})
    runs.write_text(path, redact.hide(text))


@dataclass(frozen=True)
class Plan:
    """What a run will do: per stage either a reason to run or "" (skip)."""

    reasons: dict[str, str]
    keys: dict[str, reuse.Key]
    warnings: list[str]


def make_plan(experiment: Experiment, where: Path | None, start: str, only: str, force: bool) -> Plan:
    """Decide for every selected stage whether it has to run. A stage runs when one before it runs."""
    names = list(experiment.notebooks)
    selected = reuse.stages_between(names, start, only)
    noted = read_run(where).get("stages", {}) if where else {}
    plan = Plan({}, experiment.keys(), [])
    for stage, key in plan.keys.items():
        note = noted.get(stage, {})
        if stage in selected:
            plan.reasons[stage] = _reason(where, stage, key, note, plan, force)
        elif where and names.index(stage) < names.index(selected[0]):
            plan.warnings.extend(filter(None, [reuse.require(where, stage, key, note)]))
    return plan


def _reason(where: Path | None, stage: str, key: reuse.Key, note: Mapping[str, Any], plan: Plan, force: bool) -> str:
    if where is None:
        return "new run"
    if running := next((s for s, why in plan.reasons.items() if why), ""):
        return f"{running} runs"
    return "forced" if force else reuse.why_run(where, stage, key, note)


def read_run(where: Path) -> dict[str, Any]:
    """run.json with true statuses ("running" becomes "died" when that runner is gone, or when its run is over); {} if there is none."""
    path = Path(where) / "run.json"
    record = runs.read_json(path) if path.exists() else {}
    if record.get("status") == "running" and not runs.alive(record):
        record["status"] = "died"
    if record.get("status") != "running":
        for name, entry in record.get("stages", {}).items():
            if entry["status"] == "running":
                status = runs.read_record(where, name).get("status", "died")
                entry["status"] = "died" if status == "running" else status
    return record
