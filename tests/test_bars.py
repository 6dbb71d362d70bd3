"""Public bars: shown for the target they were reported for, and for no other."""

from __future__ import annotations

import json

import pytest
from test_evaluate import results_of, scripted

from eagle3lib import bars


def named(tiny, tmp_path, name):
    folder = tmp_path / name
    folder.mkdir()
    config = json.loads((tiny / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "_name_or_path": ""}))
    return folder


@pytest.mark.parametrize(("name", "count"), [("Llama-3.1-8B-Instruct", 4), ("Meta-Llama-3.1-8B", 4), ("Kimi-K2.5", 1), ("kimi_k2.5-int4", 1),
                                             ("SmolLM2-135M-Instruct", 0), ("Llama-3.1-70B", 0)])
def test_bars_are_for_their_target(tiny, tmp_path, name, count):
    assert len(bars.matching(named(tiny, tmp_path, name))) == count


def test_the_table_says_chain_or_tree_of_every_figure(tiny, tmp_path):
    results = results_of(scripted([2, 1], set="mtbench"), scripted([0, 1], set="gsm8k"))
    text = repr(bars.compare(results, named(tiny, tmp_path, "Llama-3.1-8B-Instruct")))
    lines = [line.split("  ") for line in text.splitlines()]
    assert "chain of 3" in text and "tree of depth 8" in text and "6.23" in text and "2.90" in text
    assert all("chain" in " ".join(line) or "tree" in " ".join(line) for line in lines[1:])
    assert "No public EAGLE-3 figures" in repr(bars.compare(results, tiny))
