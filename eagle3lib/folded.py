"""Executed notebooks as parts of the report: outputs shown, code folded, nothing that runs or loads."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from eagle3lib.console import size
from eagle3lib.harmless import harmless

ERROR_LIMIT = 2_000  # characters of an error's message


def notebook(run: Path, stage: str, output_limit: int) -> str:
    """The stage's executed notebook as HTML, code folded; "" when there is none."""
    book = _read(run, stage)
    if book is None:
        return ""
    book.cells = list(_merged(book.cells))
    for cell in book.cells:
        for output in cell.get("outputs", []):
            _shorten(output, output_limit, stage)
    body, _ = exporter().from_notebook_node(book)
    body = re.sub(r'href="\d\d_([a-z]+)\.ipynb"', r'href="#\1"', body)  # another stage is a section of this page
    without_title = re.sub(r"<h1\b.*?</h1>", "", harmless(body), count=1, flags=re.DOTALL)
    return _lower_headings(without_title)


def first_figure(run: Path, stage: str) -> str:
    """The first picture of a stage's executed notebook; "" when it has none."""
    book = _read(run, stage)
    for cell in book.cells if book else []:
        for output in cell.get("outputs", []):
            if png := output.get("data", {}).get("image/png"):
                alt = output.metadata.get("image/png", {}).get("alt", "figure")
                return f'<figure><img alt="{html.escape(alt)}" src="data:image/png;base64,{png.strip()}"></figure>'
    return ""


def _read(run: Path, stage: str) -> Any:
    """The executed notebook without its parameter cells (they have a table of their own); None when it cannot be read."""
    import nbformat

    path = next(iter(run.glob(f"[0-9][0-9]_{stage}.ipynb")), None)
    try:
        book = nbformat.read(path, as_version=4) if path else None
    except Exception:  # a file cut off by a kill: nbformat raises many kinds
        return None
    if book:
        tags = {"parameters", "injected-parameters", "papermill-error-cell-tag"}
        book.cells = [c for c in book.cells if not tags & set(c.metadata.get("tags", []))]
    return book


def _merged(cells: Iterable[Any]) -> Iterable[Any]:
    """Cells that showed nothing join the next one, so that there is one fold of code for one thing to see."""
    silent: list[str] = []
    for cell in cells:
        if cell.cell_type == "code" and not cell.get("outputs"):
            silent.append(cell.source)
            continue
        if cell.cell_type == "code":
            cell.source = "\n\n".join([*silent, cell.source])
            silent = []
        yield cell


def _shorten(output: Any, limit: int, stage: str) -> None:
    """Replace what is too large for the page, keep images and text alternatives in order."""
    if output.output_type == "stream" and len(output.text) > limit:
        cut = len(output.text) - limit
        output.text = f"[{size(cut)} of output left out here, see the notebook of {stage}]\n{output.text[-limit:] if limit else ''}"
    for part, most in (("traceback", limit), ("evalue", ERROR_LIMIT)) if output.output_type == "error" else ():
        whole = "\n".join(output[part]) if part == "traceback" else output[part]
        if len(whole) > most:
            shown = f"[{size(len(whole) - most)} left out here, see the notebook of {stage}]\n{whole[-most:] if most else ''}"
            output[part] = shown.splitlines() if part == "traceback" else shown
    for kind, data in list(output.get("data", {}).items()):
        if kind.startswith("application/"):
            del output.data[kind]  # scripts and widgets do not work on a page that runs nothing
        elif len(str(data)) > limit:
            del output.data[kind]
            output.data["text/plain"] = f"[an output of {size(len(str(data)))} is left out here, see the notebook of {stage}]"
        elif kind.startswith("image/"):
            about = output.metadata.setdefault(kind, {})
            about.setdefault("alt", str(output.data.get("text/plain", "figure")).strip("<>") if kind != "image/svg+xml" else "figure")


def _lower_headings(body: str) -> str:
    """A notebook's h1 is a subsection here."""
    return re.sub(r"<(/?)h([1-4])\b", lambda m: f"<{m[1]}h{min(int(m[2]) + 2, 5)}", body)


FOLDED = """{%- extends 'basic/index.html.j2' -%}
{% block input %}{% if cell.source.strip() %}<details class="code"><summary>code</summary>
{{ super() }}</details>{% endif %}{% endblock input %}
{% block data_svg scoped %}<img alt="{{ (output | get_metadata('alt', 'image/svg+xml')) or 'figure' }}"
src="data:image/svg+xml;base64,{{ output.data['image/svg+xml'] | text_base64 }}">{% endblock data_svg %}"""


@cache
def exporter() -> Any:
    """nbconvert's HTML exporter: only the body, no prompts, code in <details>."""
    from jinja2 import DictLoader
    from nbconvert import HTMLExporter

    return HTMLExporter(
        extra_loaders=[DictLoader({"folded.html.j2": FOLDED})],
        template_file="folded.html.j2",
        exclude_input_prompt=True,
        exclude_output_prompt=True,
        exclude_anchor_links=True,
    )


@cache
def code_style() -> str:
    """Colours of code."""
    from pygments.formatters import HtmlFormatter

    return "\n".join(line for line in HtmlFormatter(style="friendly").get_style_defs(".highlight").splitlines() if "background" not in line)
