"""Parameters: what a notebook may be told, and what it was told.

A notebook's cell tagged `parameters` holds one `name: type = literal  # meaning [unit]` a line. That cell is the only
place that defines a parameter. A params file is flat YAML and may hold keys of any stage's notebook; a key means the
same thing in all of them. Everything is checked before a kernel starts.
"""

from __future__ import annotations

import ast
import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path, PurePath
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from eagle3lib.errors import ParamError

STAGES = ("prepare", "extract", "verify", "train", "evaluate")
TYPES = ("str", "int", "float", "bool", "list[str]", "list[int]", "list[float]")
RESERVED = ("extends", "sweep")  # keys of a params file that are no notebook parameters


@dataclass(frozen=True)
class Parameter:
    name: str
    type: str  # one of TYPES
    default: Any
    meaning: str
    unit: str
    notebook: str  # file name of the notebook that declares it

    @property
    def where(self) -> str:
        return f"parameter of {self.notebook}"


@dataclass(frozen=True)
class Setting:
    value: Any
    origin: str  # "default" (the notebook's), "file" (the params file's) or "override" (the command line's)


Notebooks = dict[str, dict[str, Parameter]]  # stage -> name -> Parameter


# ---- what the notebooks declare ----


def notebook_path(folder: Path, stage: str) -> Path | None:
    """The stage's notebook `NN_<stage>.ipynb` in folder; None when there is none."""
    return next(iter(sorted(Path(folder).glob(f"[0-9][0-9]_{stage}.ipynb"))), None)


def read_notebooks(folder: Path) -> Notebooks:
    """The declared parameters of every stage's notebook in folder, in the order of the stages."""
    paths = {stage: notebook_path(folder, stage) for stage in STAGES}
    found = {stage: read_notebook(path) for stage, path in paths.items() if path}
    if not found:
        raise ParamError(f"{folder}: no notebook named like 01_prepare.ipynb in this folder")
    return found


def read_notebook(path: Path) -> dict[str, Parameter]:
    """The parameters that one notebook declares. ParamError when it has no cell tagged `parameters`."""
    try:
        cells = json.loads(Path(path).read_text(encoding="utf-8"))["cells"]
    except (ValueError, KeyError, TypeError) as err:
        raise ParamError(f"{path}: not a notebook ({err})") from None
    tagged = [c for c in cells if "parameters" in c.get("metadata", {}).get("tags", [])]
    if len(tagged) != 1:
        raise ParamError(
            f"{Path(path).name}: found {len(tagged)} cells tagged `parameters`, wanted one; tag the cell that holds the parameters"
        )
    return parse_cell("".join(tagged[0]["source"]), Path(path).name)


def parse_cell(source: str, notebook: str) -> dict[str, Parameter]:
    """Parse a parameters cell. ParamError names the line that breaks the rule of the module's docstring."""
    try:
        statements = ast.parse(source).body
    except SyntaxError as err:
        raise ParamError(f"{notebook}: parameters cell, line {err.lineno}: {err.msg}") from None
    lines = source.splitlines()
    found: dict[str, Parameter] = {}
    for statement in statements:
        line = lines[statement.lineno - 1]
        parameter = _parse_line(statement, line, notebook)
        if parameter.name in found:
            raise ParamError(f"{notebook}: parameter {parameter.name} is declared twice")
        found[parameter.name] = parameter
    return found


def _parse_line(statement: ast.stmt, line: str, notebook: str) -> Parameter:
    rule = f"{notebook}: parameters cell: `{line.strip()}`: wanted one `name: type = literal  # meaning [unit]`"
    if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name) or statement.value is None:
        raise ParamError(rule)
    name, annotation = statement.target.id, ast.unparse(statement.annotation)
    if annotation not in TYPES:
        raise ParamError(f"{rule}; the type {annotation} is none of {', '.join(TYPES)}")
    try:
        value = ast.literal_eval(statement.value)
    except ValueError:
        raise ParamError(f"{rule}; the value is no literal") from None
    # The comment follows the value, so a '#' inside a text literal is not mistaken for it.
    comment = line.encode()[statement.end_col_offset or 0 :].decode().partition("#")[2].strip()
    match = re.fullmatch(r"(.+?)(?:\s*\[([^\[\]]+)\])?", comment)
    if not match:
        raise ParamError(f"{rule}; the meaning is missing")
    return Parameter(name, annotation, typed(name, annotation, value, f"default in {notebook}"), match[1], match[2] or "", notebook)


def conflicts(notebooks: Notebooks) -> list[str]:
    """Keys that two notebooks declare with another type or default, one readable line each (empty: all agree)."""
    first: dict[str, Parameter] = {}
    lines = []
    for declared in notebooks.values():
        for p in declared.values():
            other = first.setdefault(p.name, p)
            if (p.type, p.default) != (other.type, other.default):
                there, here = (f"{q.type} = {q.default!r} in {q.notebook}" for q in (other, p))
                lines.append(f"{p.name}: {there}, but {here}")
    return lines


# ---- values ----


def typed(name: str, annotation: str, value: Any, where: str) -> Any:
    """Return value as its annotation wants it (an int becomes a float where a float is wanted), or raise ParamError.

    Types match exactly: no bool for an int, no numpy scalar for a float, no NaN or infinity at all.
    """
    if not annotation.startswith("list["):
        return _scalar(name, annotation, value, where)
    if type(value) is not list:
        raise _wrong(name, annotation, value, where)
    return [_scalar(f"{name}[{i}]", annotation[5:-1], item, where) for i, item in enumerate(value)]


def _scalar(name: str, annotation: str, value: Any, where: str) -> Any:
    if annotation == "float" and type(value) is int:
        return float(value)
    if type(value).__name__ != annotation or type(value).__module__ != "builtins":
        raise _wrong(name, annotation, value, where)
    if annotation == "float" and not math.isfinite(value):
        raise ParamError(f"{name}: found {value}, wanted a finite float ({where})")
    return value


def _wrong(name: str, annotation: str, value: Any, where: str) -> ParamError:
    kind = type(value)
    found = kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
    hint = _hint(annotation, value)
    return ParamError(f"{name}: found {value!r} ({found}), wanted {annotation} ({where}){f'; {hint}' if hint else ''}")


def _hint(annotation: str, value: Any) -> str:
    if value is None:
        return "leave the key out to get the default"
    if isinstance(value, PurePath):
        return "give a path as text"
    if isinstance(value, date):
        return "put quotes around it if it is text"
    if isinstance(value, (tuple, set)):
        return "give a list"
    if isinstance(value, str) and annotation == "float" and re.fullmatch(r"[+-]?\d+[eE][+-]?\d+", value):
        return "plain papermill reads this as text; write it with a point, like 1.0e-4"
    if isinstance(value, (str, int, float, bool)) and annotation == "str":
        return "put quotes around it"
    return ""


# ---- what the user gave ----


def load(path: Path, _seen: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Read a params file: flat YAML 1.2, own keys over those of the file named by `extends` (relative to this file)."""
    path = Path(path).resolve()
    if path in _seen:
        raise ParamError(f"{path.name}: `extends` leads back to itself: {' -> '.join(p.name for p in (*_seen, path))}")
    values = _read_yaml(path)
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ParamError(f"{path.name}: extends: found {base!r}, wanted the name of another params file")
    return {**load(path.parent / base, (*_seen, path)), **values}


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as err:
        raise ParamError(f"{path}: cannot read the params file: {getattr(err, 'strerror', None) or err}") from None
    values = parse_yaml(text, path.name)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ParamError(f"{path.name}: found a {type(values).__name__}, wanted `key: value` lines")
    for key in values:
        if not isinstance(key, str):
            raise ParamError(f"{path.name}: key {key!r} is a {type(key).__name__}, wanted a parameter's name")
    return values


def parse_yaml(text: str, where: str) -> Any:
    """YAML 1.2 without tags (1e-4 is a float, `no` is text); a key given twice is an error."""
    try:
        return YAML(typ="safe", pure=True).load(text)
    except MarkedYAMLError as err:
        line = f", line {err.problem_mark.line + 1}" if err.problem_mark else ""
        problem = (err.problem or str(err)).strip().splitlines()[0]
        raise ParamError(f"{where}{line}: {problem}") from None
    except RecursionError:
        raise ParamError(f"{where}: nested too deeply") from None
    except KeyError as err:  # `!!bool maybe`
        raise ParamError(f"{where}: {err} does not fit its tag") from None
    except (YAMLError, ValueError, OverflowError) as err:  # a character that YAML has not, a number that Python has not
        raise ParamError(f"{where}: {(str(err).strip().splitlines() or ['cannot be read'])[0]}") from None


def dump(values: Mapping[str, Any], comments: Mapping[str, str] | None = None) -> str:
    """values as lines of a params file; every JSON value is YAML."""
    notes = {name: f"  # {text}" for name, text in (comments or {}).items()}
    return "".join(f"{name}: {json.dumps(value, ensure_ascii=False)}{notes.get(name, '')}\n" for name, value in values.items())


def parse_set(items: list[str]) -> dict[str, Any]:
    """`["lr=1e-3", "eval_sets=[gsm8k]"]` -> values, each read as YAML."""
    values: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip().isidentifier():
            raise ParamError(f"--set {item}: wanted --set key=value")
        if key.strip() in values:
            raise ParamError(f"--set {key.strip()}: given twice")
        values[key.strip()] = parse_yaml(text, f"--set {item}") if text.strip() else ""
    return values


def resolve(notebooks: Notebooks, given: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Setting]:
    """Every parameter of every notebook with its value and origin. ParamError on an unknown name or a wrong type."""
    declared = {p.name: p for stage in reversed(notebooks.values()) for p in stage.values()}
    settings = {name: Setting(p.default, "default") for name, p in declared.items()}
    for origin, values in (("file", given), ("override", overrides)):
        for name, value in values.items():
            if name not in declared:
                raise unknown(name, declared)
            users = ", ".join(stage[name].notebook for stage in notebooks.values() if name in stage)
            settings[name] = Setting(typed(name, declared[name].type, value, f"parameter of {users}"), origin)
    return dict(sorted(settings.items()))


def unknown(name: str, valid: Any) -> ParamError:
    """The error for a name that no notebook declares: the nearest valid names first, then all."""
    near = difflib.get_close_matches(name, valid, n=3, cutoff=0.5)
    nearest = f"; nearest: {', '.join(near)}" if near else ""
    return ParamError(f"unknown parameter {name}{nearest}\nvalid names: {', '.join(sorted(valid))}")
