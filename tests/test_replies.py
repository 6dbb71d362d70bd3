"""Which replies are taught, and how much of each: turns, thinking, weights, replies that were cut."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import templates
from preparing import answered, shown

from eagle3lib.chat import Chat
from eagle3lib.conversations import parse
from eagle3lib.errors import ParamError
from eagle3lib.rows import CUT


def chat_of(style: str) -> Chat:
    return Chat(templates.bytes_of(style))


def test_thinking_template_gives_one_row_per_reply() -> None:
    messages = [
        {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    ]  # fmt: skip
    chat = chat_of("thinking")
    rows = chat.rows(parse({"messages": messages}))
    taught = [chat.tokenizer.decode([i for i, m in zip(r.input_ids, r.loss_mask, strict=True) if m]) for r in rows]
    assert taught == ["<think>\none and one\n</think>\n\n2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    assert "one and one" not in chat.tokenizer.decode(rows[1].input_ids)


def test_thinking_untrained_begins_behind_the_closing_tag() -> None:
    tokenizer = templates.bytes_of("thinking")
    with pytest.raises(ParamError, match="</think>"):
        Chat(tokenizer).rows(parse({"prompt": "a", "response": "b"}), thinking=False)
    tokenizer.add_tokens(["<think>", "</think>"])
    chat = Chat(tokenizer)
    messages = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2", "reasoning_content": "hm"}]
    (row,) = chat.rows(parse({"messages": messages}), thinking=False)
    assert tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]) == "\n\n2<|im_end|>"


@pytest.mark.parametrize(
    ("opened_by", "reply", "taught"),
    [("reply", "<think>hm</think>yes", "yes"), ("reply", "<think>hm and then it was cut", ""), ("reply", "no thought", "no thought"),
     ("prompt", "hm</think>yes", "yes"), ("prompt", "hm and then it was cut", ""), ("closed prompt", "plain", "plain")],
)  # fmt: skip
def test_thinking_that_was_cut_is_no_answer(opened_by: str, reply: str, taught: str) -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.add_tokens(["<think>", "</think>"])
    opening = {"reply": "", "prompt": "<think>", "closed prompt": "<think></think>"}[opened_by]
    tokenizer.chat_template = templates.CHATML.replace("assistant\n", f"assistant\n{opening}")
    chat, ids = Chat(tokenizer), tokenizer(reply, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids[chat.thinking_length(ids) :]) == taught


@pytest.mark.parametrize("form", ["messages", "text", "input_ids"])
@pytest.mark.parametrize("train", ["all", "last"])
@pytest.mark.parametrize("thinking", [True, False])
def test_what_is_taught_does_not_depend_on_the_form_of_the_record(tmp_path: Path, form: str, train: str, thinking: bool) -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.add_tokens(["<think>", "</think>"])
    chat = Chat(tokenizer)
    turns = [("user", "1+1"), ("assistant", "<think>one</think>2"), ("user", "2+2"), ("assistant", "<think>two</think>4"), ("user", "and?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = chat.render(messages)
    record = {"messages": messages, "text": text, "input_ids": tokenizer(text, add_special_tokens=False)["input_ids"]}
    rows = answered(tmp_path, chat, [{form: record[form]}], train_turns=train, train_thinking=thinking, heldout_share=0)
    wanted = [f"{'<think>one</think>' * thinking}2<|im_end|>"] * (train == "all") + [f"{'<think>two</think>' * thinking}4<|im_end|>"]
    assert re.findall("⟦(.*?)⟧", shown(chat, rows.rows[0])) == wanted


def test_days_do_not_change_rows() -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.chat_template = "{{ 'Today: ' + (day or strftime_now('%d %b %Y')) + '\n' }}" + templates.CHATML
    ask: list[dict] = [{"role": "user", "content": "a"}]
    assert Chat(tokenizer).render(ask).startswith("Today: 26 Jul 2024\n")
    assert Chat(tokenizer, template_options={"day": "1 May"}).render(ask).startswith("Today: 1 May\n")


def test_weights_and_finish_reasons_of_the_data(tmp_path: Path) -> None:
    """A turn with weight 0 is context only. A reply that was cut has no end that could be taught."""
    messages: list[dict] = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]

    def taught(*marks: dict, **beside: str) -> list[str]:
        chat = chat_of("chatml")
        (row,) = chat.rows(parse({"messages": [m | x for m, x in zip(messages, marks or [{}] * 4, strict=True)], **beside}))
        runs = itertools.groupby(zip(row.loss_mask, row.input_ids, strict=True), key=lambda pair: pair[0])
        return [chat.tokenizer.decode([i for _, i in run]) for trained, run in runs if trained]

    assert taught() == ["b<|im_end|>", "d<|im_end|>"]
    assert taught({}, {"weight": 0}, {}, {"weight": 1}) == ["d<|im_end|>"]
    assert taught({}, {}, {}, {"finish_reason": "length"}) == taught(finish_reason="length") == ["b<|im_end|>", "d"]
    assert taught({}, {"finish_reason": "length"}, {}, {"finish_reason": "stop"}) == ["b", "d<|im_end|>"]
    record = {"messages": messages, "finish_reason": "length"}
    about = answered(tmp_path, chat_of("chatml"), [record, {"prompt": "q", "response": "r"}], truncated="drop").about
    assert about["dropped"] == {CUT: 1}


def test_last_turn_only() -> None:
    messages = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]
    chat = chat_of("chatml")
    (row,) = chat.rows(parse({"messages": messages}), train="last")
    assert chat.tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]) == "d<|im_end|>"
