"""Runs side by side: tables, figures over several runs, and the notebook that shows them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import nbformat
import pytest
from IPython import display as ipython_display

from eagle3lib import compare, overlays, runs
from eagle3lib.errors import Eagle3Error
from eagle3lib.params import STAGES

ROOT = Path(__file__).resolve().parents[1]
NAME = compare.MEASURE


def a_run(base: Path, name: str, values: dict[str, Any], metrics: dict[str, Any], steps: int = 0) -> Path:
    """A run folder as the runner leaves it, with a loss that falls from 10 to 10 - lr and an epoch every ten steps of 100 tokens and 36 s."""
    folder = base / name
    about = {"status": "ok", "params": {k: {"value": v, "origin": "file"} for k, v in values.items()}}
    runs.write_json(folder / "run.json", about)
    runs.write_json(folder / "metrics.json", metrics)
    lines: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        share = step / steps
        lines.append({"step": step, "loss": 10 - values["lr"] * share, "hits": [share / 2, None], "tokens": 100, "seconds": 36.0})
        if step % 10 == 0:
            lines.append({"step": step, "acceptance_length": 1 + share * values["lr"]})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


@pytest.fixture
def three(tmp_path: Path) -> list[Path]:
    bounds = [(1.4, 1.6), (1.55, 1.85), (1.1, 1.3)]
    found = []
    for n, (low, high) in enumerate(bounds):
        metrics = {NAME: (low + high) / 2, "evaluate.acceptance_length_low": low, "evaluate.acceptance_length_high": high, "train.loss_last": 3 - n}
        found.append(a_run(tmp_path, f"run-{n}", {"lr": 0.1 * (n + 1), "rows": 3, "draft_steps": 5}, metrics, steps=40))
    return found


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, str]]:
    """What display() was called with: [(figure, alt text)]."""
    calls: list[tuple[Any, str]] = []
    monkeypatch.setattr(ipython_display, "display", lambda fig, **k: calls.append((fig, k["metadata"]["image/png"]["alt"])))
    return calls


def test_the_overview_ranks_runs_and_names_what_differs(three: list[Path]) -> None:
    compared = compare.Comparison(three)
    head, columns, rows = compared.overview()
    assert columns == ["status", NAME, "lr"] and [row[0] for row in rows] == ["run-1", "run-0", "run-2"]
    assert rows[0] == ["run-1", "ok", "1.7 (1.55 to 1.85)", "0.2"]
    assert compared.best == "run-1" and compare.Comparison(three, "train.loss_last").best == "run-2"
    assert "run-2" in repr(compared) and "<table>" in compared._repr_html_()


def test_differences_that_may_be_chance_and_other_yardsticks_are_said(three: list[Path], tmp_path: Path) -> None:
    (note,) = compare.Comparison(three).caveats
    assert "run-1, run-0" in note and "run-2" not in note and "chance" in note
    other = a_run(tmp_path, "other", {"lr": 0.1, "rows": 3, "draft_steps": 3}, {NAME: 1.2})
    record = runs.read_json(other / "run.json")
    runs.write_json(other / "run.json", {**record, "status": "failed"})
    text = "\n".join(compare.Comparison([*three, other]).caveats)
    assert "draft_steps differs: the runs measured different things" in text and "other (failed)" in text


def test_one_run_and_many_runs(tmp_path: Path, shown: list[tuple[Any, str]]) -> None:
    many = [a_run(tmp_path, f"run-{n:02d}", {"lr": 0.1 + n / 100}, {NAME: 1 + n / 100}, steps=20) for n in range(50)]
    for folders in (many[:1], many):
        compared = compare.Comparison(folders)
        assert len(repr(compared)) and compared.best == folders[-1].name
        for draw in (overlays.metric_by_run, overlays.training_curves, overlays.acceptance_progress):
            draw(compared)
    legend = shown[-1][0].axes[1].get_legend()
    assert [t.get_text() for t in legend.get_texts()] == [*(f"run-{n}" for n in range(49, 43, -1)), "44 others"]
    assert "10 more are not drawn" in shown[3][1]


def test_figures_overlay_every_run_and_state_the_finding(three: list[Path], shown: list[tuple[Any, str]]) -> None:
    compared = compare.Comparison(three)
    for draw in (overlays.metric_by_run, overlays.training_curves, overlays.acceptance_progress):
        draw(compared)
    for fig, alt in shown:
        fig.canvas.draw()
        for ax in fig.axes:
            assert ax.get_xlabel() and ax.get_ylabel() and ax.get_title(loc="left"), alt
        assert "run-1" in alt
    assert not matplotlib.pyplot.get_fignums()
    assert "Best of 3: run-1" in shown[0][1] and "Lowest loss at the end: 9.7, run-2" in shown[1][1]
    assert "run-2 1.30 after 4,000 tokens and 0.40 h" in shown[2][1]
    lines = {line.get_label(): line.get_xydata().tolist() for line in shown[2][0].axes[0].get_lines()}
    assert lines["run-0"][0] == [1000.0, pytest.approx(1.025)] and lines["run-0"][-1] == [4000.0, pytest.approx(1.1)]


def test_runs_without_numbers_or_curves_are_shown_all_the_same(tmp_path: Path, shown: list[tuple[Any, str]]) -> None:
    (tmp_path / "empty").mkdir()
    compared = compare.Comparison([tmp_path / "empty"], "no.such")
    for draw in (overlays.metric_by_run, overlays.training_curves, overlays.acceptance_progress):
        draw(compared)
    assert len(shown) == 3 and "no run has no.such" in repr(compared)
    (tmp_path / "empty" / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n{"step": 2, "lo')
    assert compare.curve(tmp_path / "empty", "loss") == ([1], [2])


def test_a_misspelt_metric_and_impossible_numbers_fail_the_checks(three: list[Path], tmp_path: Path) -> None:
    failed = compare.check(compare.Comparison(three, "evaluate.acceptance_lenght_measured")).failed
    assert [c.name for c in failed] == ["chosen metric"] and f"nearest: {NAME}" in failed[0].remedy
    odd = a_run(tmp_path, "odd", {"lr": 1.0, "draft_steps": 3}, {NAME: 4.2})
    assert [c.measured for c in compare.check(compare.Comparison([odd])).failed] == ["odd"]
    assert not compare.check(compare.Comparison(three)).failed


def test_runs_are_found_by_id_by_path_or_all_of_them(three: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.ENV_RUNS, str(tmp_path))
    a_run(tmp_path, "unfinished", {"lr": 1.0}, {})
    (tmp_path / "latest").symlink_to("run-1")
    assert compare.find() == three and compare.find(["run-2", str(three[0]), "run-2"]) == [three[2], three[0]]
    with pytest.raises(Eagle3Error, match="run nobody: no such folder"):
        compare.find(["nobody"])
    monkeypatch.setenv(runs.ENV_RUNS, str(tmp_path / "none"))
    with pytest.raises(Eagle3Error, match="run notebooks 01 to 05 first"):
        compare.find()


def papermill(folder: Path, out: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "papermill", str(ROOT / "notebooks/06_compare.ipynb"), str(out), "--no-progress-bar", *more]
    env = {**os.environ, runs.ENV_RUNS: str(folder), **environment}
    return subprocess.run(command, env=env, cwd=out.parent, capture_output=True, text=True, timeout=300)


def test_the_notebook_shows_tables_and_figures_through_papermill(three: list[Path], tmp_path: Path) -> None:
    done = papermill(tmp_path, tmp_path / "all.ipynb")
    assert done.returncode == 0, done.stderr[-3000:]
    book = nbformat.read(tmp_path / "all.ipynb", as_version=4)
    outputs = [o for c in book.cells for o in c.get("outputs", [])]
    pictures = [o for o in outputs if "image/png" in o.get("data", {})]
    assert len(pictures) == 3 and all(len(o.metadata["image/png"]["alt"]) > 40 for o in pictures)
    assert any("Best of 3: run-1" in o.metadata["image/png"]["alt"] for o in pictures)
    assert sum("<table" in o.get("data", {}).get("text/html", "") for o in outputs) == 3
    wrong = papermill(tmp_path, tmp_path / "wrong.ipynb", "-y", "runs: [run-0, run-9]")
    assert wrong.returncode != 0 and "run run-9: no such folder" in wrong.stderr
    typo = papermill(tmp_path, tmp_path / "typo.ipynb", "-p", "metrik", "train.loss_last")
    assert typo.returncode != 0 and "unknown parameter metrik; nearest: metric" in typo.stderr


def test_it_is_no_stage() -> None:
    assert "compare" not in STAGES


def test_only_a_run_folder_is_taken_for_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.ENV_RUNS, str(tmp_path / "runs"))
    run = tmp_path / "runs" / "one"
    runs.write_json(run / "run.json", {"status": "ok"})
    (tmp_path / "one").mkdir()  # of the same name, and no run
    monkeypatch.chdir(tmp_path)
    assert compare.find_one("one") == compare.find_one("runs/one") == compare.find_one(str(run)) == run
    for name in (".", "..", "", "runs", str(tmp_path)):
        with pytest.raises(Eagle3Error, match="no run"):
            compare.find_one(name)
    monkeypatch.chdir(run)
    assert compare.find_one(".") == run
    (run / "store").mkdir()
    monkeypatch.chdir(run / "store")
    assert compare.find_one("..") == run
