"""Bars: what others have published for a target, to hold a draft against. All figures are reported by their authors, greedy.

Serving shapes are written as SGLang counts them: steps / top-k / tokens verified. Trees accept more than chains.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from eagle3lib.results import Results
from eagle3lib.tables import View, table
from eagle3lib.targets import text_config


@dataclass(frozen=True)
class Bar:
    """`target`: a pattern of the target's name. `sets`: our name of the set -> acceptance length ("all": the authors' mean)."""

    target: str
    source: str
    shape: str
    sets: dict[str, float]


PUBLIC = (
    Bar(r"llama-?3\.1-?8b", "EAGLE-3 paper (arXiv 2503.01840)", "tree of depth 8, top-10, 60 tokens", {"all": 6.23}),
    Bar(r"llama-?3\.1-?8b", "EAGLE-3 authors' draft in SGLang", "chain of 3", {"all": 2.98}),
    Bar(r"llama-?3\.1-?8b", "EAGLE-3 authors' draft in SGLang", "tree of depth 8, top-10, 60 tokens", {"all": 6.19}),
    Bar(r"llama-?3\.1-?8b", "SpecBundle", "chain of 3", {"mtbench": 2.90, "gsm8k": 2.55, "humaneval": 3.34}),
    Bar(r"kimi-?k2\.5", "TorchSpec recipe", "chain of 3", {"mtbench": 2.69, "gsm8k": 3.20, "humaneval": 3.29}),
)


def matching(target: Path) -> list[Bar]:
    """The public bars of this target, by its folder's and its config's name."""
    names = f"{target.name} {getattr(text_config(target), '_name_or_path', '')}".lower().replace("_", "-")
    return [bar for bar in PUBLIC if re.search(bar.target, names)]


def compare(results: Results, target: Path) -> View:
    """This draft beside the public bars of its target; or that there are none."""
    found = matching(target)
    if not found:
        text = f"No public EAGLE-3 figures are known here for {target.name}."
        return View(text, f"<p>{text}</p>")
    sets = list(results.figures)
    ours = ["this draft (measured)", str(results.shape), *(f"{f.measured.length:.2f}" for f in results.figures.values())]
    trees = [[f"this draft (measured, {v.label})", str(v.shape), *(f"{v.figures[s].length:.2f}" for s in sets)] for v in results.variants]
    rows = [[bar.source, bar.shape, *(f"{bar.sets[s]:.2f}" if s in bar.sets else "-" for s in sets)] for bar in found]
    return table(["", "drafted as", *sets], [ours, *trees, *rows])
