"""The report: one harmless page, true for whatever the run folder holds."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from eagle3lib import report, runs
from eagle3lib.checks import Checks
from eagle3lib.harmless import harmless
from eagle3lib.params import STAGES

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n" + b"\0" * 100).decode()
LOADS = re.compile(r"""(?:src|href)\s*=\s*["']?(?!data:|#|["'])|<script|<iframe|<link|@import|url\(\s*["']?(?!data:)""", re.IGNORECASE)


def outputs(**data: Any) -> Any:
    return new_output("display_data", data=data)


def record(run: Path, stage: str, status: str = "ok", **more: Any) -> None:
    """A stage's record and executed notebook, as the runner leaves them."""
    checks = Checks()
    checks.add("rows complete", status == "ok", 3, 3, "lost rows", "Extract again.")
    about = {
        "status": status,
        "seconds": 1.5,
        "params": {"target": "tiny", "lr": 0.1},
        "checks": checks.records,
        "started": "2026-12-01T06:00:00+00:00",
    }
    runs.write_json(runs.record_path(run, stage), {"stage": stage, **about, **more})
    picture = new_output(
        "display_data", data={"image/png": PNG, "text/plain": "<Figure>"}, metadata={"image/png": {"alt": f"bars of {stage}"}}
    )
    cells = [
        new_markdown_cell(f"# {stage}\n\nSee [the next](02_extract.ipynb) and [a paper](https://example.org/p)."),
        new_code_cell("a: int = 1  # hidden", metadata={"tags": ["parameters"]}),
        new_code_cell("silent = 1"),
        new_code_cell(f"draw_{stage}()", outputs=[new_output("stream", text="\x1b[31mred\x1b[0m words\n"), picture]),
    ]
    nbformat.write(new_notebook(cells=cells), run / f"{STAGES.index(stage) + 1:02d}_{stage}.ipynb")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "20261201-0931-good"
    folder.mkdir()
    for stage in STAGES:
        record(folder, stage)
    metrics = {"evaluate.acceptance_length_measured": 1.8349, "evaluate.lossless": True, "run.seconds": 95.0, "prepare.rows_kept": 12345}
    metrics |= {"evaluate.acceptance_length_low": 1.71, "evaluate.acceptance_length_high": 1.96}
    runs.write_json(folder / "metrics.json", metrics)
    settings = {"lr": {"value": 0.1, "origin": "file"}, "target": {"value": "tiny", "origin": "default"}}
    versions = {"python": "3.11.7", "torch": "2.14.1"}
    runs.write_json(folder / "run.json", {"status": "ok", "params_file": "good.yaml", "params": settings, "versions": versions})
    runs.write_json(folder / "store" / "store.json", {"fingerprint": {"engine": {"version": "0.5.14"}}, "layers": [2, 4, 5]})
    return folder


def text_of(run: Path) -> str:
    return report.write(run).read_text(encoding="utf-8")


def test_verdict_and_numbers_come_before_the_stages(run: Path) -> None:
    page = text_of(run)
    order = [page.index(part) for part in ("Passed", "1.83", "12,345", '<section id="prepare"', '<section id="evaluate"', "Provenance")]
    assert order == sorted(order)
    assert "All 5 stages are done, all 5 checks passed." in page
    assert "95 % interval 1.71 to 1.96" in page
    assert "1 min 35 s" in page and "0.5.14" in page and "2.14.1" in page


def test_the_page_opens_offline_and_runs_nothing(run: Path) -> None:
    page = text_of(run)
    assert not LOADS.search(page), LOADS.search(page)
    assert "\x1b" not in page and "red</span> words" in page
    assert 'href="#extract"' in page and 'title="https://example.org/p"' in page


def test_code_is_folded_and_pictures_have_words(run: Path) -> None:
    page = text_of(run)
    for stage in STAGES:
        fold = re.search(rf'<details class="code">(?:(?!</details>).)*draw_{stage}', page, re.DOTALL)
        assert fold and "silent" in fold[0]
    images = re.findall(r"<img[^>]*>", page)
    assert len(images) == 6 and all('alt="bars of ' in image for image in images)  # five, and evaluate's once more on top


def test_parameters_show_their_origin(run: Path) -> None:
    assert re.search(r"lr</span></td><td><b>0.1</b></td><td>file</td>", text_of(run))


def test_a_failed_run_is_shown_up_to_there(run: Path) -> None:
    record(run, "verify", "failed", error="check failed: layers <swapped>")
    for stage in ("train", "evaluate"):
        runs.record_path(run, stage).unlink()
    page = text_of(run)
    assert "Failed in verify" in page and "layers &lt;swapped&gt;" in page and "Extract again." in page
    assert '<section id="verify"' in page and '<section id="train"' not in page
    assert page.count("not run") == 2


@pytest.mark.parametrize(
    ("status", "says"), [("died", "Died in train"), ("interrupted", "Interrupted in train"), ("stale", "Unfinished: train is next")]
)
def test_other_ends(run: Path, status: str, says: str) -> None:
    record(run, "train", status, stale_because="prepare")
    page = text_of(run)
    assert says in page and "Passed</b>" not in page
    assert status != "stale" or "draw_train" not in page


def test_a_folder_with_next_to_nothing_and_with_broken_files(tmp_path: Path) -> None:
    assert "Unfinished: prepare is next" in text_of(tmp_path)
    record(tmp_path, "prepare")
    (tmp_path / "01_prepare.ipynb").write_text('{"cells": [')
    assert '<section id="prepare"' in text_of(tmp_path)


def test_a_large_notebook_stays_below_the_limit(run: Path) -> None:
    path = run / "04_train.ipynb"
    book = nbformat.read(path, as_version=4)
    big = [outputs(**{"image/png": PNG * 4000, "text/plain": "figure"}) for _ in range(12)]
    book.cells[-1].outputs += [*big, new_output("stream", text="line\n" * 2_000_000)]
    nbformat.write(book, path)
    page = text_of(run)
    assert len(page.encode()) < report.LIMIT
    assert "left out here, see the notebook of train" in page and "bars of evaluate" in page


def test_secrets_and_places_do_not_reach_the_page(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_KEY", "planted-secret-value")
    runs.write_text(run / "run.json", json.dumps({"params_file": "planted-secret-value"}))
    record(run, "train", "failed", error=f"planted-secret-value in {runs.repo_root()}/eagle3lib/x.py")
    page = text_of(run)
    assert "planted-secret-value" not in page and str(runs.repo_root()) not in page and "in eagle3lib/x.py" in page


@pytest.mark.parametrize("home", ["/", "/AAAA"])
def test_no_place_is_looked_for_within_pictures(run: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    monkeypatch.setenv("HOME", home)
    picture = "iVBORw0K/AAAA/AAAA//AAAA/w=="  # this is valid base64
    nbformat.write(new_notebook(cells=[new_code_cell("draw()", outputs=[outputs(**{"image/png": picture})])]), run / "04_train.ipynb")
    record(run, "verify", "failed", error="in /AAAA/x.py, see sftp://host//x")
    page = text_of(run)
    assert f'base64,{picture}"' in page
    assert ("in ~/x.py" if home == "/AAAA" else "in /AAAA/x.py, see sftp://host//x") in page


def test_the_index_lists_runs_the_latest_first(run: Path) -> None:
    other = run.parent / "20261202-bad"
    other.mkdir()
    record(other, "prepare", "failed", error="no rows", started="2026-12-02T06:00:00+00:00")
    report.write(run)
    (run.parent / "latest").symlink_to(other.name)
    (run.parent / "notes").mkdir()
    page = report.write_index(run.parent).read_text()
    assert "2 runs" in page and page.index("20261202-bad") < page.index("20261201-0931-good")
    assert "Failed in prepare" in page and "1.83" in page and f'href="{run.name}/report.html"' in page


@pytest.mark.parametrize("about", ["{", "[]", '{"started": 5}', '{"stages": 3, "status": "failed"}', '{"started": "yesterday", "git": 7}'])
def test_a_damaged_run_costs_its_own_row_only(run: Path, about: str) -> None:
    damaged = run.parent / "20261203-damaged"
    runs.write_text(damaged / "run.json", about)
    page = report.write_index(run.parent).read_text()
    assert "2 runs" in page and "20261203-damaged" in page and "1.83" in page and f'href="{run.name}/report.html"' not in page
    assert about != "{" or "cannot be read" in page


def test_a_start_that_is_no_date_is_shown_as_it_is(run: Path) -> None:
    for started in ("yesterday", 5):
        runs.write_json(run / "run.json", {"status": "ok", "started": started})
        assert f"started {started}" in text_of(run)


def test_an_endless_error_is_cut(run: Path) -> None:
    error = new_output("error", ename="E", evalue="v" * 3_000_000, traceback=["t" * 3_000_000, "last line of it"])
    nbformat.write(new_notebook(cells=[new_code_cell("fail()", outputs=[error])]), run / "04_train.ipynb")
    runs.write_json(runs.record_path(run, "train"), {"stage": "train", "status": "failed", "error": runs.one_line(ValueError("v" * 3_000_000))})
    page = text_of(run)
    assert len(page) < 1_700_000 and "last line of it" in page and "left out here, see the notebook of train" in page
    for limit in report.OUTPUT_LIMITS:
        assert len(report.build(run, limit)) < limit + 200_000


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("<p onclick='x()' class=a>hi &amp; &#8364;</p>", '<p class="a">hi &amp; &#8364;</p>'),
        ("a<script src=x>evil</script>b", "ab"),
        ("<img src='https://x/y.png' alt=y>", '<img alt="y">'),
        ("<img src='data:image/png;base64,AA'>", "<img src='data:image/png;base64,AA'>"),
        ("<a href='javascript:x()'>t</a>", '<a title="javascript:x()">t</a>'),
        ("<a href='#top'>t</a>", "<a href='#top'>t</a>"),
        ("<style>@import 'x'</style><b>t</b>", "<b>t</b>"),
        ("<p style='background: url(https://x)'>t</p>", "<p>t</p>"),
        ("<p style='color: red'>t</p>", "<p style='color: red'>t</p>"),
        ("<p style='background: u\\72l(//x/y)'>t</p>", "<p>t</p>"),
        ("<p style='background: -webkit-image-set(\"https://x/y\" 1x)'>t</p>", "<p>t</p>"),
        ('<svg><rect width="1" fill="url(https://x/y#a)"/></svg>', '<svg><rect width="1"></svg>'),
        ('<rect filter="url(&quot;https://x/y#a&quot;)">', "<rect>"),
        ('<rect fill="url(#a)" mask="url( \'#b\')" style="background: url(data:image/png;base64,AA)">',
         '<rect fill="url(#a)" mask="url( \'#b\')" style="background: url(data:image/png;base64,AA)">'),
        ('<img alt="C:\\x, by url(x)" src="data:image/png;base64,AA">', '<img alt="C:\\x, by url(x)" src="data:image/png;base64,AA">'),
        ("<iframe src='data:text/html,x'>t</iframe>u", "u"),
        ("<img src='data:text/html;base64,AA'>", "<img>"),
        ("<link rel=x href=y><meta a=b>t", "t"),
        ("a<!-- comment -->b", "ab"),
        ('<svg viewBox="0 0 1 1"><path d="M0"/></svg>', '<svg viewBox="0 0 1 1"><path d="M0"/></svg>'),
    ],
)
def test_harmless(given: str, kept: str) -> None:
    assert harmless(given) == kept
