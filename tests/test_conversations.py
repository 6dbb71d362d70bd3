"""Records in every shape that we have met, the strange ones with the exact reason for which each is dropped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import templates
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib import prepare
from eagle3lib.chat import Chat
from eagle3lib.conversations import Conversation, Drop, parse

U, A = {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello you"}
S, T = {"role": "system", "content": "Be brief"}, {"role": "tool", "content": "22 C"}
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}


def turns(*messages: Any) -> dict[str, Any]:
    return {"messages": list(messages)}


QA = [("user", "Hi there"), ("assistant", "Hello you")]

# Each shape with the roles and contents that it must mean.
SHAPES: list[tuple[dict, list[tuple[str, str]]]] = [
    (turns(U, A), QA),
    (turns(S, U, A, U), [("system", "Be brief"), ("user", "Hi there"), ("assistant", "Hello you"), ("user", "Hi there")]),
    (turns({**U, "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]}, A), QA),
    (turns({**U, "content": ["Hi", {"type": "input_text", "text": "there"}]}, A), QA),
    (turns(U, CALLS, T, A), [("user", "Hi there"), ("assistant", ""), ("tool", "22 C"), ("assistant", "Hello you")]),
    (turns(U, CALLS, T, T, A), [("user", "Hi there"), ("assistant", ""), ("tool", "22 C"), ("tool", "22 C"), ("assistant", "Hello you")]),
    (turns(U, {**A, "reasoning_content": "hm"}), QA),
    ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]}, [("user", "q"), ("assistant", "r")]),
    ({"conversations": [{"from": "system", "value": "s"}, {"from": "user", "value": "q"}, {"from": "assistant", "value": "r"}]},
     [("system", "s"), ("user", "q"), ("assistant", "r")]),
    ({"conversations": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "r"}]}, [("user", "q"), ("assistant", "r")]),
    ({"conversation": [{"role": "User", "content": "q"}, {"role": " Assistant", "content": "r"}]}, [("user", "q"), ("assistant", "r")]),
    ({"system": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "r"}]},
     [("system", "s"), ("user", "q"), ("assistant", "r")]),
    ({"system": "", "messages": [U, A]}, QA),
    ({"prompt": "q", "response": "r"}, [("user", "q"), ("assistant", "r")]),
    ({"prompt": "q", "completion": "r"}, [("user", "q"), ("assistant", "r")]),
    ({"question": "q", "answer": "r", "id": 7}, [("user", "q"), ("assistant", "r")]),
    ({"prompt": [U], "completion": [A]}, QA),
    ({"instruction": "Add", "input": "1 2", "output": "3"}, [("user", "Add\n\n1 2"), ("assistant", "3")]),
    ({"instruction": "Say", "input": "", "output": "x"}, [("user", "Say"), ("assistant", "x")]),
    ({"prompt": "q"}, [("user", "q")]),
    ({"messages": None, "prompt": "q", "response": "r", "text": "unused"}, [("user", "q"), ("assistant", "r")]),
]  # fmt: skip


@pytest.mark.parametrize(("raw", "meaning"), SHAPES, ids=range(len(SHAPES)))
def test_shapes(raw: dict, meaning: list[tuple[str, str]]) -> None:
    record = parse(raw)
    assert isinstance(record, Conversation)
    assert [(m["role"], m["content"]) for m in record.messages] == meaning


def test_extras_of_a_reply() -> None:
    messages = turns(U, {**CALLS, "reasoning": "hm"}, {**T, "tool_call_id": "c1", "name": "weather"}, A)
    record = parse({**messages, "tools": '[{"name": "weather"}]'})
    assert isinstance(record, Conversation)
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert record.messages[1] == {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]}
    assert record.messages[2] == {"role": "tool", "content": "22 C", "name": "weather", "tool_call_id": "c1"}
    assert record.tools == [{"name": "weather"}]


# Strange records, and the reason; "" means that the record is kept as one row, "x2" that it becomes two.
STRANGE: list[tuple[Any, str]] = [
    (None, "record is not an object"),
    (17, "record is not an object"),
    ("just a string", "record is not an object"),
    ([U, A], "record is not an object"),
    ({}, "no conversation in the record"),
    ({"id": 1, "title": "x"}, "no conversation in the record"),
    ({"text": 5}, "no conversation in the record"),
    ({"text": "  \n"}, "empty text"),
    ({"text": "prose without any template"}, "no reply found in rendered text"),
    ({"messages": []}, "no turns"),
    ({"messages": "User: hi"}, "turns are not a list"),
    ({"messages": {"0": U}}, "turns are not a list"),
    (turns("hi", "hello"), "turn is not an object"),
    (turns(U, None), "turn is not an object"),
    (turns({"role": "narrator", "content": "once"}, A), "unknown role"),
    (turns({"role": None, "content": "once"}), "unknown role"),
    (turns({"content": "who says this"}), "unknown role"),
    (turns({"role": "developer", "content": "once"}, U, A), "unknown role"),
    (turns({"role": "user", "content": 5}, A), "content is not text"),
    (turns({"role": "user", "content": {"text": "a"}}, A), "content is not text"),
    (turns({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, A), "content part is not text"),
    (turns({"role": "user", "content": [{"type": "text"}]}, A), "content part is not text"),
    (turns({"role": "user", "content": [7]}, A), "content part is not text"),
    (turns({"role": "user", "content": ""}, A), "empty user turn"),
    (turns({"role": "user", "content": None}, A), "empty user turn"),
    (turns({"role": "user", "content": " \n\t\u3000"}, A), "empty user turn"),
    (turns({"role": "user"}, A), "empty user turn"),
    (turns(U, {"role": "assistant", "content": ""}), "empty reply"),
    (turns(U, {"role": "assistant", "content": None, "tool_calls": []}), "empty reply"),
    (turns(U, {"role": "assistant", "content": " ", "reasoning_content": "only thought"}), "empty reply"),
    (turns({"role": "system", "content": ""}, U, A), "empty system turn"),
    (turns(S), "no user turn"),
    (turns(A, U), "assistant first"),
    (turns(S, A), "assistant first"),
    (turns(U, U, A), "two user turns in a row"),
    (turns(U, A, A), "two replies in a row"),
    (turns(U, S, A), "system turn is not the first"),
    (turns(S, S, U, A), "system turn is not the first"),
    (turns(T, U, A), "tool result without a call"),
    (turns(U, A, T), "tool result without a call"),
    (turns(U, CALLS, T, U, A), "user turn in place of a reply to a tool result"),
    (turns(U, {**CALLS, "tool_calls": "weather"}), "broken tool call"),
    (turns(U, {**CALLS, "tool_calls": [{"function": {"arguments": "{}"}}]}), "broken tool call"),
    (turns(U, {**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "{oops"}}]}), "broken tool call"),
    (turns(U, {**CALLS, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}), "broken tool call"),
    ({**turns(U, A), "tools": "not json"}, "broken tool list"),
    ({**turns(U, A), "tools": ["f"]}, "broken tool list"),
    ({**turns(U, A), "tools": [{"function": {"name": "f"}}]}, "turn is missing from the render"),
    (turns(U, CALLS, T, A), "turn is missing from the render"),
    (turns(U, {**A, "reasoning_content": ["steps"]}), "reasoning is not text"),
    (turns(U, {**A, "reasoning_content": "thought"}), "part of the reply is missing from the render"),
    (turns(U), "no reply in the record"),
    ({"prompt": "q only"}, "no reply in the record"),
    ({"prompt": "q", "response": "\n"}, "empty reply"),
    ({"prompt": "", "response": "r"}, "empty user turn"),
    ({"prompt": 5, "response": "r"}, "content is not text"),
    ({"instruction": "Add", "input": ["1"], "output": "3"}, "no conversation in the record"),
    (turns({"role": "user", "content": "half a pair \ud83d"}, A), "text is not valid Unicode"),
    (turns({"role": "user", "content": "end it <|im_end|> now"}, A), "control token in text"),
    (turns(U, {"role": "assistant", "content": "<|im_start|>user"}), "control token in text"),
    ({"input_ids": []}, "input_ids is not a list of token ids"),
    ({"input_ids": "12 13"}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, "2"]}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, True]}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, -2]}, "input_ids is not a list of token ids"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 1]}, "loss mask does not fit input_ids"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 2, 1]}, "loss mask does not fit input_ids"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 0]}, "no supervised tokens"),
    ({"input_ids": [1, 2, 3], "loss_mask": [0, 0, 1]}, "reply too short to train on"),
    ({"input_ids": [1, 2, 99999], "loss_mask": [0, 1, 1]}, "token id outside the vocabulary"),
    ({"input_ids": [4, 5, 6]}, "no reply found in rendered text"),
    (turns({"role": "user", "content": "x" * 400}, A), "no supervised tokens within max_tokens"),
    ({"instruction": "i", "output": "o", "history": "earlier"}, "history is not a list of prompts and replies"),
    ({"input_ids": [4, 5, 6], "labels": [-100, 5, 7]}, "labels do not fit input_ids"),
    ({"input_ids": [4, 5, 6], "labels": [-100, 5]}, "labels do not fit input_ids"),
    ({"input_ids": [4, 5, 6], "attention_mask": [0, 0, 0]}, "input_ids is not a list of token ids"),
    ({"input_ids": [4, 5, 6], "attention_mask": [1, 1]}, "attention mask does not fit input_ids"),
    ({"input_ids": [4, 2**80, 6], "loss_mask": [0, 1, 1]}, "token id outside the vocabulary"),
    ({"input_ids": [[4, 5, 6]]}, "input_ids is not a list of token ids"),
    ({"input_ids": [4, 5, 6], "loss_mask": "011"}, "loss mask does not fit input_ids"),
    ({"input_ids": [4, 5, 6], "loss_mask": [0.0, 1.0, 1.0]}, "loss mask does not fit input_ids"),
    (turns(U, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}), "nested too deeply"),
    (turns(U, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": '{"n": ' + "9" * 5000 + "}"}}]}),
     "broken tool call"),
    (turns(U, {"role": "assistant", "content": "x", "tool_calls": {"function": {"name": "f"}}}), "broken tool call"),
    (turns(U, {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": {"\udfff": 1}}}]}),
     "text is not valid Unicode"),
    (turns(U, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}), "turn is missing from the render"),
    ({**turns(U, A), "tools": "[" * 100_000}, "nested too deeply"),
    ({**turns(U, A), "tools": [5]}, "broken tool list"),
    ({"system": 5, "messages": [U, A]}, "content is not text"),
    ({"system": "s", "messages": [S, U, A]}, "system turn is not the first"),
    ({"messages": [[U, A]]}, "turn is not an object"),
    (turns({"role": ["user"], "content": "a"}, A), "unknown role"),
    (turns({"role": "user", "content": float("nan")}, A), "content is not text"),
    (turns(U, {**A, "weight": 0}), "no reply in the record"),
    ({"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"}, "no reply found in rendered text"),
    # kept, strange as they are
    ({"instruction": "i", "output": "o", "history": [["a", "b"]]}, ""),
    ({"input_ids": [7, 8, 9, 2, 0, 0], "labels": [-100, 8, 9, 2, -100, -100], "attention_mask": [1, 1, 1, 1, 0, 0]}, ""),
    (turns(U, {**A, "weight": 0}, U, A), ""),
    (turns(*[U, A] * 5), ""),
    ({"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\ncut in the mid"}, ""),
    (turns({"role": "user", "content": "{{ messages }}{% raise %}"}, A), ""),
    (turns(U, {"role": "assistant", "content": "y" * 400}), ""),  # cut, not dropped
    (turns(U, A), ""),
    ({**turns(U, A), "junk": {"deep": [1]}}, "duplicate"),
    (turns({"role": "user", "content": "\u202eright to left \x00\x1b[31m"}, A), ""),
    (turns({"role": "user", "content": "assistant\nuser\n<|im_end"}, A), ""),
    (turns({"role": "user", "content": "\n\n<think>"}, {"role": "assistant", "content": "e\u0301 \u00e9"}), ""),
    ({"input_ids": [7, 8, 9, 2], "loss_mask": [0, 1, 1, 1]}, "duplicate"),  # of the padded one with labels
    ({"text": "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"}, ""),
]  # fmt: skip


def test_strange_records_are_accounted_for_exactly(tmp_path: Path) -> None:
    data = tmp_path / "strange.jsonl"
    # json.dumps writes a lone surrogate as the escape that such files hold
    data.write_text("\n".join(json.dumps(raw) for raw, _ in STRANGE))
    options = prepare.Options(prompts=str(data), answer="data", max_prompts=0, max_tokens=300)
    prepared = prepare.build(prepare.load(options), Chat(templates.bytes_of("chatml")), tmp_path)
    about = prepared.about
    wanted: dict[str, int] = {}
    for _, reason in STRANGE:
        wanted[reason] = wanted.get(reason, 0) + 1
    kept = wanted.pop("")
    assert about["dropped"] == wanted
    assert (about["rows_in"], about["rows_kept"], about["rows_cut"]) == (len(STRANGE), kept, 1)
    assert about["rows_in"] == about["rows_kept"] + sum(about["dropped"].values())
    assert sum(n for raw, n in wanted.items()) + kept >= 100
    # the example of each reason names the line
    for reason, place in about["examples"].items():
        line = int(place.removeprefix(str(data)).split(":")[1])
        assert STRANGE[line - 1][1] == reason


any_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(str.strip)
KEYS = [
    "messages", "conversations", "role", "from", "content", "value", "tool_calls", "prompt", "response", "function", "name",
    "input_ids", "loss_mask", "text", "tools", "user", "assistant", "instruction", "input", "system", "reasoning",
]  # fmt: skip
any_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(KEYS) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4),
)


@given(question=any_text, reply=any_text)
@settings(max_examples=100, deadline=None)
def test_any_text_survives_one_record_a_line(question: str, reply: str) -> None:
    """Whatever the text holds (line separators, control characters), the record is one line and comes back as it was."""
    line = json.dumps({"prompt": question, "response": reply}, ensure_ascii=False).encode()
    assert b"\n" not in line
    record = parse(json.loads(line))
    assert isinstance(record, Conversation)
    assert [m["content"] for m in record.messages] == [question, reply]


@given(raw=any_json)
@settings(max_examples=300, deadline=None)
def test_no_json_value_makes_parse_crash(raw: Any) -> None:
    try:
        parse(raw)
    except Drop as drop:
        assert drop.reason
