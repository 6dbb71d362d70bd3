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
from itertools import zip_longest
from typing import Any

SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY", re.IGNORECASE)
SHORTEST = 8  # characters; a shorter value would hide ordinary words
LOOKS_SECRET = re.compile(r"\bhf_[A-Za-z0-9]{20,}|(?<=://)[^/\s:@\"'\\]+:[^/\s@\"'\\]+(?=@)")

_told: dict[str, str] = {}  # value -> name of secret parameters that this process was told


def remember(values: Mapping[str, Any]) -> None:
    """Treat text values under secret names as secrets from now on (parameters of a run, say), and the values of flags with such
    names in lists of words (["--api-key", "..."], ["--api-key=..."])."""
    for name, value in values.items():
        told = [(name, value)] if isinstance(value, str) else [flag for flag in flags(value) if is_secret_flag(flag[0])]
        _told.update({text: called for called, text in told if _is_secret(called, text)})


def flags(words: Any) -> list[tuple[str, str]]:
    """(name, value) of every `--name value` and `--name=value` in a list of words, or in a list of such lists."""
    if not isinstance(words, (list, tuple)):
        return []
    found = [flag for word in words for flag in flags(word)]
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        if isinstance(word, str) and word.startswith("-"):
            name, equals, value = word.lstrip("-").partition("=")
            value = value if equals else following if isinstance(following, str) and not following.startswith("--") else ""
            found.append((name.replace("-", "_"), value))
    return found


def is_secret_flag(name: str) -> bool:
    """--api_key is one, --max_total_tokens and --tokenizer_mode are not."""
    return bool(SECRET_NAME.search(re.sub(r"tokens|tokeniz", "", name, flags=re.IGNORECASE)))


def secrets() -> dict[str, str]:
    """Value -> name of all secrets known here, longest value first; also as JSON, HTML and URLs spell them."""
    known = {value: name for name, value in os.environ.items() if _is_secret(name, value)} | _told
    known |= {line.strip(): name for value, name in known.items() for line in value.splitlines() if len(line.strip()) >= SHORTEST}  # a PEM file, say
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
