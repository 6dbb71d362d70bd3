"""Sweeps: one run for every combination of values, stages that several runs share computed once.

A sweep is asked for by a list where a single value is wanted (`--set lr=[1e-3,3e-4]`; for a list parameter, a list of
lists), or by a section `sweep:` of the params file with such lists. Every point is a run of its own, executed by a
process of its own, so that one that fails does not stop the others.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from eagle3lib import params, redact, reuse, runs
from eagle3lib.compare import MEASURE
from eagle3lib.console import GREEN, RED, Console, duration
from eagle3lib.errors import ParamError
from eagle3lib.experiment import Experiment, Order, new_run, read_run, refuse_secret_flags
from eagle3lib.runner import catch_signals, require_limits


@dataclass
class Point:
    """One run of a sweep."""

    values: dict[str, Any]  # what this point differs in
    file: Path  # its params file
    dir: Path
    keys: dict[str, reuse.Key]
    process: subprocess.Popen[bytes] | None = None
    exit_code: int | None = None
    told: int = 0  # how many signals were passed on to its process
    shared: list[str] = field(default_factory=list)  # stages taken over from another point

    @property
    def name(self) -> str:
        return ", ".join(f"{k}={v}" for k, v in self.values.items())


def axes(notebooks: params.Notebooks, given: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Parameter -> its values, for every parameter that has several; {} when this is no sweep."""
    section = given.get("sweep", {})
    if not isinstance(section, dict) or not all(isinstance(v, list) and v for v in section.values()):
        raise ParamError("sweep: wanted lines `parameter: [value, value, ...]`")
    types = {p.name: p.type for declared in notebooks.values() for p in declared.values()}
    listed = {k: v for k, v in overrides.items() if isinstance(v, list) and v and _is_axis(types.get(k, ""), v)}
    return {**{k: v for k, v in section.items() if k not in overrides}, **listed}


def _is_axis(wanted: str, values: list[Any]) -> bool:
    return isinstance(values[0], list) if wanted.startswith("list[") else bool(wanted)


def run(
    source: Path,
    overrides: Mapping[str, Any],
    *,
    jobs: int = 1,
    stage_timeout_s: float | None = None,
    notebooks: Path | None = None,
    runs_dir: Path | None = None,
    out: TextIO | None = None,
) -> int:
    """Run every point, at most `jobs` at a time. Exit code 0 when all are done, 1 when one failed, 130 when interrupted."""
    require_limits(stage_timeout_s, jobs)
    folder, base = Path(notebooks or runs.notebooks_dir()), Path(runs_dir or runs.runs_dir())
    console = Console(out or sys.stdout)
    points = make_points(source, overrides, folder, base)
    console.say(f"sweep of {len(points)} points: {', '.join(p.dir.name for p in points)}")
    with catch_signals() as signals, _ended(points):
        while waiting := [p for p in points if p.exit_code is None]:
            running = [p for p in waiting if p.process]
            for point in running:
                _look(point, signals, console)
            ready = [p for p in waiting if not p.process and may_start(p, running)]
            if ready and len(running) < jobs and not signals:
                _start(ready[0], points, folder, console, stage_timeout_s)
            elif signals and not running:
                break
            else:
                time.sleep(0.2)
    console.say(table(points))
    codes = {p.exit_code for p in points}
    return 130 if signals else 0 if codes == {0} else 1


@contextmanager
def _ended(points: Sequence[Point]) -> Iterator[None]:
    """However this ends, no point goes on without anybody to look at it."""
    try:
        yield
    finally:
        for point in points:
            if point.process and point.process.poll() is None:
                point.process.terminate()


def combine(source: Path, overrides: Mapping[str, Any], books: params.Notebooks) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """What all points have in common, and what each differs in. ParamError when one of them is wrong."""
    given = params.load(source)
    varied = axes(books, given, overrides)
    fixed = {**{k: v for k, v in given.items() if k != "sweep"}, **overrides}
    combinations = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    for values in combinations:
        redact.remember({**fixed, **values})
        refuse_secret_flags(params.resolve(books, {}, {**fixed, **values}))
    return fixed, combinations


def describe(source: Path, overrides: Mapping[str, Any], notebooks: Path | None = None) -> str:
    """The text of `--dry-run`: the points, and how often each stage has to be computed. Writes nothing."""
    books = params.read_notebooks(Path(notebooks or runs.notebooks_dir()))
    fixed, combinations = combine(source, overrides, books)
    lines = [f"sweep of {len(combinations)} points:"]
    lines += [f"  {number:>3}  {', '.join(f'{k}={v}' for k, v in values.items())}" for number, values in enumerate(combinations, 1)]
    lines += ["", "stages, each computed once for all points that agree up to there:"]
    told: list[list[Any]] = [[] for _ in combinations]
    for stage, declared in books.items():
        for so_far, values in zip(told, combinations, strict=True):
            settings = params.resolve(books, {}, {**fixed, **values})
            so_far.append([settings[name].value for name in declared])
        lines.append(f"  {stage:<10}{len({repr(so_far) for so_far in told})} of {len(combinations)}")
    return redact.hide("\n".join([*lines, "", "one point alone, with its parameters and needs: give single values and --dry-run"]))


def make_points(source: Path, overrides: Mapping[str, Any], folder: Path, base: Path) -> list[Point]:
    """Check every combination, then make a run folder with a params file for each. Nothing is made when one is wrong."""
    fixed, combinations = combine(source, overrides, params.read_notebooks(folder))
    if any((text := params.dump({**fixed, **values})) != redact.hide(text) for values in combinations):
        raise ParamError("a sweep writes its parameters to files, and one of them holds a secret: give it by the environment instead")
    points = []
    for number, values in enumerate(combinations, 1):
        where = new_run(base, f"{Path(source).stem}-{number}of{len(combinations)}")
        file = where / "point.yaml"
        runs.write_text(file, params.dump({**fixed, **values}))
        points.append(Point(values, file, where, Experiment.load(file, {}, folder).keys()))
    return points


def may_start(point: Point, running: Sequence[Point]) -> bool:
    """Not while another point computes a stage that this one could take over."""
    return not any(key == other.keys[stage] for other in running for stage, key in point.keys.items() if stage not in done_stages(other))


def done_stages(point: Point) -> list[str]:
    """The stages of a point that are finished, from the first on."""
    entries = read_run(point.dir).get("stages", {})
    return list(itertools.takewhile(lambda stage: entries.get(stage, {}).get("status") == "ok", point.keys))


def _start(point: Point, points: Sequence[Point], folder: Path, console: Console, limit: float | None) -> None:
    """Take over what other points have done, then start the point's process."""
    for stage, key in point.keys.items():
        source = next((p for p in points if p is not point and p.keys[stage] == key and stage in done_stages(p)), None)
        if source is None:
            break
        reuse.adopt(source.dir, point.dir, stage)
        point.shared.append(stage)
    shared = f", shares {', '.join(point.shared)}" if point.shared else ""
    console.say(f"{point.dir.name}: {point.name}{shared}; its output: {runs.show_path(point.dir / 'console.log')}")
    command = [sys.executable, "-m", "eagle3lib.sweep", str(point.file), str(folder), str(point.dir), *([str(limit)] if limit else [])]
    with (point.dir / "console.log").open("wb") as log:
        point.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True)


def _look(point: Point, signals: Sequence[int], console: Console) -> None:
    """Note a point that ended; pass an interrupt on."""
    assert point.process
    point.exit_code = point.process.poll()
    if point.exit_code is None:
        for number in signals[point.told :]:  # each one once: a run takes the second for impatience and the third for an order
            point.process.send_signal(number)
        point.told = len(signals)
        return
    about = read_run(point.dir)
    console.say(
        f"{point.dir.name}: {about.get('status', 'failed')} in {duration(about.get('seconds', 0))}", RED if point.exit_code else GREEN
    )


def table(points: Sequence[Point]) -> str:
    """A line a point: what it varies, how it ended, its acceptance length."""
    lines = ["", f"{'run':<40} {'status':<12} {'acceptance':>10}  varied"]
    for point in points:
        status = "not started" if point.exit_code is None else read_run(point.dir).get("status", "failed")
        value = runs.read_metrics(point.dir).get(MEASURE)
        lines.append(f"{point.dir.name:<40} {status:<12} {'' if value is None else f'{value:.3f}':>10}  {point.name}")
    return "\n".join(lines)


def main(file: str, notebooks: str, where: str, limit: str = "") -> int:
    """One point, in its own process."""
    from eagle3lib import cli, runner

    folder = Path(where)
    order = Order(Path(file), run_id=folder.name, notebooks=Path(notebooks), runs_dir=folder.parent)
    return cli.guarded(lambda: runner.run(order, stage_timeout_s=float(limit) if limit else None).exit_code)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
