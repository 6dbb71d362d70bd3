"""Open a stage of a run in JupyterLab: its notebook with that run's parameters and folder filled in.

The stages before it are already in the run folder. Where the run stopped, a heading stands in front of the cell, the top of
the notebook links to it, and running the cells above it loads everything that the failing cell worked on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbformat.v4 import new_markdown_cell

from eagle3lib import params, runs
from eagle3lib.compare import run_params
from eagle3lib.errors import ParamError

HOW = "Select it and choose Run > Run All Above Selected Cell: its inputs are then loaded as they were."


def write(run: Path, stage: str, notebooks: Path | None = None) -> Path:
    """Write <run>/open_NN_<stage>.ipynb and return its path. ParamError when there is no such stage."""
    source = params.notebook_path(Path(notebooks or runs.notebooks_dir()), stage)
    if stage not in params.STAGES or source is None:
        raise ParamError(f"unknown stage {stage}; the stages are {', '.join(params.STAGES)}")
    book = nbformat.read(source, as_version=4)
    values = {**run_params(run), "run_dir": runs.show_path(run)}
    for cell in book.cells:
        if "parameters" in cell.metadata.get("tags", []):
            cell.source = fill(cell.source, params.parse_cell(cell.source, source.name), values)
    _mark_failure(book, run / source.name, runs.read_record(run, stage))
    path = run / f"open_{source.name}"
    runs.write_text(path, nbformat.writes(book))
    return path


def fill(source: str, declared: dict[str, params.Parameter], values: dict[str, Any]) -> str:
    """A parameters cell with these values in place of the defaults; types and meanings stay."""
    lines = []
    for line in source.splitlines():
        p = declared.get(line.partition(":")[0].strip())
        if p and values.get(p.name, p.default) != p.default:
            unit = f" [{p.unit}]" if p.unit else ""
            line = f"{p.name}: {p.type} = {values[p.name]!r}  # {p.meaning}{unit}"
        lines.append(line)
    return "\n".join(lines)


def _mark_failure(book: Any, executed: Path, record: dict[str, Any]) -> None:
    """Put a line in front of the cell at which the executed notebook stopped."""
    if record.get("status", "ok") == "ok" or not executed.exists():
        return
    try:
        cells = nbformat.read(executed, as_version=4).cells
    except Exception:  # cut off by a kill: nbformat raises many kinds
        return
    failed = next((c for c in cells if any(o.output_type == "error" for o in c.get("outputs", []))), None)
    places = [i for i, c in enumerate(book.cells) if failed and c.source == failed.source]
    if places:
        text = f"## The run stopped here\n**{record['status']}**: {record.get('error', '')}\n\nThe next cell is the one that failed. {HOW}"
        book.cells.insert(places[0], new_markdown_cell(text))
        book.cells[0].source += f"\n\n**This run {record['status']}: [see the cell](#The-run-stopped-here).** {HOW}"
