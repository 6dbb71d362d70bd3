"""Rope fields: what a config.json says of the rotary embedding, in whichever place and spelling, as one; and what cannot be meant.

Base and scaling stand at the top level (`rope_theta`, `rope_scaling`), or both in `rope_parameters`, where transformers 5 writes
them. Of two that differ it takes the one in a table, and `rope_scaling` before `rope_parameters`; whoever wrote both meant one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

# What each kind of scaling cannot do without (transformers 5, modeling_rope_utils: positive numbers, or lists of them).
NEEDS: dict[str, tuple[str, ...]] = {
    "default": (), "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",), "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"), "proportional": (),
}
WANTED = "null, or a table with a rope_type and its positive numbers: " + "; ".join(" ".join((kind, *needs)) for kind, needs in NEEDS.items())
KEPT_LENGTH = ("llama3", "yarn", "longrope")  # these take max_position_embeddings where no original length is given
LENGTH = "original_max_position_embeddings"


def fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """rope_theta and rope_scaling as they take effect, as far as the config gives them in a table."""
    found, tables = dict[str, Any](), _tables(config)
    if bases := [table["rope_theta"] for table in tables.values() if table.get("rope_theta") is not None]:
        found["rope_theta"] = bases[-1]
    if "rope_parameters" in tables and not config.get("rope_scaling"):
        table = tables["rope_parameters"]
        found["rope_scaling"] = None if table.get("rope_type", table.get("type", "default")) == "default" else table
    return found


def contradictions(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(field, what is wrong) where two places say different things, or rope_parameters is no table."""
    tables = _tables(config)
    if config.get("rope_parameters") is not None and "rope_parameters" not in tables:
        yield "rope_parameters", f"is {config['rope_parameters']!r}, must be a table"
    places = {"the top level": config, **tables}
    bases = {place: table["rope_theta"] for place, table in places.items() if table.get("rope_theta") is not None}
    if any(base != next(iter(bases.values())) for base in bases.values()):
        yield "rope_theta", "is " + " and ".join(f"{base} in {place}" for place, base in bases.items()) + ": engines differ in which they take"
    scalings = [scaling({**config, "rope_scaling": table}) for table in tables.values()]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        yield "rope_scaling", f"is {scalings[1]}, but rope_parameters says {scalings[0]}"


def readable(table: Any) -> bool:
    """Is this a rope_scaling of which frequencies can be made? (See WANTED.)"""
    if table is None:
        return True
    kind = table.get("rope_type", table.get("type")) if isinstance(table, dict) else None
    return isinstance(kind, str) and kind in NEEDS and all(_positive(table.get(name)) for name in NEEDS[kind])


def scaling(given: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scaling in one spelling, to be compared: its kind as rope_type, no base, the length that it starts from; None for none."""
    table = given.get("rope_scaling")
    kind = table.get("rope_type", table.get("type", "default")) if isinstance(table, dict) else "default"
    if not isinstance(table, dict) or kind == "default":
        return None
    found = {name: value for name, value in table.items() if name not in ("type", "rope_theta")} | {"rope_type": kind}
    if kind in KEPT_LENGTH:
        found[LENGTH] = given.get(LENGTH) or found.get(LENGTH) or given.get("max_position_embeddings")
    return found


def _tables(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: config[name] for name in ("rope_parameters", "rope_scaling") if isinstance(config.get(name), dict)}


def _positive(value: Any) -> bool:
    values = value if isinstance(value, list) and value else [value]
    return all(type(v) in (int, float) and 0 < v < float("inf") for v in values)
