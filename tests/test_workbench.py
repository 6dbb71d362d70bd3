"""Sweeps, comparison, and opening a stage: what people do with several runs."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from workbooks import workbook

from eagle3lib import cli, compare, openrun, params, reuse, runner, runs, sweep
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.experiment import Order
from eagle3lib.params import STAGES

PICKY = "assert lr < 0.5, 'the learning rate is too large'"


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(runs.ENV_RUNS, str(tmp_path / "runs"))
    monkeypatch.delenv(runs.ENV_RUN_DIR, raising=False)


def test_a_list_where_one_value_is_wanted_is_an_axis(tmp_path: Path) -> None:
    books = params.read_notebooks(workbook(tmp_path))
    assert sweep.axes(books, {"lr": 0.1}, {"lr": [0.1, 0.2], "texts": ["a"]}) == {"lr": [0.1, 0.2]}
    assert sweep.axes(books, {}, {"texts": [["a"], ["b"]]}) == {"texts": [["a"], ["b"]]}
    assert sweep.axes(books, {"sweep": {"lr": [0.1], "rows": [1]}}, {"rows": 3}) == {"lr": [0.1]}
    with pytest.raises(ParamError, match="sweep: wanted lines"):
        sweep.axes(books, {"sweep": {"lr": 3}}, {})


def test_one_wrong_point_stops_a_sweep_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("sweep:\n  rows: [1, two]\n")
    with pytest.raises(ParamError, match="rows: found 'two'"):
        sweep.make_points(tmp_path / "x.yaml", {}, workbook(tmp_path / "nb"), tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_dry_run_of_a_sweep_lists_points_and_what_they_share(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("rows: 4\nsweep:\n  lr: [0.9, 0.1]\n")
    text = sweep.describe(tmp_path / "x.yaml", {"shard_mb": [32, 64, 128]}, workbook(tmp_path / "nb"))
    assert "sweep of 6 points" in text and "lr=0.1, shard_mb=128" in text
    assert [line.split()[1] for line in text.splitlines() if line.split()[:1] and line.split()[0] in STAGES] == ["1", "3", "3", "6", "6"]
    assert not (tmp_path / "runs").exists()


def test_a_sweep_shares_stages_and_survives_a_failing_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notebooks, log = workbook(tmp_path / "nb", {"train": PICKY}), io.StringIO()
    (tmp_path / "x.yaml").write_text("rows: 4\nsweep:\n  lr: [0.9, 0.1]\n")
    code = sweep.run(tmp_path / "x.yaml", {"draft_steps": [3]}, notebooks=notebooks, out=log)
    first, second = sorted(p for p in (tmp_path / "runs").iterdir() if p.is_dir() and not p.is_symlink())
    assert code == 1 and "sweep of 2 points" in log.getvalue()
    assert runs.read_record(first, "train")["error"] == "AssertionError: the learning rate is too large"
    assert [runs.read_record(second, s)["status"] for s in STAGES] == ["ok"] * 5, log.getvalue()
    assert "shares prepare, extract, verify" in log.getvalue()
    assert (first / "extract.txt").samefile(second / "extract.txt")
    assert runs.read_record(second, "train")["params"]["lr"] == 0.1
    assert runs.read_metrics(second)["extract.length"] == runs.read_metrics(first)["extract.length"]

    # A stage that was taken over and is run again must not write into the other run's files.
    before = (first / "extract.txt").read_text()
    monkeypatch.setenv(runs.ENV_RUN_DIR, str(second))
    stage = runs.begin("prepare", {})
    assert not (second / "prepare.txt").exists() and not (second / "extract.txt").exists()
    stage.path("prepare.txt").write_text("other")
    assert (first / "extract.txt").read_text() == before and (first / "prepare.txt").read_text() != "other"
    assert runs.read_record(second, "extract") == {} and runs.read_record(second, "train")["status"] == "stale"


WRONG_USE = {
    "--only": (["run", "{x}", "--only", "bogus"], "unknown stage bogus"),
    "--from": (["run", "{x}", "--from", "bogus"], "unknown stage bogus"),
    "open": (["open", "old", "bogus"], "unknown stage bogus"),
    "no jobs": (["run", "{x}", "--set", "lr=[0.1,0.2]", "--jobs", "0"], "--jobs is 0; it must be at least 1"),
    "jobs of a dry run": (["run", "{x}", "--set", "lr=[0.1,0.2]", "--jobs", "-3", "--dry-run"], "--jobs is -3"),
    "no time": (["run", "{x}", "--stage-timeout", "0"], "--stage-timeout is 0"),
    "nan": (["run", "{x}", "--stage-timeout", "nan"], "--stage-timeout is nan"),
    "inf": (["run", "{x}", "--set", "lr=[0.1,0.2]", "--stage-timeout", "inf"], "--stage-timeout is inf"),
    "half a sweep": (["run", "{sweep}", "--set", "lr=0.1", "--only", "train"], "a sweep makes runs of its own"),
}


@pytest.mark.parametrize("name", WRONG_USE)
def test_wrong_use_is_exit_code_2_and_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    words, says = WRONG_USE[name]
    monkeypatch.setenv(runs.ENV_NOTEBOOKS, str(workbook(tmp_path / "nb")))
    (tmp_path / "x.yaml").write_text("rows: 4\n")
    (tmp_path / "sweep.yaml").write_text("sweep:\n  lr: [0.1, 0.2]\n  rows: [1, 2]\n")
    a_run(tmp_path / "runs", "old", {}, {})
    (tmp_path / "runs" / "latest").symlink_to("old")
    assert cli.main([word.format(x=tmp_path / "x.yaml", sweep=tmp_path / "sweep.yaml") for word in words]) == 2
    said = capsys.readouterr().err
    assert says in said and len(said.splitlines()) == 1
    assert {p.name for p in (tmp_path / "runs").iterdir()} == {"old", "latest"}


def test_single_values_in_place_of_a_sweep_are_one_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(runs.ENV_NOTEBOOKS, str(workbook(tmp_path / "nb")))
    (tmp_path / "sweep.yaml").write_text("sweep:\n  lr: [0.1, 0.2]\n  rows: [1, 2]\n")
    assert cli.main(["run", str(tmp_path / "sweep.yaml"), "--set", "lr=0.3", "--set", "rows=5", "--dry-run"]) == 0
    assert "prepare   run (new run)" in capsys.readouterr().out


def test_the_time_limit_holds_for_every_run_of_a_sweep(tmp_path: Path) -> None:
    notebooks, log = workbook(tmp_path / "nb", {"prepare": "import time\ntime.sleep(300)"}), io.StringIO()
    (tmp_path / "x.yaml").write_text("sweep:\n  rows: [1]\n")
    assert sweep.run(tmp_path / "x.yaml", {}, stage_timeout_s=4, notebooks=notebooks, out=log) == 1
    assert "ran out of time" in runs.read_record(tmp_path / "runs" / "latest", "prepare")["error"]


def a_run(base: Path, name: str, values: dict[str, Any], metrics: dict[str, Any]) -> Path:
    folder = base / name
    runs.write_json(folder / "run.json", {"params": {k: {"value": v, "origin": "file"} for k, v in values.items()}})
    runs.write_json(folder / "metrics.json", metrics)
    return folder


def test_compare_shows_what_differs_and_the_best(tmp_path: Path) -> None:
    name = compare.MEASURE
    one = a_run(tmp_path, "one", {"lr": 0.1, "rows": 3}, {name: 1.5, f"{name}_low": 1.4, f"{name}_high": 1.6, "train.loss_last": 2.0})
    two = a_run(tmp_path, "two", {"lr": 0.2, "rows": 3}, {name: 1.7, "train.loss_last": 3.0})
    both = compare.Comparison([one, two])
    assert both.differing == {"lr": [0.1, 0.2]} and both.best == "two"
    assert "1.5 (1.4 to 1.6)" in repr(both) and "rows" not in repr(both)
    assert compare.Comparison([one, two], "train.loss_last").best == "one"
    assert compare.Comparison([one, two], "no.such").best is None
    assert "<table>" in both._repr_html_()
    (one / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "note": "x"}\n{"step": 3, "loss": 1.0}\n')
    assert compare.curve(one, "loss") == ([1, 3], [3.0, 1.0]) and compare.curve(two, "loss") == ([], [])
    with pytest.raises(Eagle3Error, match="nothing to compare"):
        compare.Comparison([])


def test_open_fills_in_the_parameters_and_marks_the_failure(tmp_path: Path) -> None:
    notebooks = workbook(tmp_path / "nb", {"train": PICKY})
    run = a_run(tmp_path / "runs", "r", {"lr": 0.9, "rows": 3, "show": False}, {})
    executed = nbformat.read(notebooks / "04_train.ipynb", as_version=4)
    executed.cells[3].outputs = [nbformat.v4.new_output("error", ename="AssertionError", evalue="x", traceback=[])]
    nbformat.write(executed, run / "04_train.ipynb")
    runs.write_json(runs.record_path(run, "train"), {"status": "failed", "error": "AssertionError: x"})
    book = nbformat.read(openrun.write(run, "train", notebooks), as_version=4)
    filled = params.parse_cell(book.cells[1].source, "n")
    assert filled["lr"].default == 0.9 and filled["lr"].meaning == "learning rate" and filled["run_dir"].default == str(run)
    assert book.cells[3].source.startswith("## The run stopped here\n**failed**: AssertionError: x")
    assert "(#The-run-stopped-here)" in book.cells[0].source
    assert book.cells[4].source == PICKY
    with pytest.raises(Eagle3Error, match="unknown stage"):
        openrun.write(run, "trian", notebooks)


def test_a_failing_stage_opens_at_its_point_of_failure_with_its_inputs_loaded(tmp_path: Path) -> None:
    notebooks = workbook(tmp_path / "nb", {"extract": "told = stage.path('prepare.txt').read_text()\nassert 'rows' not in told, told"})
    (tmp_path / "x.yaml").write_text("rows: 7\n")
    result = runner.run(Order(tmp_path / "x.yaml", only="", notebooks=notebooks), out=io.StringIO())
    assert result.status == "failed"
    book = nbformat.read(openrun.write(result.dir, "extract", notebooks), as_version=4)
    (stop,) = [n for n, cell in enumerate(book.cells) if "The run stopped here" in cell.source and cell.cell_type == "markdown" and n]
    above, failing = book.cells[:stop], book.cells[stop + 1]
    ask = nbformat.v4.new_code_cell("print(stage.path('prepare.txt').read_text())")
    opened = nbclient.NotebookClient(nbformat.v4.new_notebook(cells=[*above, ask], metadata=book.metadata)).execute()
    assert "'rows': 7" in opened.cells[-1].outputs[0].text
    again = nbformat.v4.new_notebook(cells=[*above, failing], metadata=book.metadata)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="AssertionError"):
        nbclient.NotebookClient(again).execute()


def test_the_command_line(tmp_path: Path) -> None:
    for name in ("one", "two"):
        a_run(tmp_path / "runs", name, {"lr": 0.1}, {compare.MEASURE: 1.5})

    def command(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-m", "eagle3lib", *args], capture_output=True, text=True, cwd=runs.repo_root())

    shown = command("compare", "one", "two")
    assert shown.returncode == 0 and "best by" in shown.stdout
    assert command("report", "one").returncode == 0 and (tmp_path / "runs" / "one" / "report.html").exists()
    assert command("compare", "one", "three").returncode == 1


def test_the_workbench_is_no_part_of_a_stage() -> None:
    """Its modules are left out of a stage's key, so they must not be imported by what a notebook calls."""
    code = f"import sys, eagle3lib.runs; print([m for m in {sorted(reuse.WORKBENCH)} if 'eagle3lib.' + m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['redact']"  # hides secrets, changes no result
