"""Conversations: one record of a data file, in whatever shape it comes, read into one form or dropped with a reason.

Shapes: OpenAI `messages`; ShareGPT `conversations` (from/value or role/content); prompt and response pairs;
instruction/input/output, with or without `history`; a prompt alone; rendered `text`; `input_ids` with or without a
mask. Anything else is a `Drop`: it is counted under its reason and never shortened in silence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import compress
from typing import Any

Message = dict[str, Any]  # role, content: str; on replies perhaps reasoning_content, tool_calls; on results name, tool_call_id

ROLES = {
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "system": "system",
    "tool": "tool", "function": "tool", "observation": "tool",
}  # fmt: skip
TURN_KEYS = ("messages", "conversations", "conversation")
PROMPT_KEYS = ("prompt", "question", "query")
REPLY_KEYS = ("response", "completion", "output", "answer", "reply")
SYSTEM_KEYS = ("system", "system_prompt")
MASK_KEYS = ("loss_mask", "assistant_masks")
NOT_TRAINED = -100  # in `labels`
TEXT_PARTS = ("text", "input_text", "output_text")


class Drop(Exception):
    """This record (or row) cannot be trained on. `reason` is one of few fixed phrases; `detail` tells of this case."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True)
class Conversation:
    """Turns in a trainable order: perhaps a system turn, then user, reply, user, reply, ..; tool results behind calls.

    unwanted: replies that the data say are not to be trained. cut: replies that ended at a token limit.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    unwanted: frozenset[int] = frozenset()
    cut: frozenset[int] = frozenset()

    @property
    def replies(self) -> list[int]:
        """Indices of the assistant's turns that may be trained."""
        return [i for i, m in enumerate(self.messages) if m["role"] == "assistant" and i not in self.unwanted]

    @property
    def texts(self) -> list[str]:
        """The contents of all turns."""
        return [m["content"] for m in self.messages]

    @property
    def strings(self) -> Iterator[str]:
        """Every text that a template may show."""
        for message in self.messages:
            yield message["content"]
            if len(message) > 2:
                yield from _strings([value for key, value in message.items() if key not in ("role", "content")])
        if self.tools:
            yield from _strings(self.tools)

    @property
    def plain(self) -> bool:
        """Nothing but texts: no tools and no calls."""
        return self.tools is None and not any("tool_calls" in message for message in self.messages)

    @property
    def first_prompt(self) -> str:
        """What the user says first."""
        return next(m["content"] for m in self.messages if m["role"] == "user")

    @cached_property
    def canonical(self) -> str:
        """One text per content, whatever shape and key order the record had."""
        marks = [sorted(self.unwanted), sorted(self.cut)] if self.unwanted or self.cut else []
        return json.dumps([self.messages, self.tools, *marks], sort_keys=True, ensure_ascii=False)


@dataclass(frozen=True)
class Rendered:
    """A conversation that somebody already rendered with this target's chat template."""

    text: str

    @property
    def strings(self) -> Iterator[str]:
        yield self.text

    @property
    def texts(self) -> list[str]:
        return [self.text]

    @property
    def first_prompt(self) -> str:
        return self.text

    @cached_property
    def canonical(self) -> str:
        return json.dumps(self.text, ensure_ascii=False)


@dataclass(frozen=True)
class Tokenised:
    """Token ids, perhaps with the mask of the trained tokens."""

    input_ids: list[int]
    loss_mask: list[bool] | None

    @property
    def strings(self) -> Iterator[str]:
        return iter(())

    @property
    def texts(self) -> list[str]:
        return []

    @property
    def first_prompt(self) -> str:
        return " ".join(map(str, self.input_ids))

    @cached_property
    def canonical(self) -> str:
        return json.dumps([self.input_ids, self.loss_mask])


Record = Conversation | Rendered | Tokenised


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def parse(raw: Any) -> Record:
    """The record in our form. Raises Drop with the reason when it has no trainable shape."""
    if not isinstance(raw, dict):
        raise Drop("record is not an object", type(raw).__name__)
    try:
        record = _shape(raw)
        for text in record.strings:
            text.encode()
        if isinstance(record, Conversation) and not record.plain:
            record.canonical.encode()
    except UnicodeEncodeError as error:  # JSON may say half a surrogate pair, which no tokenizer takes
        raise Drop("text is not valid Unicode", error.reason) from None
    except RecursionError:
        raise Drop("nested too deeply") from None
    except (TypeError, ValueError) as error:  # tables hold dates, bytes and decimals; JSON an integer of 5,000 digits
        raise Drop("tool call or tool list cannot be JSON", str(error)[:200]) from None
    return record


def _shape(raw: dict[str, Any]) -> Record:
    if raw.get("input_ids") is not None:
        return _tokenised(raw)
    turns = _first(raw, TURN_KEYS)
    if turns is None:
        turns = _pair(raw)
    if turns is None and isinstance(raw.get("text"), str):
        return _rendered(raw["text"])
    if turns is None:
        raise Drop("no conversation in the record", f"keys {', '.join(map(str, list(raw)[:8]))}")
    turns = _system(raw, _list(turns, "turns are not a list"))
    messages = [_message(turn) for turn in turns]
    _check_order(messages)
    unwanted = frozenset(i for i, turn in enumerate(turns) if turn.get("weight") == 0)  # OpenAI's fine-tuning format
    cut = {i for i, turn in enumerate(turns) if turn.get("finish_reason") == "length"}
    cut |= {len(turns) - 1} if raw.get("finish_reason") == "length" and messages[-1]["role"] == "assistant" else set()
    return Conversation(messages, _tools(raw.get("tools")), unwanted, frozenset(cut))


def _first(raw: dict[str, Any], keys: tuple[str, ...]) -> Any:
    return next((raw[key] for key in keys if raw.get(key) is not None), None)


def _list(value: Any, reason: str) -> list[Any]:
    if not isinstance(value, list):
        raise Drop(reason, type(value).__name__)
    return value


def _pair(raw: dict[str, Any]) -> list[Any] | None:
    """Turns of a prompt/response or instruction/input/output record; a missing response leaves the prompt alone."""
    prompt, reply = _first(raw, PROMPT_KEYS), _first(raw, REPLY_KEYS)
    if raw.get("instruction") is not None:
        prompt = raw["instruction"]
        if raw.get("input"):
            prompt = f"{prompt}\n\n{raw['input']}" if isinstance(prompt, str) and isinstance(raw["input"], str) else None
    if prompt is None:
        return None
    return _history(raw.get("history")) + _turns_of("user", prompt) + ([] if reply is None else _turns_of("assistant", reply))


def _history(pairs: Any) -> list[Any]:
    """Earlier exchanges of an instruction record, as [[prompt, reply], ..]."""
    if not pairs:
        return []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise Drop("history is not a list of prompts and replies")
    return [turn for prompt, reply in pairs for turn in (*_turns_of("user", prompt), *_turns_of("assistant", reply))]


def _turns_of(role: str, value: Any) -> list[Any]:
    """A pair's side is text, or a list of turns already."""
    if isinstance(value, list) and value and all(isinstance(v, dict) and ("role" in v or "from" in v) for v in value):
        return value
    return [{"role": role, "content": value}]


def _system(raw: dict[str, Any], turns: list[Any]) -> list[Any]:
    """A system text beside the turns becomes the first turn; an empty one means that there is none."""
    system = _first(raw, SYSTEM_KEYS)
    return [{"role": "system", "content": system}, *turns] if system else turns


def _message(turn: Any) -> Message:
    if not isinstance(turn, dict):
        raise Drop("turn is not an object", type(turn).__name__)
    name = _first(turn, ("role", "from"))
    role = ROLES.get(name.strip().lower()) if isinstance(name, str) else None
    if role is None:
        raise Drop("unknown role", repr(name)[:60])
    message: Message = {"role": role, "content": _text(_first(turn, ("content", "value")))}
    if role == "assistant":
        message |= _reply_extras(turn)
    if role == "tool":
        message |= {key: turn[key] for key in ("name", "tool_call_id") if isinstance(turn.get(key), str)}
    _check_content(message)
    return message


def _text(content: Any) -> str:
    """Content as the server flattens it: null is empty, parts are joined by a blank (SGLang's "string" format)."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return " ".join(map(_part, content))
    raise Drop("content is not text", type(content).__name__)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and part.get("type") in TEXT_PARTS and isinstance(part.get("text"), str):
        return part["text"]
    raise Drop("content part is not text", str(part.get("type") if isinstance(part, dict) else type(part).__name__)[:60])


def _reply_extras(turn: dict[str, Any]) -> Message:
    extras: Message = {}
    thought = _first(turn, ("reasoning_content", "reasoning"))
    if thought is not None and not isinstance(thought, str):
        raise Drop("reasoning is not text", type(thought).__name__)
    if thought and thought.strip():
        extras["reasoning_content"] = thought
    calls = turn.get("tool_calls") or ([turn["function_call"]] if turn.get("function_call") else None)  # the older form
    if calls:
        extras["tool_calls"] = [_tool_call(call) for call in _list(calls, "broken tool call")]
    return extras


def _tool_call(call: Any) -> dict[str, Any]:
    """A call as templates want it: arguments are an object. (SGLang parses a JSON string the same way.)"""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise Drop("broken tool call", "no function name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError:
            raise Drop("broken tool call", "arguments are not JSON") from None
    if not isinstance(arguments, dict):
        raise Drop("broken tool call", "arguments are not an object")
    kept = {"id": call["id"]} if isinstance(call.get("id"), str) else {}
    return {**kept, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _check_content(message: Message) -> None:
    if message["content"].strip() or message["role"] == "tool" or message.get("tool_calls"):
        return
    raise Drop({"user": "empty user turn", "assistant": "empty reply", "system": "empty system turn"}[message["role"]])


def _check_order(messages: list[Message]) -> None:
    """Raise Drop unless the roles follow each other as a server would have seen them."""
    before = called = None
    for message in messages:
        role = message["role"]
        if reason := _misplaced(before, role, called):
            raise Drop(reason, " ".join(m["role"] for m in messages[:12]))
        called = bool(message.get("tool_calls")) if role == "assistant" else called
        before = role
    if before is None:
        raise Drop("no turns")
    if all(m["role"] != "user" for m in messages):
        raise Drop("no user turn")


def _misplaced(before: str | None, role: str, called: bool | None) -> str:
    if role == "system" and before is not None:
        return "system turn is not the first"
    if role == "user" and before in ("user", "tool"):
        return "two user turns in a row" if before == "user" else "user turn in place of a reply to a tool result"
    if role == "assistant" and before in (None, "system", "assistant"):
        return "two replies in a row" if before == "assistant" else "assistant first"
    if role == "tool" and (before not in ("assistant", "tool") or not called):
        return "tool result without a call"
    return ""


def _tools(tools: Any) -> list[dict[str, Any]] | None:
    if isinstance(tools, str):  # some data sets keep the list as JSON text
        try:
            tools = json.loads(tools)
        except ValueError:
            raise Drop("broken tool list", "not JSON") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(t, dict) for t in tools):
        raise Drop("broken tool list", type(tools).__name__)
    return tools


def _rendered(text: str) -> Rendered:
    if not text.strip():
        raise Drop("empty text")
    return Rendered(text)


def _tokenised(raw: dict[str, Any]) -> Tokenised:
    ids, mask = raw["input_ids"], _first(raw, MASK_KEYS)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and i >= 0 for i in ids):
        raise Drop("input_ids is not a list of token ids")
    if mask is None and raw.get("labels") is not None:
        mask = _mask_of_labels(ids, raw["labels"])
    real = raw.get("attention_mask")
    if not _is_mask(mask, ids) or not _is_mask(real, ids):
        raise Drop("loss mask does not fit input_ids" if _is_mask(real, ids) else "attention mask does not fit input_ids")
    keep = [True] * len(ids) if real is None else [m == 1 for m in real]  # padding is no part of what a server sees
    if not any(keep):
        raise Drop("input_ids is not a list of token ids", "all of it is padding")
    return Tokenised(list(compress(ids, keep)), None if mask is None else [m == 1 for m in compress(mask, keep)])


def _is_mask(mask: Any, ids: list[int]) -> bool:
    """None, or as many zeros and ones as there are ids."""
    return mask is None or isinstance(mask, list) and len(mask) == len(ids) and all(type(m) in (int, bool) and m in (0, 1) for m in mask)


def _mask_of_labels(ids: list[int], labels: Any) -> list[bool]:
    """Labels of the common trainers: the token's own id where it is trained, -100 where it is not."""
    if not isinstance(labels, list) or len(labels) != len(ids) or any(x not in (NOT_TRAINED, i) for x, i in zip(labels, ids, strict=True)):
        raise Drop("labels do not fit input_ids")
    return [label != NOT_TRAINED for label in labels]


_THINK_TAGS = re.compile(r"</?think>")


def spoken_parts(message: Message) -> list[str]:
    """The stretches of a reply that its render must contain: reasoning, and the content around think tags."""
    parts = [message.get("reasoning_content", ""), *_THINK_TAGS.split(message["content"])]
    return [part.strip() for part in parts if part.strip()]
