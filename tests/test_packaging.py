"""One place owns the versions: pyproject.toml. environment.yml, make and the installed packages agree with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
NO_DEPS = PROJECT["tool"]["eagle3"]["no-deps"]


def requirements(*lists: list[str]) -> dict[str, Requirement]:
    return {canonicalize_name(r.name): r for r in map(Requirement, sum(lists, []))}


def environment_lines() -> list[str]:
    content = YAML(typ="safe").load((ROOT / "environment.yml").read_text())
    return next(d["pip"] for d in content["dependencies"] if isinstance(d, dict))


def test_environment_yml_names_the_users_packages_and_agrees_with_pyproject():
    extras = PROJECT["project"]["optional-dependencies"]
    owned = requirements(PROJECT["project"]["dependencies"], extras["gpu"])
    lines = [line for line in environment_lines() if not line.startswith("-e")]
    named = requirements(lines)
    assert {"jupyterlab", "papermill", "torch", "sglang", "datasets", "matplotlib"} <= set(named)
    assert {n: str(r.specifier) for n, r in named.items()} == {n: str(owned[n].specifier) for n in named}
    editable = [line for line in environment_lines() if line.startswith("-e")]
    assert editable == ["-e .[gpu,dev]"] and {"gpu", "dev"} <= set(extras)


def test_the_gpu_and_the_cpu_engine_are_the_same_version():
    gpu = requirements(PROJECT["project"]["optional-dependencies"]["gpu"])["sglang"]
    assert requirements(NO_DEPS["engine"])["sglang"].specifier == gpu.specifier


def test_what_is_installed_is_what_pyproject_names():
    """Runs in the environment that make built, so a pin that make does not follow is seen here."""
    extras = PROJECT["project"]["optional-dependencies"]
    for name, requirement in requirements(PROJECT["project"]["dependencies"], extras["cpu"], extras["dev"], *NO_DEPS.values()).items():
        installed = importlib.metadata.version(name)
        assert requirement.specifier.contains(installed, prereleases=True), f"{name} {installed}, pyproject.toml wants {requirement.specifier}"


def test_no_version_is_pinned_anywhere_else():
    files = [ROOT / "Makefile", ROOT / ".ci/run", *sorted((ROOT / "tools").glob("*.py"))]
    for file in files:
        assert not re.search(r"[a-z]==\d", file.read_text()), f"{file.name} pins a version; pyproject.toml owns them"


def test_set_up_is_idempotent_and_refuses_other_pythons():
    again = subprocess.run([sys.executable, "tools/install.py", "cpu"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert again.returncode == 0 and "up to date" in again.stdout, again.stdout + again.stderr
    wrong = subprocess.run([sys.executable, "tools/install.py", "tpu"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert wrong.returncode != 0 and "cpu" in wrong.stderr


def test_what_is_edited_while_pip_runs_is_installed_the_next_time(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("install", ROOT / "tools/install.py")
    install = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(install)
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "stamp", lambda kind: tmp_path / "stamp")
    calls = []

    def pip(what, *arguments):
        calls.append(arguments)
        edited = (tmp_path / "pyproject.toml").read_text().replace("papermill==", "papermill==9", 1)
        (tmp_path / "pyproject.toml").write_text(edited)

    monkeypatch.setattr(install, "pip", pip)
    install.main("data")
    assert len(calls) == 1 and not install.is_done("data")
    monkeypatch.setattr(install, "pip", lambda *_: calls.append(()))
    install.main("data")
    assert len(calls) == 2 and install.is_done("data")


@pytest.mark.parametrize("goal", ["run", "test"])
def test_the_two_commands_set_up_first(goal):
    plan = subprocess.run(["make", "-n", goal], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert plan.index("tools/install.py") < plan.index("eagle3lib run" if goal == "run" else "pytest")


def test_make_finds_a_fitting_python_and_says_so_when_there_is_none(tmp_path):
    plan = subprocess.run(["make", "-n", "setup", f"VENV={tmp_path}/none"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (line,) = [line for line in plan.splitlines() if "-m venv" in line]
    found = subprocess.run([line.split()[0], "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True, check=True).stdout
    assert found.strip() in ("(3, 11)", "(3, 12)")
    none = subprocess.run(["make", "setup", f"VENV={tmp_path}/none", "PYTHON="], cwd=ROOT, capture_output=True, text=True)
    assert none.returncode != 0 and "Python 3.11 or 3.12 is needed" in none.stdout


def test_ci_runs_make_test():
    assert "make test" in (ROOT / ".ci/run").read_text().splitlines()
