"""Replay: a conversation's user turns played against the answers, turn by turn, as a client would have done it.

What is missing from the book is asked; once nothing is missing, the same replay gives the training rows. Rows are the
ids that the server saw and wrote, never text that was tokenised again. The prompt of a later turn is rendered from
the decoded reply, as a client sends it; when it begins with exactly the row so far, the row goes on, else a new row
begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from eagle3lib.answers import Answer, AnswerBook
from eagle3lib.chat import Chat
from eagle3lib.conversations import Conversation, Drop, Message, Record
from eagle3lib.rows import CUT, Row

PROMPT_TOO_LONG = "prompt leaves no room for a reply within max_tokens"


@dataclass
class Replay:
    """outcomes: rows, and a Drop where a turn could not be used. missing: the prompt whose answer is needed next."""

    outcomes: list[Row | Drop] = field(default_factory=list)
    missing: list[int] | None = None


def questions(record: Record) -> Conversation:
    """The part of a record that is asked again: its system and user turns. Drop when that cannot be told apart."""
    if not isinstance(record, Conversation):
        raise Drop("rendered text and token ids cannot be answered again")
    if any(m["role"] == "tool" for m in record.messages):
        raise Drop("tool results cannot be answered again")
    return Conversation([m for m in record.messages if m["role"] != "assistant"], record.tools)


def replay(chat: Chat, asked: Conversation, book: AnswerBook, *, max_tokens: int, truncated: str = "keep", train: str = "all",
           thinking: bool = True) -> Replay:
    """truncated: "keep" replies that were cut at the token limit (never with an invented end), or "drop" them.
    train: "all" replies or the "last". thinking: train what stands before </think> too."""
    result, messages, row = Replay(), [], None
    try:
        for message in asked.messages:
            messages.append(message)
            if message["role"] != "user":
                continue
            prompt = _prompt(chat, messages, asked, max_tokens)
            answer = book.get(prompt)
            if answer is None:
                result.missing = prompt
                break
            output_ids = _usable(chat, answer, truncated)
            if row is not None and (train == "last" or prompt[: len(row.input_ids)] != row.input_ids):
                result.outcomes += [row] if train == "all" else []
                row = None
            row = _extended(row, prompt, output_ids, 0 if thinking else chat.thinking_length(output_ids))
            messages.append({"role": "assistant", "content": chat.decode_reply(output_ids)})
    except Drop as drop:
        return Replay([*result.outcomes, *_some(row), drop])
    return Replay([*result.outcomes, *_some(row)], result.missing)


def _prompt(chat: Chat, messages: list[Message], asked: Conversation, max_tokens: int) -> list[int]:
    prompt = chat.prompt_ids(messages, asked.tools)
    if len(prompt) + 2 > max_tokens:  # two reply tokens are the least that trains
        raise Drop(PROMPT_TOO_LONG, f"{len(prompt)} tokens")
    return prompt


def _usable(chat: Chat, answer: Answer, truncated: str) -> list[int]:
    if answer.finish_reason == "refused":
        raise Drop("prompt refused by the server", answer.error[:200])
    if answer.finish_reason == "length" and truncated == "drop":
        raise Drop(CUT)
    if not chat.decode_reply(answer.output_ids).strip():
        raise Drop("empty reply")
    return answer.output_ids


def _extended(row: Row | None, prompt: Sequence[int], output_ids: list[int], untrained: int) -> Row:
    """The row (None: a new one) with the prompt's further tokens and the reply; its first `untrained` ones are masked."""
    before = row.loss_mask if row else []
    mask = [*before, *[False] * (len(prompt) - len(before) + untrained), *[True] * (len(output_ids) - untrained)]
    return Row([*prompt, *output_ids], mask)


def _some(row: Row | None) -> list[Row]:
    return [] if row is None else [row]
