"""Parameters: the cell that declares them, the YAML that sets them, and every way to get them wrong."""

from __future__ import annotations

import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from workbooks import workbook

from eagle3lib import params
from eagle3lib.errors import ParamError

CELL = """\
# a comment of its own line
rate: float = 1e-3  # learning rate
name: str = "a # b"  # a name [text]
sets: list[str] = ["x", "y"]  # sets to use
deep: bool = False  # go deep"""


@pytest.fixture(scope="module")
def notebooks(tmp_path_factory: pytest.TempPathFactory) -> params.Notebooks:
    return params.read_notebooks(workbook(tmp_path_factory.mktemp("book")))


def write(folder: Path, text: str, name: str = "x.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_cell_declares_name_type_default_meaning_and_unit() -> None:
    found = params.parse_cell(CELL, "n.ipynb")
    assert list(found) == ["rate", "name", "sets", "deep"]
    assert found["rate"] == params.Parameter("rate", "float", 1e-3, "learning rate", "", "n.ipynb")
    assert (found["name"].default, found["name"].meaning, found["name"].unit) == ("a # b", "a name", "text")
    assert found["sets"].type == "list[str]"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("rate = 1e-3  # no type", "name: type = literal"),
        ("rate: float = 1e-3", "meaning is missing"),
        ("rate: float = min(1, 2)  # m", "no literal"),
        ("rate: int | None = 3  # m", "none of str, int"),
        ("rate: int = 1.5  # m", "found 1.5 (float), wanted int"),
        ("a: int = 1  # m\na: int = 2  # m", "declared twice"),
        ("a: int = = 1  # m", "line 1"),
        ("import os", "name: type = literal"),
    ],
)
def test_a_cell_that_breaks_the_rule_is_refused(line: str, says: str) -> None:
    with pytest.raises(ParamError, match="n.ipynb") as caught:
        params.parse_cell(line, "n.ipynb")
    assert says in str(caught.value)


def test_a_notebook_without_a_parameters_cell_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, '{"cells": [{"cell_type": "code", "metadata": {}, "source": ["a: int = 1"]}]}', "01_prepare.ipynb")
    with pytest.raises(ParamError, match="01_prepare.ipynb: found 0 cells tagged"):
        params.read_notebook(path)


def test_exponents_are_floats_and_words_stay_words(tmp_path: Path) -> None:
    path = write(tmp_path, "lr: 1e-4\nbig: 3\nsay: no\nwhen: 12:30\n")
    assert params.load(path) == {"lr": 0.0001, "big": 3, "say": "no", "when": "12:30"}


def test_origins_and_widening(notebooks: params.Notebooks) -> None:
    settings = params.resolve(notebooks, {"lr": 1, "rows": 5}, {"rows": 7})
    assert settings["lr"] == params.Setting(1.0, "file") and type(settings["lr"].value) is float
    assert settings["rows"] == params.Setting(7, "override")
    assert settings["seed"] == params.Setting(0, "default")


def test_an_unknown_name_lists_the_nearest_and_all(notebooks: params.Notebooks) -> None:
    with pytest.raises(ParamError) as caught:
        params.resolve(notebooks, {"shard_mbs": 3}, {})
    text = str(caught.value)
    assert text.splitlines()[0] == "unknown parameter shard_mbs; nearest: shard_mb"
    assert "valid names: draft_steps, lr, parity_rows" in text


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("rows", "3", "found '3' (str), wanted int"),
        ("rows", True, "found True (bool), wanted int"),
        ("rows", 3.0, "found 3.0 (float), wanted int"),
        ("rows", np.int64(3), "numpy.int64"),
        ("lr", np.float64(0.1), "numpy.float64"),
        ("lr", "1e-4", "write it with a point, like 1.0e-4"),
        ("lr", float("nan"), "found nan, wanted a finite float"),
        ("lr", float("-inf"), "found -inf, wanted a finite float"),
        ("lr", True, "wanted float"),
        ("show", 1, "wanted bool"),
        ("texts", "a", "found 'a' (str), wanted list[str]"),
        ("texts", ["a", 2], "texts[1]: found 2 (int), wanted str"),
        ("texts", ("a", "b"), "give a list"),
        ("target_name", None, "unknown parameter"),
        ("run_dir", None, "leave the key out"),
        ("run_dir", Path("x"), "give a path as text"),
        ("run_dir", datetime.date(2026, 12, 1), "put quotes around it"),
        ("run_dir", {"a": 1}, "(dict), wanted str"),
    ],
)
def test_wrong_values_are_refused_by_name(notebooks: params.Notebooks, name: str, value: object, says: str) -> None:
    with pytest.raises(ParamError) as caught:
        params.resolve(notebooks, {}, {name: value})
    assert says in str(caught.value) and name in str(caught.value)


def test_the_error_names_every_notebook_that_uses_the_key(notebooks: params.Notebooks) -> None:
    with pytest.raises(ParamError, match="01_prepare.ipynb, 02_extract.ipynb"):
        params.resolve(notebooks, {"seed": "x"}, {})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: 1\na: 2\n", "duplicate"),
        ("- 1\n- 2\n", "found a list"),
        ("a: [1, 2\n", "line"),
        ("3: x\n", "key 3 is a int"),
        ("a: !!python/object/apply:os.system ['true']\n", "line 1"),
        ("extends: 3\n", "wanted the name of another params file"),
        ("extends: none.yaml\n", "none.yaml"),
        ("extends: x.yaml\n", "leads back to itself"),
    ],
)
def test_a_broken_file_is_refused_by_name_and_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ParamError) as caught:
        params.load(write(tmp_path, text))
    assert says in str(caught.value)


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(ParamError, match="No such file"):
        params.load(tmp_path / "gone.yaml")
    (tmp_path / "b.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParamError, match="cannot read"):
        params.load(tmp_path / "b.yaml")


def test_extends_is_relative_to_the_file_and_own_keys_win(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    write(tmp_path, "lr: 1\nrows: 1\n", "base.yaml")
    write(tmp_path / "deep", "extends: ../base.yaml\nrows: 2\n", "mid.yaml")
    assert params.load(write(tmp_path / "deep", "extends: mid.yaml\nseed: 3\n")) == {"lr": 1, "rows": 2, "seed": 3}


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert params.load(write(tmp_path, "# nothing yet\n")) == {}


def test_set_reads_yaml() -> None:
    assert params.parse_set(["lr=1e-4", "texts=[a, b]", "show=true", "run_dir="]) == {
        "lr": 1e-4,
        "texts": ["a", "b"],
        "show": True,
        "run_dir": "",
    }
    for wrong in (["lr"], ["=3"], ["a b=3"], ["lr=1", "lr=2"], ["lr=[1"]):
        with pytest.raises(ParamError, match="--set"):
            params.parse_set(wrong)


def test_conflicts_between_notebooks_are_found(tmp_path: Path) -> None:
    assert params.conflicts(params.read_notebooks(workbook(tmp_path / "good"))) == []
    bad = workbook(tmp_path / "bad", own={"train": "shard_mb: int = 65  # another default"})
    assert params.conflicts(params.read_notebooks(bad)) == ["shard_mb: int = 64 in 02_extract.ipynb, but int = 65 in 04_train.ipynb"]


@given(st.sampled_from(params.TYPES), st.one_of(st.integers(), st.floats(), st.booleans(), st.text(), st.none(), st.lists(st.integers())))
def test_a_value_arrives_as_it_was_or_is_refused(annotation: str, value: object) -> None:
    try:
        got = params.typed("p", annotation, value, "here")
    except ParamError:
        return
    assert got == value and isinstance(got, bool) == isinstance(value, bool)


@pytest.mark.parametrize(
    "text",
    ["lr: 1\0", "deep: !!bool maybe", "rows: " + "[" * 3000, "rows: !!int x", "\x07: 1", "a: &b *c", "d: !!timestamp 2026-99-99"],
    ids=["nul", "bool", "deep", "int", "bell", "anchor", "day"],
)
def test_text_that_is_no_yaml_is_one_line(tmp_path: Path, text: str) -> None:
    for read in (lambda: params.load(write(tmp_path, text)), lambda: params.parse_set([f"key={text}"])):
        with pytest.raises(ParamError) as caught:
            read()
        assert len(str(caught.value).splitlines()) == 1
