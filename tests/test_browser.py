"""JupyterLab as a user sees it: 01_prepare in a real browser, with live progress, its figure, and a failing check as one red line.

Screenshots of both stay in artifacts/ (ignored by git; the first one is in the README).
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import nbformat
import pytest
from labs import Lab, prepare_environment
from tiny import tiny_target

from eagle3lib import openrun, params, runs

ROOT = Path(__file__).resolve().parents[1]
ARTIFACTS = ROOT / "artifacts"
pytestmark = pytest.mark.skipif(not browser.chromium(), reason="no chromium here; on Debian: apt-get install chromium (.ci/run does so)")

# Every state of every output, as the page showed it.
WATCH = """(() => { window.seen = new Set();
new MutationObserver(() => document.querySelectorAll('.jp-OutputArea-output pre').forEach(p => window.seen.add(p.textContent)))
.observe(document.body, {childList: true, subtree: true, characterData: true}); return true; })()"""
RESTING = "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status == 'idle'"
IDLE = "[...document.querySelectorAll('.jp-StatusBar-TextItem')].some(item => item.textContent.endsWith('| Idle'))"
PROMPTS = "[...document.querySelectorAll('.jp-CodeCell .jp-InputPrompt')].map(p => p.textContent)"
ERROR, STDERR = '[data-mime-type="application/vnd.jupyter.error"]', '[data-mime-type="application/vnd.jupyter.stderr"]'
OVER = f"{IDLE} && !{PROMPTS}.some(p => p.includes('*'))"
BAR = re.compile(r"^(answer): +(\d+)%", re.MULTILINE)


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[browser.Page, Callable[[str], str], Path]]:
    """A page, JupyterLab's addresses, and the folder with two copies of 01_prepare: one to succeed, one to fail a check."""
    folder = tmp_path_factory.mktemp("browser")
    books = folder / "notebooks"
    books.mkdir()
    small = {"target": str(tiny_target(folder / "target")), "max_new_tokens": 24, "max_tokens": 300, "heldout_share": 0.1, "draft_vocab": 256}
    fill(books / "01_prepare.ipynb", {**small, "run_dir": str(folder / "good"), "max_prompts": 60})
    talk = folder / "talk.jsonl"
    talk.write_text("".join(json.dumps({"prompt": f"What is {n} and {n}?", "response": f"It is {2 * n}, I think."}) + "\n" for n in range(30)))
    nobody = {"run_dir": str(folder / "bad"), "prompts": [str(talk)], "answer": "data", "heldout_share": 0.0, "max_prompts": 0}
    fill(books / "01_failing.ipynb", {**small, **nobody})
    with browser.lab(books, folder) as address, browser.browser(folder) as page:
        yield page, address, folder


def fill(path: Path, values: dict[str, Any]) -> None:
    """01_prepare with these values typed into its parameters cell."""
    book = nbformat.read(ROOT / "notebooks/01_prepare.ipynb", as_version=4)
    cell = book.cells[1]
    cell.source = openrun.fill(cell.source, params.parse_cell(cell.source, path.name), values)
    nbformat.write(book, path)


def run_all(page: browser.Page, address: Callable[[str], str], name: str) -> None:
    """Open a notebook and choose Run > Run All Cells, as a user does; returns when it stands still again."""
    page.goto(address(name))
    page.wait(f"{PROMPTS}.length > 5 && {RESTING}")
    page.click(".lm-DockPanel-tabBar .lm-TabBar-tabLabel", name)  # menus and status bar follow the notebook that has the focus
    page.wait(IDLE)
    page.js(WATCH)
    for _ in range(3):  # a click while the page is still arranging itself may go nowhere
        page.press("Escape")
        page.click(".lm-MenuBar-itemLabel", "Run")
        page.click(".lm-Menu-itemLabel", "Run All Cells")
        with contextlib.suppress(AssertionError):
            page.wait(f"{PROMPTS}.some(p => /[0-9*]/.test(p))", 20)
            break
    try:
        page.wait(OVER)
    finally:
        page.screenshot(ARTIFACTS / "lab-last-state.png")


def show(page: browser.Page, element: str, name: str) -> None:
    """Scroll to an element and keep a picture of the window."""
    page.js(f"({element}).scrollIntoView({{block: 'center'}})")
    page.js("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    page.screenshot(ARTIFACTS / name)


def test_run_all_shows_live_progress_and_the_figure(workplace: tuple[browser.Page, Callable[[str], str], Path]) -> None:
    page, address, folder = workplace
    run_all(page, address, "01_prepare.ipynb")
    assert not page.js(f"[...document.querySelectorAll({ERROR!r})].map(e => e.textContent)")
    assert runs.read_record(folder / "good", "prepare")["status"] == "ok"
    states = {m[2] for text in page.js("[...window.seen]") for m in BAR.finditer(text)}
    assert len(states) >= 2 and "100" in states, f"the bar was seen at {sorted(states)} % only"
    now = page.js("[...document.querySelectorAll('.jp-OutputArea-output pre')].map(p => p.textContent).join('\\n')")
    assert [m[2] for m in BAR.finditer(now)] == ["100"], "the bar was not updated in place"
    figures = "[...document.querySelectorAll('.jp-OutputArea-output img')].filter(i => i.naturalWidth > 300 && i.naturalHeight > 150)"
    assert page.js(f"{figures}.length") >= 2
    show(page, f"{figures}[0]", "lab.png")


def test_a_failing_check_is_one_red_line(workplace: tuple[browser.Page, Callable[[str], str], Path]) -> None:
    page, address, folder = workplace
    run_all(page, address, "01_failing.ipynb")
    assert runs.read_record(folder / "bad", "prepare")["status"] == "failed"
    errors = f"[...document.querySelectorAll({ERROR!r}), ...document.querySelectorAll({STDERR!r})]"
    said = page.js(f"{errors}.map(e => e.textContent.trim())")
    assert len(said) == 1, said
    text = said[0]
    assert text.startswith("CheckFailed: check failed: rows held out: measured 0, limit 1 to ") and len(text.splitlines()) == 1
    red = page.js(f"getComputedStyle({errors}[0].querySelector('.ansi-red-fg')).color")
    r, g, b = map(int, re.findall(r"\d+", red)[:3])
    assert r > 150 > max(g, b), red
    assert "Traceback" not in page.js("document.body.textContent")
    show(page, f"{errors}[0]", "lab-failed-check.png")


DRAW = "from eagle3lib import plots\nplots.token_histogram([10, 20, 30], [5, 8, 9])"


def test_the_report_opens_offline_and_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a reader gets it: a file, alone in a folder, in a browser."""
    prepare_environment(monkeypatch)
    run = Lab(tmp_path / "lab", {"prepare": DRAW, "verify": "1 / 0"}).run(run_id="r").dir
    page_file = tmp_path / "alone" / "report.html"
    page_file.parent.mkdir()
    shutil.copy(run / "report.html", page_file)
    with browser.browser(tmp_path) as page:
        page.goto(page_file.as_uri())
        assert page.js("performance.getEntriesByType('resource').map(r => r.name).filter(n => !n.startsWith('data:'))") == []
        assert page.js("[...document.images].map(i => [i.naturalWidth > 300, i.alt.length > 20])") == [[True, True]]
        assert page.js("document.querySelectorAll('details.code').length") >= 3
        assert page.js("[...document.querySelectorAll('details.code')].every(d => !d.open)")
        assert page.js("document.documentElement.scrollWidth <= window.innerWidth"), "the page is wider than the window"
        above = page.js("document.querySelector('.verdict').getBoundingClientRect().bottom")
        assert above < 400 and "Failed in verify" in page.js("document.querySelector('.verdict').innerText")
        page.screenshot(ARTIFACTS / "report.png")
        pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=False)["data"])
    (ARTIFACTS / "report.pdf").write_bytes(pdf)
    assert pdf.startswith(b"%PDF") and 1 <= len(re.findall(rb"/Type */Page\b", pdf)) <= 4
