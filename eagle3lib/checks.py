"""Checks: what a stage proved, with the measured value beside its limit.

All checks of a stage run before the first failure is raised, so that one look shows everything that is wrong.
"""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from eagle3lib.errors import CheckFailed


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool
    measured: Any
    limit: Any
    protects: str  # the silent failure that this check makes loud
    remedy: str  # what to do when it fails

    def line(self) -> str:
        return f"{self.name}: measured {show(self.measured)}, limit {show(self.limit)}. {self.remedy}"


class Checks:
    """An ordered list of checks; the same name twice replaces the earlier record (a cell run again in JupyterLab)."""

    def __init__(self, records: list[dict[str, Any]] | None = None):
        self._checks: dict[str, Check] = {r["name"]: Check(**r) for r in records or []}

    def add(self, name: str, passed: bool, measured: Any, limit: Any, protects: str, remedy: str) -> Check:
        check = Check(name, bool(passed), measured, limit, protects, remedy)
        self._checks[name] = check
        return check

    def extend(self, other: Checks) -> None:
        self._checks.update(other._checks)

    def __len__(self) -> int:
        return len(self._checks)

    def __iter__(self) -> Iterator[Check]:
        return iter(self._checks.values())

    @property
    def records(self) -> list[dict[str, Any]]:
        """The checks as plain dictionaries, for JSON."""
        return [asdict(c) for c in self]

    @property
    def failed(self) -> list[Check]:
        return [c for c in self if not c.passed]

    def raise_failed(self) -> None:
        """Raise one CheckFailed that names every failed check; do nothing when all passed."""
        if failed := self.failed:
            more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
            raise CheckFailed("\n".join([f"check failed: {failed[0].line()}{more}", *(f"  also: {c.line()}" for c in failed[1:])]))

    def table(self) -> CheckTable:
        return CheckTable(list(self))


class CheckTable:
    """Shows checks as a table in a notebook and as lines in a terminal. Words carry the verdict, not colour alone."""

    def __init__(self, checks: list[Check]):
        self.checks = checks

    def __repr__(self) -> str:
        return "\n".join(f"{'ok    ' if c.passed else 'FAILED'} {c.name}: {show(c.measured)} (limit {show(c.limit)})" for c in self.checks)

    def _repr_html_(self) -> str:
        head = "<tr>" + "".join(f"<th style='text-align:left'>{h}</th>" for h in ("", "check", "measured", "limit", "protects against")) + "</tr>"
        return f"<table class='checks'>{head}{''.join(map(_row, self.checks))}</table>"


def _row(check: Check) -> str:
    word, colour = ("ok", "#0072B2") if check.passed else ("FAILED", "#D55E00")
    cells = [f"<b style='color:{colour}'>{word}</b>", *(html.escape(show(v)) for v in (check.name, check.measured, check.limit, check.protects))]
    return "<tr>" + "".join(f"<td style='text-align:left'>{c}</td>" for c in cells) + "</tr>"


def show(value: Any) -> str:
    """A value as a reader wants it: short floats, grouped thousands."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
