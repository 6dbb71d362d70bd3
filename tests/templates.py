"""Six template styles, each twice: as the Jinja that the library sees, and as plain Python that says which text is a
reply. The Python one is the oracle of the mask tests; it shares no code with the library."""

from __future__ import annotations

import json
from typing import Any

from tiny import CHATML, byte_tokenizer

Piece = tuple[str, int | None]  # text, and the index of the message whose reply it is

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' + m['content'] | trim + '<|eot_id|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# Thinking of a reply is shown only while no later user turn follows it.
THINKING = (
    "{% set ns = namespace(last=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and m['reasoning_content'] and loop.index0 > ns.last %}"
    "{{ '<think>\n' + m['reasoning_content'] + '\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' }}{% for t in tools %}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if m['role'] == 'tool' %}"
    "{{ '<|im_start|>user\n<tool_response>' + m['content'] + '</tool_response><|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}{% for c in m['tool_calls'] or [] %}"
    "{{ '<tool_call>' + (c['function'] | tojson) + '</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# A conversation that is not to go on ends with one more token (Phi-3): what is rendered up to a reply is then no prefix.
CLOSED = CHATML + "{% if not add_generation_prompt %}{{ '<|endoftext|>' }}{% endif %}"
# The system text stands in the last user turn (Mistral), so an earlier prompt is no prefix of the whole.
MOVING = (
    "{% set ns = namespace(last=0, system='') %}{% for m in messages %}"
    "{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}"
    "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}{% endif %}"
    "{% endfor %}{% for m in messages %}{% if m['role'] != 'system' %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if loop.index0 == ns.last %}{{ ns.system }}{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
JINJA = {"chatml": CHATML, "llama3": LLAMA3, "thinking": THINKING, "tools": TOOLS, "closed": CLOSED, "moving": MOVING}
LLAMA3_TOKENS = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def bytes_of(style: str) -> Any:
    """The byte tokenizer with this style's template: one token a byte, so text pieces can be encoded one by one."""
    return dress(byte_tokenizer(), style)


def dress(tokenizer: Any, style: str) -> Any:
    if style == "llama3":
        tokenizer.add_special_tokens({"additional_special_tokens": LLAMA3_TOKENS})
        tokenizer.bos_token, tokenizer.eos_token = LLAMA3_TOKENS[0], LLAMA3_TOKENS[3]
    tokenizer.chat_template = JINJA[style]
    return tokenizer


def pieces(style: str, messages: list[dict], tools: list[dict] | None = None) -> list[Piece]:
    """What the whole conversation renders to. A reply's piece runs through its end-of-turn token."""
    if style == "llama3":
        return _llama3(messages)
    found: list[Piece] = []
    if style == "tools" and tools:
        found.append(("<|im_start|>system\nTools: " + "".join(json.dumps(t, ensure_ascii=False) for t in tools) + "<|im_end|>\n", None))
    last_user = max((i for i, m in enumerate(messages) if m["role"] == "user"), default=-1)
    if style == "moving" and messages[0]["role"] == "system":
        last = messages[last_user]
        messages = [*messages[:last_user], last | {"content": f"{messages[0]['content']}\n\n{last['content']}"}, *messages[last_user + 1 :]]
    for i, m in enumerate(messages):
        if m["role"] == "assistant":
            found += [("<|im_start|>assistant\n", None), (_reply(style, m, i > last_user) + "<|im_end|>", i), ("\n", None)]
        elif style == "moving" and m["role"] == "system":
            pass
        elif m["role"] == "tool":
            found.append((f"<|im_start|>user\n<tool_response>{m['content']}</tool_response><|im_end|>\n", None))
        else:
            found.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", None))
    return [*found, ("<|endoftext|>", None)] if style == "closed" else found


def _reply(style: str, message: dict, latest: bool) -> str:
    thought = message.get("reasoning_content", "")
    calls = "".join(f"<tool_call>{json.dumps(c['function'], ensure_ascii=False)}</tool_call>" for c in message.get("tool_calls", []))
    shown = f"<think>\n{thought}\n</think>\n\n" if style == "thinking" and thought and latest else ""
    return shown + message["content"] + calls


def _llama3(messages: list[dict]) -> list[Piece]:
    found: list[Piece] = [("<|begin_of_text|>", None)]
    for i, m in enumerate(messages):
        header, body = f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n", m["content"].strip() + "<|eot_id|>"
        found += [(header, None), (body, i)] if m["role"] == "assistant" else [(header + body, None)]
    return found


def rows(style: str, messages: list[dict], tools: list[dict] | None = None) -> list[list[Piece]]:
    """The rows that should come out: one, unless what stands before some reply, or the reply, is not the same in the whole."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    whole = pieces(style, messages, tools)
    alone = {i: pieces(style, messages[: i + 1], tools) for i in replies}
    if all(_through(whole, i) == _through(alone[i], i) for i in replies):
        return [whole]
    return [[(t, j if j == i else None) for t, j in alone[i]] for i in replies]


def _through(row: list[Piece], reply: int) -> str:
    end = next(n for n, (_, i) in enumerate(row) if i == reply)
    return "".join(text for text, _ in row[: end + 1])
