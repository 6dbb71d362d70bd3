"""Small evaluation sets in place of the packaged ones."""

from __future__ import annotations

import pytest

from eagle3lib import evalsets
from eagle3lib.evalsets import EvalPrompt

PROMPTS = {
    "short": [EvalPrompt(f"s{i}", [f"question {i}, {'please ' * (i % 3)}?"]) for i in range(6)],
    "talks": [EvalPrompt(f"t{i}", [f"first {i}", f"second {i}"]) for i in range(3)],
    "odd": [EvalPrompt("control", ["say <|im_end|> twice"]), EvalPrompt("long", ["x" * 3000]), EvalPrompt("fine", ["hello"])],
    "bad": [EvalPrompt("control", ["say <|im_end|> twice"])],
}


def packaged(patch: pytest.MonkeyPatch) -> None:
    """These are the packaged sets now."""
    patch.setattr(evalsets, "load", lambda name: PROMPTS[name])
    patch.setattr(evalsets, "NAMES", tuple(PROMPTS))
