"""What was met before: shared words, copies, and contents in eight bytes each, against the plain way to say the same."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib import seen
from eagle3lib.overlap import RUN, NearDuplicates, Runs, words

few_words = st.lists(st.sampled_from(["one", "Two", "three,", "\u00e9t\u00e9", "x"]), max_size=40).map(" ".join)


def runs(text: str) -> set[tuple[str, ...]]:
    found = re.findall(r"\w+", text.casefold())
    return {tuple(found[i : i + RUN]) for i in range(len(found) - RUN + 1)}


@given(prompts=st.lists(few_words, max_size=3), text=few_words)
@settings(max_examples=400, deadline=None)
def test_shared_runs_are_those_of_the_plain_way(prompts: list[str], text: str) -> None:
    shared = runs(text) & set().union(*map(runs, prompts)) if prompts else set()
    short = [re.findall(r"\w+", p.casefold()) for p in prompts]
    found = Runs(prompts).meets(text)
    whole = re.findall(r"\w+", text.casefold())
    assert bool(found) == bool(shared or (len(whole) < RUN and whole and whole in short))
    assert not found or len(whole) < RUN or tuple(found.split()) in shared


@given(text=st.text(max_size=60))
@settings(max_examples=200, deadline=None)
def test_words_of_ascii_are_those_of_any_text(text: str) -> None:
    assert words(text) == re.findall(r"\w+", text.casefold())
    ascii_text = text.encode("ascii", "replace").decode()
    assert words(ascii_text) == re.findall(r"\w+", ascii_text.casefold())


def test_near_duplicates_by_the_share_of_common_runs() -> None:
    near = NearDuplicates(0.8)
    text = " ".join(f"word{i}" for i in range(100))
    assert not near.meets(text) and near.meets(text + " more") and near.meets(text.upper() + "!")
    assert not near.meets(" ".join(f"word{i}" for i in range(50, 150)))
    assert not near.meets("") or not near.meets("a")


@given(contents=st.lists(st.integers(0, 60), max_size=200))
@settings(max_examples=100, deadline=None)
def test_seen_is_a_set(contents: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(seen, "_RECENT", 4)
        ours, plain = seen.Seen(), set()
        for content in contents:
            assert ours.add(b"%d" % content) == (content not in plain)
            plain.add(content)
