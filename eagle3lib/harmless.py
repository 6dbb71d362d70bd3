"""Make HTML that came out of notebooks harmless: it loads nothing, runs nothing, links to nothing outside."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser

DROPPED = {"script", "iframe", "object", "embed", "link", "meta", "base", "form", "template", "style"}
VOID = {"embed", "link", "meta", "base"}  # these have no end tag to wait for
LOADING = {"src", "srcset", "href", "xlink:href", "poster", "background", "data", "action", "formaction"}
# A backslash could spell any of these, and image-set takes bare addresses.
CSS_LOADS = re.compile(r"url\s*\(\s*['\"]?(?!\s*['\"]?(data:|#))|@import|expression\s*\(|image-set|\\", re.IGNORECASE)
WORDS = {"title", "alt", "class", "id"}  # never read as a style


def harmless(text: str) -> str:
    """text without scripts, frames, styles sheets, event handlers, and addresses other than `data:` images and `#` anchors.

    The target of an outside link is kept as text in the `title`, so nothing that the author wrote is lost.
    """
    parser = _Cleaner()
    parser.feed(text)
    parser.close()
    return "".join(parser.out)


class _Cleaner(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=False)
        self.out: list[str] = []
        self._inside: list[str] = []  # open dropped elements

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in DROPPED:
            if tag not in VOID:
                self._inside.append(tag)
        elif not self._inside:
            raw = self.get_starttag_text() or ""
            self.out.append(raw if all(map(_fine, attrs)) else _rewritten(tag, attrs))

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in DROPPED and not self._inside:
            self.handle_starttag(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        if self._inside:
            if tag == self._inside[-1]:
                self._inside.pop()
        elif tag not in DROPPED:
            self.out.append(f"</{tag}>")

    def handle_data(self, data: str) -> None:
        self._keep(data)

    def handle_entityref(self, name: str) -> None:
        self._keep(f"&{name};")

    def handle_charref(self, name: str) -> None:
        self._keep(f"&#{name};")

    def _keep(self, text: str) -> None:
        if not self._inside:
            self.out.append(text)


def _fine(attribute: tuple[str, str | None]) -> bool:
    name, value = attribute[0], (attribute[1] or "").strip()
    if name.startswith("on") or (name not in WORDS and CSS_LOADS.search(value)):
        return False
    return name not in LOADING or value.startswith("#") or bool(re.match(r"data:image/(png|jpeg|gif|webp|svg\+xml)[;,]", value))


def _rewritten(tag: str, attrs: list[tuple[str, str | None]]) -> str:
    kept = [a for a in attrs if _fine(a)]
    outside = next((value for name, value in attrs if name == "href" and value), None)
    if outside and not any(name == "title" for name, _ in kept):
        kept.append(("title", outside))
    words = [name if value is None else f'{name}="{html.escape(value)}"' for name, value in kept]
    return f"<{' '.join([tag, *words])}>"
