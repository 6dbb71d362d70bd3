"""Small notebooks for tests of the runner: the five stages, each a parameters cell, begin, a body, finish."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from eagle3lib.params import STAGES

COMMON = 'run_dir: str = ""  # run folder; empty: the one that the runner names\nseed: int = 0  # seed of everything random'
OWN = {
    "prepare": 'rows: int = 3  # rows to make [rows]\ntexts: list[str] = ["a", "b"]  # what the rows say',
    "extract": "shard_mb: int = 64  # shard size [MB]",
    "verify": "parity_rows: int = 2  # rows to compare [rows]",
    "train": "lr: float = 1e-3  # learning rate\nshow: bool = False  # draw",
    "evaluate": "draft_steps: int = 5  # chain length [tokens]",
}
# Each stage adds up what it was told with what the stage before left, so that results show what they were made from.
BODY = """\
before = stage.path("{before}.txt").read_text() if "{before}" else ""
stage.path("{name}.txt").write_text(before + f"{name} {{stage.params}};")
stage.checks.add("{name} sum", True, 1, 1, "a wrong sum", "add again")"""


def workbook(folder: Path, bodies: Mapping[str, str] | None = None, own: Mapping[str, str] | None = None) -> Path:
    """Write 01_prepare.ipynb ... 05_evaluate.ipynb; bodies[stage] goes before the ordinary body of a stage."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(STAGES, 1):
        before = STAGES[number - 2] if number > 1 else ""
        cells = [
            new_markdown_cell(f"# {number} · {name}\n\nA stage of the test workbook."),
            new_code_cell(f"{COMMON}\n{(own or {}).get(name, OWN[name])}", metadata={"tags": ["parameters"]}),
            new_code_cell(f'from eagle3lib.runs import begin\n\nstage = begin("{name}", globals())'),
            *([new_code_cell(bodies[name])] if bodies and name in bodies else []),
            new_code_cell(BODY.format(name=name, before=before)),
            new_code_cell("stage.finish(length=len(before) + 1)"),
        ]
        book = new_notebook(cells=cells, metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}})
        nbformat.write(book, folder / f"{number:02d}_{name}.ipynb")
    return folder
