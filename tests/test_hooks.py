"""What keeps the repository clean works: the pre-commit hooks on a dirty notebook, the type checker and the rules in `make test`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_output

ROOT = Path(__file__).resolve().parents[1]


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300, env={**env, "PRE_COMMIT_HOME": str(folder / ".hooks")})


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A git repository with our hooks and our notebooks, which pass them as they are."""
    shutil.copy(ROOT / ".pre-commit-config.yaml", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(ROOT / "notebooks", tmp_path / "notebooks", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".gitignore").write_text(".venv\n.hooks\n")
    run(tmp_path, "git", "init", "-q")
    run(tmp_path, "git", "config", "user.email", "tests@example.org")
    run(tmp_path, "git", "config", "user.name", "tests")
    run(tmp_path, "git", "add", "-A")
    assert run(tmp_path, sys.executable, "-m", "pre_commit", "install").returncode == 0
    done = run(tmp_path, "git", "commit", "-q", "-m", "clean")
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path


def test_a_dirty_notebook_is_stripped_before_it_is_committed(clone: Path) -> None:
    path = clone / "notebooks/03_verify.ipynb"
    clean = path.read_text()
    book = nbformat.read(path, as_version=4)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    code[1].outputs, code[1].execution_count = [new_output("stream", text="a secret of mine")], 7
    code[1].metadata["execution"] = {"iopub.execute_input": "2026-12-01T00:00:00Z"}
    book.metadata["papermill"] = {"input_path": "/home/me/03_verify.ipynb"}
    nbformat.write(book, path)
    run(clone, "git", "add", "-A")
    refused = run(clone, "git", "commit", "-m", "dirty")
    assert refused.returncode != 0 and "files were modified by this hook" in refused.stdout + refused.stderr
    assert path.read_text() == clean


def test_a_fault_in_a_notebook_or_a_module_is_refused(clone: Path) -> None:
    path = clone / "notebooks/03_verify.ipynb"
    path.write_text(path.read_text().replace("stage = runs.begin", "import json\\n\",\n    \"stage = runs.begin", 1))
    nbformat.read(path, as_version=4)
    (clone / "loose.py").write_text("import os\n")
    run(clone, "git", "add", "-A")
    refused = run(clone, "git", "commit", "-m", "loose ends")
    said = refused.stdout + refused.stderr
    assert refused.returncode != 0 and "`json` imported but unused" in said and "`os` imported but unused" in said


def test_make_test_checks_rules_types_and_coverage() -> None:
    plan = run(ROOT, "make", "-n", "test").stdout
    assert plan.index("ruff check") < plan.index("mypy") < plan.index("pytest --cov=eagle3lib")


def test_warnings_are_errors_here() -> None:
    import warnings

    with pytest.raises(UserWarning):
        warnings.warn("loud", UserWarning, stacklevel=1)
