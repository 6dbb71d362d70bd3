"""Compare runs: the parameters that differ, the metrics side by side, the best run by one metric.

Used by `python -m eagle3lib compare RUN RUN ...` and by the compare notebook.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3lib import runs
from eagle3lib.checks import show
from eagle3lib.errors import Eagle3Error
from eagle3lib.experiment import read_run
from eagle3lib.params import STAGES

MEASURE = "evaluate.acceptance_length_measured"
LOWER_IS_BETTER = ("loss", "seconds", "bytes", "dropped", "memory")


class Comparison:
    """Several runs side by side; prints as text, shows as tables in a notebook."""

    def __init__(self, folders: Sequence[Path], metric: str = MEASURE):
        if len(folders) < 2:
            raise Eagle3Error("compare needs at least two runs")
        self.names, self.metric = [Path(f).resolve().name for f in folders], metric
        self.params = [run_params(Path(f)) for f in folders]
        self.metrics = [runs.read_metrics(Path(f)) for f in folders]

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
    def best(self) -> str | None:
        """The run with the best value of the chosen metric; None when no run has it."""
        values = [(m[self.metric], name) for m, name in zip(self.metrics, self.names, strict=True) if _is_number(m.get(self.metric))]
        if not values:
            return None
        lower = any(word in self.metric for word in LOWER_IS_BETTER)
        return (min if lower else max)(values, key=lambda pair: pair[0])[1]

    def cell(self, name: str, n: int) -> str:
        """A metric of run n with its 95 % interval where there is one."""
        value = self.metrics[n].get(name)
        if value is None:
            return ""
        text = show(value) if not isinstance(value, (list, dict)) else json.dumps(value)
        bounds = interval(self.metrics[n], name)
        return f"{text} ({show(bounds[0])} to {show(bounds[1])})" if bounds else text

    def blocks(self) -> list[tuple[str, list[list[str]]]]:
        """(heading, rows of text) of the two tables."""
        params = [[name, *("" if v is None else show(v) for v in values)] for name, values in self.differing.items()]
        metrics = [[name, *(self.cell(name, n) for n in range(len(self.names)))] for name in self.measured]
        return [("parameters that differ", params), ("metrics", metrics)]

    def verdict(self) -> str:
        return f"best by {self.metric}: {self.best}" if self.best else f"no run has {self.metric}"

    def __repr__(self) -> str:
        parts = []
        for heading, rows in self.blocks():
            lines = [[heading, *self.names], *(rows or [["(none)"]])]
            widths = [min(48, max(len(line[i]) if i < len(line) else 0 for line in lines)) for i in range(len(self.names) + 1)]
            parts += ["  ".join(f"{text[:48]:<{w}}" for text, w in zip(line, widths, strict=False)).rstrip() for line in lines] + [""]
        return "\n".join([*parts, self.verdict()])

    def _repr_html_(self) -> str:
        tables = []
        for heading, rows in self.blocks():
            lines = [[heading, *self.names], *rows]
            body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(t)}</td>" for t in line) + "</tr>" for line in lines)
            tables.append(f"<table>{body}</table>")
        return "".join(tables) + f"<p><b>{html.escape(self.verdict())}</b></p>"


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


def curve(folder: Path, name: str, by: str = "step") -> tuple[list[float], list[float]]:
    """Two columns of the run's metrics.jsonl: `by` and `name`, of the lines that have both. Empty when there is no file."""
    path = Path(folder) / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()] if path.exists() else []
    both = [(line[by], line[name]) for line in lines if by in line and name in line]
    return [x for x, _ in both], [y for _, y in both]


def _rows(sources: Sequence[dict[str, Any]], wanted: Callable[[list[Any]], bool]) -> dict[str, list[Any]]:
    names = dict.fromkeys(name for source in sources for name in source)
    rows = {name: [source.get(name) for source in sources] for name in names}
    return {name: values for name, values in rows.items() if wanted(values)}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
