"""Preview: what a preparation looks like, in a notebook (HTML) and in a terminal (text). Everything is escaped."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from eagle3lib import accounting
from eagle3lib.prepared import Prepared

# Marked by a border and bold type as well as by colour, and by brackets in text.
_MARK = "background:#cfe6f5;border-bottom:3px solid #0072B2;font-weight:600"
_BOX = "white-space:pre-wrap;word-break:break-word;font-family:monospace;font-size:0.9em;border:1px solid #bbb;padding:0.6em;margin:0.4em 0"
_OPEN, _CLOSE = "\u27e6", "\u27e7"


@dataclass(frozen=True)
class View:
    """Something that a notebook shows as HTML and a terminal as text."""

    text: str
    html: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.html


def accounting_table(prepared: Prepared) -> View:
    """Rows in, each reason for a drop, rows kept; with the place where each reason was first met."""
    a = prepared.about
    more = (("of these: held out", "rows_heldout"), ("tokens", "tokens"), ("supervised tokens", "supervised_tokens"))
    lines = accounting.table(a) + [(name, a[key], "") for name, key in more]
    cells = [(name, f"{n:,}", first) for name, n, first in lines]
    text, page = "\n".join(accounting.as_lines(lines)), _table(("", "rows", "first met at"), cells)
    if len(a["sources"]) > 1:
        by_source = [(name, f"{n['rows_in']:,} in, {n['rows_kept']:,} kept", _losses(n)) for name, n in a["sources"].items()]
        text += "\n" + "\n".join("  ".join(row) for row in by_source)
        page += _table(("source", "rows", "left out"), by_source)
    return View(text, page)


def _losses(count: dict[str, Any]) -> str:
    lost = {"not sampled": count["not_sampled"], **count["dropped"]}
    return ", ".join(f"{n:,} {reason}" for reason, n in lost.items() if n)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def cells(tag: str, row: Sequence[str]) -> str:
        aligned = zip(("left", "right", "left"), row, strict=True)
        return "<tr>" + "".join(f"<{tag} style='text-align:{a}'>{html.escape(c)}</{tag}>" for a, c in aligned) + "</tr>"

    return f"<table class='accounting'>{cells('th', head)}{''.join(cells('td', row) for row in rows)}</table>"


def samples_html(prepared: Prepared, tokenizer: Any, n: int = 3) -> View:
    """The first n rows (their order is random) as text, every supervised stretch marked."""
    rows = [prepared.rows[i] for i in range(min(n, len(prepared.rows)))]
    texts, boxes = [], ["<p>Supervised tokens are marked: "
                        f"<span style='{_MARK}'>bold, underlined, blue</span>. The draft learns these and no others.</p>"]
    for row in rows:
        stretches = _stretches(row, tokenizer)
        name = f"{row['sample_id'][:8]}, {row['source']}: {row['n_supervised']} of {row['n_tokens']} tokens supervised"
        texts.append(f"{name}\n" + "".join(f"{_OPEN}{t}{_CLOSE}" if marked else t for marked, t in stretches))
        body = "".join(f"<mark style='{_MARK}'>{html.escape(t)}</mark>" if marked else html.escape(t) for marked, t in stretches)
        boxes.append(f"<div><b>{html.escape(name)}</b><div style='{_BOX}'>{body}</div></div>")
    return View("\n\n".join(texts), "".join(boxes))


def _stretches(row: dict[str, Any], tokenizer: Any) -> list[tuple[bool, str]]:
    """[(supervised?, text)] of a row. Decoded by stretch: a character may be spread over several tokens."""
    pairs = zip(row["loss_mask"], row["input_ids"], strict=True)
    groups = [(marked, [i for _, i in group]) for marked, group in groupby(pairs, key=lambda pair: pair[0])]
    return [(marked, tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)) for marked, ids in groups]
