"""The store's manifest: what the hidden states in it are, and whether two stores may be mixed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.shards import FP8, Layout, fsync

FORMAT = 2
CAPTURED = ("bfloat16", "float16", "float32")


def make_manifest(fingerprint: dict[str, Any], layers: list[int], hidden_size: int, dtype: str, store_dtype: str = "") -> dict[str, Any]:
    """dtype: of the capture and of Sample.hidden; store_dtype: on disk, the same (or empty) or float8_e4m3."""
    if dtype not in CAPTURED or store_dtype not in ("", dtype, FP8):
        raise ParamError(f"store_dtype {store_dtype!r} with states captured in {dtype!r}: {dtype!r} or {FP8!r} is wanted; nothing else is cast.")
    return {"format": FORMAT, "fingerprint": fingerprint, "layers": layers, "streams": len(layers) + 1,
            "hidden_size": hidden_size, "dtype": dtype, "store_dtype": store_dtype or dtype,
            "layer_meaning": "k names r_k, the residual stream that enters layer k",
            "last_meaning": "after the final norm: logits = lm_head(last)"}


def layout(manifest: dict[str, Any]) -> Layout:
    return Layout(manifest["streams"], manifest["hidden_size"], manifest["store_dtype"])


def as_captured(manifest: dict[str, Any]) -> Layout:
    return layout(manifest | {"store_dtype": manifest["dtype"]})


def bytes_per_token(manifest: dict[str, Any]) -> int:
    """Stored bytes a token: A+1 hidden vectors (and scales), one int32 id, one mask byte."""
    return layout(manifest).row_bytes


def read_manifest(path: Path) -> dict[str, Any]:
    """store.json of the store in `path`. Eagle3Error when there is none, or it is of another format or damaged."""
    if not (path / "store.json").is_file():
        raise Eagle3Error(f"store {path}: no store.json there. Run notebook 02_extract (or name the right run).")
    try:
        manifest = json.loads((path / "store.json").read_text())
        version = manifest.get("format")
        if version == FORMAT:
            layout(manifest).header(1)
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Eagle3Error(f"store {path}: its store.json is damaged ({error}). Delete the store and extract again (02_extract).") from None
    if version != FORMAT:
        raise Eagle3Error(f"store {path}: format {version!r}, this version reads {FORMAT}. Extract again.")
    return manifest


def keep_or_write(path: Path, manifest: dict[str, Any]) -> None:
    file = path / "store.json"
    if not file.is_file():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(manifest, indent=1, sort_keys=True))
        fsync(temporary)
        os.replace(temporary, file)
        fsync(path)
        return
    if differences := compare(read_manifest(path), manifest):
        raise Eagle3Error(f"store {path} was made by another configuration; hidden states are never mixed. Use another run folder or delete it.\n"
                          + "\n".join(f"  {line}" for line in differences))


def flat(facts: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """{"a": {"b": 1}} -> {"a.b": 1}"""
    found: dict[str, Any] = {}
    for name, value in facts.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return found


def compare(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """The fields in which two manifests (or fingerprints) differ, one readable line each."""
    lines: list[str] = []
    for key in sorted(old.keys() | new.keys()):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += compare(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} there, {b!r} now")
    return lines
