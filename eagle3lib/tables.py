"""Tables: rows for a notebook (HTML) and a terminal (text), from one list of cells. Everything is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence

from eagle3lib.preview import View


def table(head: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "acceptance") -> View:
    """`kind`: the HTML class."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    text = "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows])

    def line(tag: str, row: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag} style='text-align:left'>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"

    return View(text, f"<table class='{kind}'>{line('th', head)}{''.join(line('td', row) for row in rows)}</table>")
