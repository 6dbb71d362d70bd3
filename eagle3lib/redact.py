"""Secrets never reach a file, a page or a log.

A secret is the value of an environment variable or of a parameter whose name says so (HF_TOKEN, ..._API_KEY,
...PASSWORD), a Hugging Face token by its looks, or the password of a URL.
"""

from __future__ import annotations

import html
import json
import os
import re
import urllib.parse
from collections.abc import Mapping
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
SHORTEST = 8  # characters; a shorter value would hide ordinary words
LOOKS_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=://)[^/\s:@\"'\\]+:[^/\s@\"'\\]+(?=@)")

_told: dict[str, str] = {}  # value -> name of secret parameters that this process was told


def remember(values: Mapping[str, Any]) -> None:
    """Treat text values under secret names as secrets from now on (parameters of a run, say)."""
    _told.update({value: name for name, value in values.items() if isinstance(value, str) and _is_secret(name, value)})


def secrets() -> dict[str, str]:
    """Value -> name of all secrets known here, longest value first; also as JSON, HTML and URLs spell them."""
    known = {value: name for name, value in os.environ.items() if _is_secret(name, value)} | _told
    spelled = {form: name for value, name in known.items() for form in _spellings(value)}
    return dict(sorted(spelled.items(), key=lambda item: -len(item[0])))


def hide(obj: Any) -> Any:
    """obj (text, or JSON-like lists and dictionaries of text) with every secret replaced by `[hidden NAME]`."""
    return _hide(obj, secrets())


def _is_secret(name: str, value: str) -> bool:
    return bool(SECRET_NAME.search(name)) and len(value) >= SHORTEST


def _spellings(value: str) -> set[str]:
    pages = {html.escape(value), html.escape(value, quote=False)}
    return {value, json.dumps(value)[1:-1], repr(value)[1:-1], urllib.parse.quote(value, safe=""), *pages}


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
