"""The mask rule, against an oracle that knows the templates, and against the tokenizer's own render of the prompt."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import templates
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from eagle3lib import targets
from eagle3lib.chat import Chat
from eagle3lib.conversations import Conversation, Drop, Rendered, Tokenised, parse
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.rows import NOT_A_PREFIX, TOO_LONG, TOO_SHORT, Draft, Row, fit

STYLES = tuple(templates.JINJA)
CONTROL = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "thinking": "<|im_start|>", "tools": "<|endoftext|>",
           "closed": "<|im_end|>", "moving": "<|im_start|>"}
NASTY = [
    "assistant\n", "<|im_start", "\n\nuser\n", "</think>", "<tool_call>{}</tool_call>", "\U0001f600\u200d\U0001f4bb", "\u0645\u0631",
    "e\u0301", "\u2028", "\x00", "{{ 7*7 }}", "  ",
]  # fmt: skip
QUICK = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
# Whole control tokens are dropped, and have a test of their own. (Hypothesis finds them: it tries constants of our code.)
content = st.tuples(text, st.sampled_from(["", *NASTY]), text).map("".join).filter(lambda s: s.strip() and "|>" not in s)
# Reasoning is stripped text without think tags: parse() and the templates agree on nothing else.
thought = content.map(lambda s: s.replace("think>", "")).filter(lambda s: s.strip())


@functools.cache
def chat_of(style: str) -> Chat:
    return Chat(templates.bytes_of(style))


@functools.cache
def smol(style: str) -> Chat:
    return Chat(templates.dress(targets.load_tokenizer(targets.resolve("smollm2")), style))


@st.composite
def conversations(draw: Any, style: str) -> dict:
    """A record of alternating turns; with thinking, tools, and a last user turn without a reply, where the style has them."""
    messages = [{"role": "system", "content": draw(content)}] if draw(st.booleans()) else []
    for _ in range(draw(st.integers(1, 3))):
        messages.append({"role": "user", "content": draw(content)})
        if style == "tools" and draw(st.booleans()):
            call = {"type": "function", "function": {"name": "look_up", "arguments": {"q": draw(text)}}}
            messages.append({"role": "assistant", "content": draw(st.sampled_from(["", "Let me see."])), "tool_calls": [call]})
            messages.append({"role": "tool", "content": draw(content)})
        reply = {"role": "assistant", "content": draw(content)}
        if style == "thinking" and draw(st.booleans()):
            reply |= {"reasoning_content": draw(thought)}
        messages.append(reply)
    if draw(st.integers(0, 4)) == 0:
        messages.append({"role": "user", "content": draw(content)})
    tools = [{"type": "function", "function": {"name": "look_up"}}] if style == "tools" and draw(st.booleans()) else None
    return {"messages": messages, "tools": tools}


def expected(chat: Chat, wanted: list[list[templates.Piece]]) -> list[Row]:
    encoded = [[(chat.tokenizer(t, add_special_tokens=False)["input_ids"], i) for t, i in row] for row in wanted]
    return [Row([i for ids, _ in row for i in ids], [r is not None for ids, r in row for _ in ids]) for row in encoded]


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
@QUICK
def test_mask_equals_the_oracle(style: str, data: Any) -> None:
    record = data.draw(conversations(style))
    chat = chat_of(style)
    rows = chat.rows(parse(record))
    if any(isinstance(r, Drop) for r in rows):
        # The only lawful drop here: thinking tags typed into a reply.
        assert [r.reason for r in rows if isinstance(r, Drop)] == ["part of the reply is missing from the render"], rows
        assert any("think>" in m["content"] for m in record["messages"])
        return
    assert rows == expected(chat, templates.rows(style, record["messages"], record["tools"]))


@pytest.mark.parametrize("style", STYLES)
@given(data=st.data())
@QUICK
def test_ids_before_each_reply_are_what_the_server_sees_as_its_prompt(style: str, data: Any) -> None:
    """With a tokenizer that merges across boundaries, and transformers' own prompt as the oracle."""
    record = data.draw(conversations(style))
    messages, tools = record["messages"], record["tools"]
    chat, tokenizer = smol(style), smol(style).tokenizer

    def ids(part: list[dict], prompt: bool) -> list[int]:
        return tokenizer.apply_chat_template(part, tools=tools, add_generation_prompt=prompt, tokenize=True, return_dict=False)

    prompts = {i: ids(messages[:i], True) for i, m in enumerate(messages) if m["role"] == "assistant"}
    begins, rows = [], chat.rows(parse(record))
    for row in rows:
        if isinstance(row, Drop):
            assert row.reason == NOT_A_PREFIX or "think>" in str(messages), row
            if row.reason == NOT_A_PREFIX:
                assert any(ids(messages[: i + 1], False)[: len(p)] != p for i, p in prompts.items())
            continue
        starts = [t for t, m in enumerate(row.loss_mask) if m and not row.loss_mask[t - 1]]
        assert all(row.input_ids[:t] in prompts.values() for t in starts)
        assert all(row.input_ids[t] in chat.stop_ids for t, m in enumerate(row.loss_mask) if m and row.loss_mask[t + 1 : t + 2] != [True])
        begins += [row.input_ids[:t] for t in starts]
    assert len(begins) == len({tuple(b) for b in begins})
    assert len(begins) == len(prompts) or any(isinstance(row, Drop) for row in rows)


@pytest.mark.parametrize("style", STYLES)
@given(reply=content, question=content)
@QUICK
def test_any_text_survives_byte_for_byte(style: str, reply: str, question: str) -> None:
    chat = chat_of(style)
    for row in chat.rows(parse({"prompt": question, "response": reply})):
        if isinstance(row, Drop):
            assert "think>" in reply
            continue
        taught = chat.tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m][:-1])
        assert taught == (reply.strip() if style == "llama3" else reply)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_control_token_typed_into_text_is_dropped(style: str, role: str) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    messages[role == "assistant"]["content"] += f" {CONTROL[style]} assistant\n"
    (drop,) = chat_of(style).rows(parse({"messages": messages}))
    assert isinstance(drop, Drop) and (drop.reason, drop.detail) == ("control token in text", CONTROL[style])
    with pytest.raises(Drop, match="control token"):
        chat_of(style).prompt_ids(messages[:1] if role == "user" else messages)


STRIPS_THINKING = templates.CHATML.replace("message['content'] + '<|im_end|>'", "message['content'].split('</think>')[-1] + '<|im_end|>'")
OPENS_THINKING = templates.CHATML.replace("assistant\n", "assistant\n<think>\n")
NO_TOOLS = {"prompt": "a", "response": "b", "tools": [{"function": {"name": "look_up"}}]}


@pytest.mark.parametrize(
    ("template", "record", "reason"),
    [
        (STRIPS_THINKING, {"prompt": "a", "response": "<think>long thought</think>b"}, "part of the reply is missing from the render"),
        (templates.CHATML, {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": "c"}]},
         "part of the reply is missing from the render"),
        (OPENS_THINKING, {"prompt": "a", "response": "b" * 40}, NOT_A_PREFIX),
        (templates.CHATML, NO_TOOLS, "turn is missing from the render"),
        ("{{ raise_exception('no system') if messages[0]['role'] == 'system' }}" + templates.CHATML,
         {"system": "s", "prompt": "a", "response": "b"}, "chat template refuses the conversation"),
    ],
)  # fmt: skip
def test_what_the_template_would_lose_is_dropped(template: str, record: dict, reason: str) -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.chat_template = template
    (drop,) = Chat(tokenizer).rows(parse(record))
    assert isinstance(drop, Drop) and drop.reason == reason


def test_template_without_control_tokens() -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.chat_template = ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
                               "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}")
    chat = Chat(tokenizer)
    assert chat.end_of_turn is None
    messages = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]
    (row,) = chat.rows(parse({"messages": messages}))
    marked = "".join("#" if m else chr(tokenizer.decode([i]).encode()[0]) for i, m in zip(row.input_ids, row.loss_mask, strict=True))
    assert marked == "user: a\nassistant: ##user: c\nassistant: ##"


def test_next_header_ends_the_reply_in_templates_that_write_no_end() -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = ("{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
                               "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}")
    chat = Chat(tokenizer, stop_ids=[tokenizer.convert_tokens_to_ids("<|user|>")])
    messages = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]]
    (row,) = chat.rows(parse({"messages": messages}))
    taught = [tokenizer.convert_ids_to_tokens(i) for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]
    assert taught == ["b", "<|user|>", "d"]


@pytest.mark.parametrize(("template_has", "wants"), [(True, True), (True, False), (False, True), (False, False)])
def test_exactly_one_bos_where_the_tokenizer_wants_one(template_has: bool, wants: bool) -> None:
    tokenizer = templates.bytes_of("llama3")
    bos = tokenizer.bos_token_id
    if wants:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)])
    if not template_has:
        tokenizer.chat_template = templates.LLAMA3.replace("{{ bos_token }}", "")
    chat = Chat(tokenizer)
    record = {"prompt": "a", "response": "b"}
    (row,) = chat.rows(parse(record))
    prompt = chat.prompt_ids([{"role": "user", "content": "a"}])
    assert row.input_ids.count(bos) == prompt.count(bos) == (1 if template_has or wants else 0)
    first = row.loss_mask.index(True)
    assert row.input_ids[:first] == prompt and tokenizer.decode(row.input_ids[first:]) == "b<|eot_id|>"


def test_two_bos_of_a_template_become_one() -> None:
    tokenizer = templates.bytes_of("llama3")
    tokenizer.chat_template = "{{ bos_token }}" + templates.LLAMA3
    (row,) = Chat(tokenizer).rows(parse({"prompt": "a", "response": "b"}))
    assert (row,) == tuple(Chat(templates.bytes_of("llama3")).rows(parse({"prompt": "a", "response": "b"})))


def test_given_ids_get_exactly_one_bos_too() -> None:
    tokenizer = templates.bytes_of("llama3")
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{tokenizer.bos_token} $A", special_tokens=[(tokenizer.bos_token, bos)])
    for front in ([], [bos], [bos, bos]):
        (row,) = Chat(tokenizer).rows(Tokenised([*front, 5, 6, 7], [False] * len(front) + [False, True, True]))
        assert row == Row([bos, 5, 6, 7], [False, False, True, True])


def test_stop_tokens_that_are_not_marked_special_end_replies_and_may_not_be_typed() -> None:
    """Some tokenizers do not mark <|im_end|> as special; generation_config.json says that it stops."""
    tokenizer = templates.bytes_of("chatml")
    tokenizer.add_tokens(["<|over|>"])
    tokenizer.chat_template = templates.CHATML.replace("<|im_end|>", "<|over|>")
    chat = Chat(tokenizer, stop_ids=tokenizer.convert_tokens_to_ids(["<|over|>"]))
    (row,) = chat.rows(parse({"prompt": "a", "response": "b"}))
    assert tokenizer.decode([i for i, m in zip(row.input_ids, row.loss_mask, strict=True) if m]) == "b<|over|>"
    (drop,) = chat.rows(parse({"prompt": "a <|over|>", "response": "b"}))
    assert isinstance(drop, Drop) and drop.reason == "control token in text"


def test_control_tokens_are_found_in_every_text_and_however_they_are_spelt() -> None:
    tokenizer = templates.bytes_of("tools")
    tokenizer.add_special_tokens({"additional_special_tokens": ['<|"|>', "<\\n>"]})
    chat = Chat(tokenizer)
    call = {"function": {"name": "f", "arguments": {"q": "x", "deep": [{"<|im_end|>": 1}]}}}
    for token in ('<|"|>', "<\\n>", "<|im_end|>"):
        for record in (
            {"prompt": token, "response": "b"}, {"prompt": "a", "response": token}, {"system": token, "prompt": "a", "response": "b"},
            {"prompt": "a", "response": "b", "tools": [{"name": "b", "description": token}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "reasoning": token}]},
            {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": [call]}]},
        ):  # fmt: skip
            (drop,) = chat.rows(parse(record))
            assert isinstance(drop, Drop) and drop.reason == "control token in text", record


def test_rendered_text_and_bare_ids_get_the_same_mask_as_the_conversation() -> None:
    for style in STYLES:
        chat = chat_of(style)
        messages = [{"role": r, "content": c} for r, c in [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e")]]
        (row,) = chat.rows(parse({"messages": messages}))
        assert chat.rows(Rendered(chat.render(messages))) == [row]
        assert chat.rows(Tokenised(row.input_ids, None)) == [row]
        assert chat.rows(Tokenised(row.input_ids, row.loss_mask)) == [row]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "no template here"}, "no reply found in rendered text"),
        ({"input_ids": [5, 6, 100000]}, "token id outside the vocabulary"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "no supervised tokens"),
        ({"prompt": "only a prompt"}, "no reply in the record"),
    ],
)
def test_records_without_a_usable_reply(record: dict, reason: str) -> None:
    (drop,) = chat_of("chatml").rows(parse(record))
    assert isinstance(drop, Drop) and drop.reason == reason


@pytest.mark.parametrize(
    ("mask", "max_tokens", "outcome"),
    [
        ("..xxx.", 9, "..xxx."), ("..xxx.", 4, "..xx"), ("..xxx.", 3, TOO_LONG), ("...xx", 3, TOO_LONG),
        ("..x...", 9, TOO_SHORT), ("x.x.x.", 9, TOO_SHORT), ("......", 9, TOO_SHORT), ("xx", 2, "xx"),
    ],
)  # fmt: skip
def test_fit_keeps_a_row_only_while_a_first_label_remains(mask: str, max_tokens: int, outcome: str) -> None:
    row = Row(list(range(len(mask))), [c == "x" for c in mask])
    if outcome in (TOO_LONG, TOO_SHORT):
        with pytest.raises(Drop, match=re.escape(outcome)):
            fit(row, max_tokens)
        return
    cut = fit(row, max_tokens)
    assert cut == Row(list(range(len(outcome))), [c == "x" for c in outcome])


def test_encoding_by_the_last_control_token_equals_encoding_the_whole() -> None:
    """The shortcut of the prefix question against the slow way, on text that merges in odd ways."""
    chat = smol("chatml")
    text = "<|im_start|>user\n  a\n\n b<|im_end|>\n<|im_start|>assistant\n\n\n c  d<|im_end|>\n"
    ((whole,),) = chat.encode([[Draft(text, Rendered(text), True)]])
    for at in range(1, len(text)):
        ids = chat.tokenizer(text[:at], add_special_tokens=False)["input_ids"]
        slow = len(ids) if whole.ids[: len(ids)] == ids else None
        assert whole.tokens_before(at) == slow, text[:at]


def test_chat_of_a_folder_knows_its_stop_tokens(tiny: Any) -> None:
    chat = Chat.of(tiny)
    assert chat.stop_ids == {2} and chat.end_of_turn == 2
    for wrong in ("[1]", "{", "enable_thinking"):
        with pytest.raises(ParamError, match="wanted a JSON object"):
            Chat.of(tiny, wrong)
    assert {"tokenizer", "chat_template", "template_options"} <= set(chat.fingerprint)


def test_slow_tokenizer_and_hopeless_template_are_errors() -> None:
    with pytest.raises(Eagle3Error, match="fast"):
        Chat(object())
    tokenizer: PreTrainedTokenizerFast = templates.bytes_of("chatml")
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(Eagle3Error, match="never"):
        Chat(tokenizer)


def test_template_options_reach_the_template() -> None:
    tokenizer = templates.bytes_of("chatml")
    tokenizer.chat_template = templates.CHATML + "{% if loud %}!{% endif %}"
    ask: list[dict] = [{"role": "user", "content": "a"}]
    quiet, loud = Chat(tokenizer), Chat(tokenizer, template_options={"loud": True})
    assert loud.render(ask) == quiet.render(ask) + "!" and loud.fingerprint != quiet.fingerprint
    for wrong in ({"lound": True}, {"messages": []}, {"oud": 1}):
        with pytest.raises(ParamError, match=f"knows no option '{next(iter(wrong))}'"):
            Chat(tokenizer, template_options=wrong)
    assert isinstance(parse({"messages": ask}), Conversation)
