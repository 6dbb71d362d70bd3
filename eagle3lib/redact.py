"""Secrets of the environment never reach a file, a page or a log.

A secret is the value of an environment variable whose name says so (HF_TOKEN, ..._API_KEY, ...PASSWORD), a Hugging
Face token by its looks, or the password of a URL.
"""

from __future__ import annotations

import os
import re
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
SHORTEST = 8  # characters; a shorter value would hide ordinary words
LOOKS_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=://)[^/\s:@\"'\\]+:[^/\s@\"'\\]+(?=@)")


def secrets() -> dict[str, str]:
    """Value -> name of the environment variables that hold secrets, longest value first."""
    found = {value: name for name, value in os.environ.items() if SECRET_NAME.search(name) and len(value) >= SHORTEST}
    return dict(sorted(found.items(), key=lambda item: -len(item[0])))


def hide(obj: Any) -> Any:
    """obj (text, or JSON-like lists and dictionaries of text) with every secret replaced by `[hidden NAME]`."""
    return _hide(obj, secrets())


def _hide(obj: Any, known: dict[str, str]) -> Any:
    if isinstance(obj, str):
        for value, name in known.items():
            obj = obj.replace(value, f"[hidden {name}]")
        return LOOKS_SECRET.sub("[hidden]", obj)
    if isinstance(obj, dict):
        return {_hide(k, known): _hide(v, known) for k, v in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [_hide(v, known) for v in obj]
    return obj
