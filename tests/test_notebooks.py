"""The notebooks' form: prose with calls, one parameter a line, nothing left behind from a run."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import nbformat
import papermill
import pytest

from eagle3lib import params
from eagle3lib.params import STAGES

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "notebooks").glob("*.ipynb"))
PARAMETER = re.compile(r"^[a-z_0-9]+: [a-z\[\]]+ = [^#]+  # .+$")


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def test_there_is_one_notebook_for_each_stage():
    assert [p.stem for p in NOTEBOOKS] == [*(f"{n:02d}_{stage}" for n, stage in enumerate(STAGES, 1)), "06_compare"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
class TestForm:
    def test_first_cell_says_what_it_is_for(self, path):
        first = read(path).cells[0]
        assert first.cell_type == "markdown" and first.source.startswith("# ")
        for word in ("Purpose", "Reads", "Writes", "Takes", "memory", "Before · after"):
            assert word in first.source, f"{path.name}: the first cell lacks {word!r}"

    def test_second_cell_holds_typed_parameters_one_a_line(self, path):
        cell = read(path).cells[1]
        assert cell.metadata.get("tags") == ["parameters"]
        for line in cell.source.splitlines():
            assert PARAMETER.match(line), f"{path.name}: {line!r} is not `name: type = literal  # meaning [unit]`"

    def test_papermill_reads_every_parameter(self, path):
        """A line with a second "=" is skipped by its inspector with a warning in every log (docs of papermill say nothing of it)."""
        declared = [line.split(":")[0] for line in read(path).cells[1].source.splitlines()]
        assert list(papermill.inspect_notebook(str(path))) == declared

    def test_cells_are_short_calls_without_definitions(self, path):
        for cell in read(path).cells:
            if cell.cell_type == "code" and "parameters" not in cell.metadata.get("tags", []):
                assert len(cell.source.splitlines()) <= 15, f"{path.name}: a cell of {len(cell.source.splitlines())} lines"
                assert not [n for n in ast.walk(ast.parse(cell.source)) if isinstance(n, (ast.FunctionDef, ast.ClassDef, ast.Lambda))]

    def test_nothing_is_left_from_a_run(self, path):
        notebook = read(path)
        assert notebook.metadata.kernelspec.name == "python3" and "papermill" not in notebook.metadata
        for cell in notebook.cells:
            assert not cell.get("outputs") and cell.get("execution_count") is None
            assert not re.search(r"['\"]/(home|root|tmp|mnt|work|data)", cell.source), "an absolute path"

    def test_checks_and_metrics_come_last(self, path):
        code = [c.source for c in read(path).cells if c.cell_type == "code"]
        if path.stem == "06_compare":  # no stage: it reads other runs and writes nothing
            assert "checks.raise_failed()" in code[-1] and code[-1].endswith("checks.table()")
        else:
            assert code[-1].startswith("stage.finish(") and "stage.checks.table()" in code[-2]


def test_a_name_means_the_same_in_every_notebook():
    assert not params.conflicts(params.read_notebooks(NOTEBOOKS[0].parent))


@pytest.mark.parametrize("file", sorted((NOTEBOOKS[0].parents[1] / "params").glob("*.yaml")), ids=lambda p: p.stem)
def test_every_params_file_fits_the_notebooks(file):
    settings = params.resolve(params.read_notebooks(NOTEBOOKS[0].parent), params.load(file), {})
    assert any(s.origin == "file" for s in settings.values())
