"""Rows: token ids and the mask of the reply tokens; cutting; and where a prefix of a text ends among its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle3lib.conversations import Drop, Record

CUT = "reply cut at the token limit"
NOT_A_PREFIX = "history is not a token prefix of the reply's render"
TOO_LONG = "no supervised tokens within max_tokens"
TOO_SHORT = "reply too short to train on"


@dataclass(frozen=True)
class Row:
    """One training row. loss_mask[t] is True iff token t belongs to a trained reply, through its end-of-turn token."""

    input_ids: list[int]
    loss_mask: list[bool]

    @property
    def n_supervised(self) -> int:
        return sum(self.loss_mask)


def fit(row: Row, max_tokens: int) -> Row:
    """The row cut to max_tokens. Drop when no two neighbouring supervised tokens remain: the first label of a reply
    is its second token, so one alone trains nothing."""
    if not _has_label(row.loss_mask):
        raise Drop(TOO_SHORT)
    if len(row.input_ids) <= max_tokens:
        return row
    cut = Row(row.input_ids[:max_tokens], row.loss_mask[:max_tokens])
    if not _has_label(cut.loss_mask):
        raise Drop(TOO_LONG, f"{len(row.input_ids)} tokens")
    return cut


def _has_label(mask: Sequence[bool]) -> bool:
    return b"\x01\x01" in bytes(mask)


@dataclass(frozen=True)
class Draft:
    """A row whose text is rendered and whose ids are not there yet. Lengths are in characters of `text`.

    replies: the turns to train. histories: for each, the length of the render that ends with its generation prompt.
    throughs: how much of the render up to the reply's end the text begins with; closed_alike: is that all of it? (Some
    templates close a conversation in another way than a turn within it.)
    """

    text: str
    record: Record
    thinking: bool
    replies: list[int] = field(default_factory=list)
    histories: list[int] = field(default_factory=list)
    throughs: list[int] = field(default_factory=list)
    closed_alike: list[bool] = field(default_factory=list)
    train: str = "all"  # for text that came rendered, whose replies are found only among its ids: all of them or the "last"


class Encoded:
    """A draft and its ids, with the question that the mask rule asks: which of the ids is a shorter text the prefix of?

    encode: text -> ids, for what cannot be read off the encoding. special: ids of the control tokens.
    """

    def __init__(self, draft: Draft, encoding: Any, encode: Callable[[str], list[int]], special: frozenset[int]):
        self.draft, self.ids = draft, encoding.ids
        self._encoding, self._encode, self._special = encoding, encode, special

    def tokens_before(self, at: int) -> int | None:
        """How many tokens text[:at] has, when its ids are the first ids of the whole; else None."""
        if at == len(self.draft.text):
            return len(self.ids)
        return self._by_last_control_token(at) or self._by_encoding(at)

    def text_of(self, begin: int, end: int) -> str:
        """The text behind character `begin` through token `end` - 1."""
        return self.draft.text[begin : self.chars_through(end)]

    def chars_through(self, end: int) -> int:
        """Where token `end` - 1 ends."""
        return self._encoding.token_to_chars(end - 1)[1]

    def _by_last_control_token(self, at: int) -> int | None:
        """Tokenizers cut text at control tokens before anything else, so ids before one never depend on what follows
        it: it is enough to encode the few characters from the last control token to `at`. None: cannot tell."""
        token = self._encoding.char_to_token(at)
        if token is None or self._encoding.token_to_chars(token)[0] != at:
            return None
        last = next((i for i in range(token - 1, -1, -1) if self.ids[i] in self._special), None)
        if last is None:
            return None
        tail = self.draft.text[self._encoding.token_to_chars(last)[0] : at]
        return token if self._encode(tail) == self.ids[last:token] else None

    def _by_encoding(self, at: int) -> int | None:
        ids = self._encode(self.draft.text[:at])
        return len(ids) if self.ids[: len(ids)] == ids else None
