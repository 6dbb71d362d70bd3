"""Compare runs: the parameters that differ, the metrics side by side, the best run by one metric.

Used by `python -m eagle3lib compare RUN RUN ...` and by the compare notebook.
"""

from __future__ import annotations

import difflib
import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lib import runs
from eagle3lib.checks import Checks, show
from eagle3lib.errors import Eagle3Error
from eagle3lib.experiment import read_run
from eagle3lib.params import STAGES

MEASURE = "evaluate.acceptance_length_measured"
LOWER_IS_BETTER = ("loss", "seconds", "bytes", "dropped", "memory")
# Runs that differ in one of these measured different things: their acceptance lengths must not be ranked.
YARDSTICK = ("target", "eval_sets", "eval_prompts", "eval_tokens", "draft_steps", "temperature", "eval_temperature")
COLUMNS = 4  # runs side by side in a terminal

Table = tuple[str, list[str], list[list[str]]]  # heading of the first column, the other headings, rows of text


class Comparison:
    """Any number of runs side by side; prints as text, shows as tables in a notebook."""

    def __init__(self, folders: Sequence[Path], metric: str = MEASURE):
        if not folders:
            raise Eagle3Error("nothing to compare: name at least one run")
        self.folders, self.metric = [Path(f).resolve() for f in folders], metric
        self.names = [f.name for f in self.folders]
        self.params = [run_params(f) for f in self.folders]
        self.metrics = [runs.read_metrics(f) for f in self.folders]
        self.status = [_status(f) for f in self.folders]

    @property
    def differing(self) -> dict[str, list[Any]]:
        """Parameter -> its value in each run, for those that are not the same everywhere (None: the run has no such)."""
        return _rows(self.params, lambda values: any(v != values[0] for v in values))

    @property
    def measured(self) -> dict[str, list[Any]]:
        """Metric -> its value in each run (None: not measured). Intervals are shown beside their metric."""
        rows = _rows(self.metrics, lambda _: True)
        return {name: values for name, values in rows.items() if not name.endswith(("_low", "_high"))}

    @property
    def ranking(self) -> list[int]:
        """Numbers of the runs that have the chosen metric, the best first."""
        known = [n for n, metrics in enumerate(self.metrics) if _is_number(metrics.get(self.metric))]
        sign = 1 if any(word in self.metric for word in LOWER_IS_BETTER) else -1
        return sorted(known, key=lambda n: sign * self.metrics[n][self.metric])

    @property
    def best(self) -> str | None:
        """The run with the best value of the chosen metric; None when no run has it."""
        return self.names[self.ranking[0]] if self.ranking else None

    @property
    def caveats(self) -> list[str]:
        """Why the numbers may not be comparable, one line each."""
        lines = [f"{name} differs: the runs measured different things" for name in YARDSTICK if name in self.differing]
        undone = [f"{name} ({status})" for name, status in zip(self.names, self.status, strict=True) if status != "ok"]
        if undone:
            lines.append(f"not done: {', '.join(undone)}")
        if (close := self._overlapping()) and len(close) > 1:
            lines.append(f"their 95 % intervals overlap, so the order of these may be chance: {', '.join(close)}")
        return lines

    def _overlapping(self) -> list[str]:
        """The best run and those whose interval of the chosen metric reaches into its own."""
        bounds = {n: interval(self.metrics[n], self.metric) for n in self.ranking}
        first = bounds[self.ranking[0]] if self.ranking else None
        if first is None:
            return []
        return [self.names[n] for n, b in bounds.items() if b and b[0] <= first[1] and first[0] <= b[1]]

    def cell(self, name: str, n: int) -> str:
        """A metric of run n with its 95 % interval where there is one."""
        value = self.metrics[n].get(name)
        if value is None:
            return ""
        text = show(value) if not isinstance(value, (list, dict)) else json.dumps(value)
        bounds = interval(self.metrics[n], name)
        return f"{text} ({show(bounds[0])} to {show(bounds[1])})" if bounds else text

    # ---- tables ----

    def overview(self) -> Table:
        """A row a run, the best first: how it ended, the chosen metric, the parameters that differ."""
        differing = self.differing
        order = [*self.ranking, *(n for n in range(len(self.names)) if n not in self.ranking)]
        rows = [[self.names[n], self.status[n], self.cell(self.metric, n), *(_value(v[n]) for v in differing.values())] for n in order]
        return "run", ["status", self.metric, *differing], rows

    def all_metrics(self, first: int = 0, last: int | None = None) -> Table:
        """A row a metric, a column a run (of those from first to last)."""
        chosen = range(len(self.names))[first:last]
        return "metric", [self.names[n] for n in chosen], [[name, *(self.cell(name, n) for n in chosen)] for name in self.measured]

    def verdict(self) -> str:
        if self.best:
            return f"best by {self.metric}: {self.best}"
        near = difflib.get_close_matches(self.metric, self.measured, n=3, cutoff=0.5)
        return f"no run has {self.metric}" + (f"; nearest: {', '.join(near)}" if near else "")

    def __repr__(self) -> str:
        tables = [self.overview(), *(self.all_metrics(n, n + COLUMNS) for n in range(0, len(self.names), COLUMNS))]
        return "\n\n".join([*map(_as_text, tables), "\n".join([self.verdict(), *(f"note: {line}" for line in self.caveats)])])

    def _repr_html_(self) -> str:
        notes = "".join(f"<br>{html.escape(line)}" for line in self.caveats)
        return f"<p><b>{html.escape(self.verdict())}</b>{notes}</p>{_as_html(self.overview())}"


class Metrics:
    """All metrics of a comparison as one table of a notebook."""

    def __init__(self, compared: Comparison):
        self._table = compared.all_metrics()

    def __repr__(self) -> str:
        return _as_text(self._table)

    def _repr_html_(self) -> str:
        return _as_html(self._table)


def _as_text(table: Table) -> str:
    head, columns, rows = table
    lines = [[head, *columns], *(rows or [["(none)"]])]
    widths = [min(48, max(len(line[i]) if i < len(line) else 0 for line in lines)) for i in range(len(columns) + 1)]
    return "\n".join("  ".join(f"{text[:48]:<{w}}" for text, w in zip(line, widths, strict=False)).rstrip() for line in lines)


def _as_html(table: Table) -> str:
    head, columns, rows = table
    top = "".join(f"<th style='text-align:left'>{html.escape(text)}</th>" for text in [head, *columns])
    body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(t)}</td>" for t in line) + "</tr>" for line in rows)
    return f"<table><tr>{top}</tr>{body}</table>"


def check(compared: Comparison) -> Checks:
    """What must hold before anybody believes the ranking."""
    checks = Checks()
    found = len(compared.ranking)
    checks.add("chosen metric", found > 0, f"{found} of {len(compared.names)} runs have it", "1 or more",
               "a misspelt metric, so that nothing is ranked", f"Choose another metric: {compared.verdict()}.")  # fmt: skip
    wrong = [name for name, metrics, params in zip(compared.names, compared.metrics, compared.params, strict=True)
             if not _possible(metrics.get(MEASURE), params.get("draft_steps"))]  # fmt: skip
    checks.add("acceptance lengths are possible", not wrong, ", ".join(wrong) or "all", "1 to draft_steps + 1",
               "numbers of another definition beside ours", "Evaluate that run again with this version.")  # fmt: skip
    return checks


def _possible(length: Any, steps: Any) -> bool:
    return not _is_number(length) or not _is_number(steps) or 1 <= length <= steps + 1


# ---- finding and reading runs ----


def find(names: Sequence[str] = ()) -> list[Path]:
    """The run folders with these ids or paths; without names every run in runs/ that has an acceptance length.

    Eagle3Error when one is not there, or when there is nothing at all.
    """
    if names:
        return [find_one(name) for name in dict.fromkeys(names)]
    base = runs.runs_dir()
    folders = sorted(p for p in base.iterdir() if p.is_dir() and not p.is_symlink()) if base.is_dir() else []
    found = [p for p in folders if MEASURE in runs.read_metrics(p)]
    if not found:
        raise Eagle3Error(f"no run in {runs.show_path(base)} has an acceptance length yet; run notebooks 01 to 05 first, or name runs")
    return found


def find_one(name: str) -> Path:
    """A run folder by its id or path; a relative path is taken from the caller's folder, then from the repository."""
    path = Path(name).expanduser()
    inside = [] if name in ("", ".", "..") else [runs.runs_dir() / name]
    found = [folder for folder in (*inside, path, runs.repo_root() / path) if folder.is_dir()]
    if chosen := next(filter(_is_run, found), None):
        return chosen.resolve()
    if found:
        raise Eagle3Error(f"{name}: that folder is no run: it has neither run.json nor stages/ nor metrics.json")
    raise Eagle3Error(f"run {name}: no such folder, neither in {runs.show_path(runs.runs_dir())} nor as a path")


def _is_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("run.json", "stages", "metrics.json"))


def interval(metrics: Mapping[str, Any], name: str) -> tuple[float, float] | None:
    """The 95 % interval of a metric: `<name>_low` and `_high`, where `<name>` may leave out its `_measured`."""
    for stem in (name, name.removesuffix("_measured")):
        low, high = metrics.get(f"{stem}_low"), metrics.get(f"{stem}_high")
        if low is not None and high is not None:
            return low, high
    return None


def run_params(folder: Path) -> dict[str, Any]:
    """All parameters of a run, from run.json or, for a run by hand, from its stages."""
    settings = read_run(folder).get("params")
    if settings:
        return {name: s["value"] for name, s in settings.items() if name != "run_dir"}
    found: dict[str, Any] = {}
    for stage in reversed(STAGES):
        found |= runs.read_record(folder, stage).get("params", {})
    return {name: value for name, value in found.items() if name != "run_dir"}


def records(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl; [] when it has none. A last line that a kill cut off is left out."""
    path = Path(folder) / "metrics.jsonl"
    found = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return [record for record in found if isinstance(record, dict)]


def curve(folder: Path, name: str, by: str = "step") -> tuple[list[Any], list[Any]]:
    """Two columns of the run's metrics.jsonl: `by` and `name`, of the lines that have both. Empty when there is no file."""
    both = [(line[by], line[name]) for line in records(folder) if line.get(by) is not None and line.get(name) is not None]
    return [x for x, _ in both], [y for _, y in both]


def progress(folder: Path) -> tuple[list[float], list[float], list[float]]:
    """(tokens trained on, hours of training, held-out acceptance length) at every point where the draft was tried."""
    tokens = seconds = 0.0
    points: list[tuple[float, float, float]] = []
    for record in records(folder):
        tokens, seconds = tokens + (record.get("tokens") or 0), seconds + (record.get("seconds") or 0)
        if (length := record.get("acceptance_length")) is not None:
            points.append((tokens, seconds / 3600, length))
    return [p[0] for p in points], [p[1] for p in points], [p[2] for p in points]


def _status(folder: Path) -> str:
    """The runner's word on the run; without one, whether all stages are done."""
    done = all(runs.read_record(folder, stage).get("status") == "ok" for stage in STAGES)
    return read_run(folder).get("status") or ("ok" if done else "unfinished")


def _rows(sources: Sequence[dict[str, Any]], wanted: Callable[[list[Any]], bool]) -> dict[str, list[Any]]:
    names: Iterable[str] = dict.fromkeys(name for source in sources for name in source)
    rows = {name: [source.get(name) for source in sources] for name in names}
    return {name: values for name, values in rows.items() if wanted(values)}


def _value(value: Any) -> str:
    return "" if value is None else show(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
