"""What the tests of preparation share: records, an engine that answers by rule, and the ways through the stage."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from eagle3lib import prepare, prepared
from eagle3lib.chat import Chat
from eagle3lib.errors import Eagle3Error

END, BYTE0 = 2, 3  # ids of the byte tokenizer: <|im_end|>, and the first letter


@dataclass
class FakeEngine:
    """Answers as a fixed function of the prompt: "re: " and the last user text, or a text of `long` letters."""

    chat: Chat
    long: int = 0
    finish: str = "stop"
    leave_out_end: bool = False
    asked: list[tuple[int, ...]] = field(default_factory=list)
    fingerprint: dict[str, str] = field(default_factory=dict)
    pause: float = 0.0
    told: dict[str, Any] = field(default_factory=dict)
    fails_after: int = 10**9

    def generate(self, input_ids: list[list[int]], *, max_new_tokens: int, on_result: Any, **told: Any) -> None:
        self.told = told
        for index in random.Random(len(input_ids)).sample(range(len(input_ids)), len(input_ids)):  # replies come in any order
            time.sleep(self.pause)
            if len(self.asked) >= self.fails_after:
                raise Eagle3Error("engine: gone")
            self.asked.append(tuple(input_ids[index]))
            on_result(index, self._reply(input_ids[index], max_new_tokens))

    def _reply(self, ids: list[int], max_new_tokens: int) -> SimpleNamespace:
        if self.finish == "refused":
            return SimpleNamespace(output_ids=[], finish_reason="refused", error="too long for me")
        prompt = self.chat.tokenizer.decode(ids)
        question = prompt.split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        out = self.chat.tokenizer("x" * self.long if self.long else f"re: {question}", add_special_tokens=False)["input_ids"]
        done = [*out, END]
        if len(done) > max_new_tokens:
            return SimpleNamespace(output_ids=done[:max_new_tokens], finish_reason="length")
        return SimpleNamespace(output_ids=out if self.leave_out_end else done, finish_reason="stop")


def write(path: Path, records: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return str(path)


def talk(*turns: tuple[str, str]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def questions(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"What is {i} plus {i * 7}, please?"} for i in range(n)]


def run(options: prepare.Options, chat: Chat, engine: Any, folder: Path) -> prepared.Prepared:
    loaded = prepare.load(options)
    return prepare.build(loaded, chat, folder, prepare.answer(loaded, chat, engine, folder))


def shown(chat: Chat, row: dict[str, Any]) -> str:
    """The row as text with the supervised stretches in brackets."""
    return prepare.samples_html(SimpleNamespace(rows=[row]), chat.tokenizer, 1).text.split("\n", 1)[1]


def answered(folder: Path, chat: Chat, records: list[Any], **options: Any) -> prepared.Prepared:
    folder.mkdir(exist_ok=True)
    chosen = prepare.Options(prompts=write(folder / "data.jsonl", records), answer="data", **{"max_prompts": 0, **options})
    return prepare.build(prepare.load(chosen), chat, folder)


def pairs(n: int) -> list[dict[str, str]]:
    return [{"prompt": f"Question number {i}?", "response": f"Answer number {i}."} for i in range(n)]
