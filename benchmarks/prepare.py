"""Throughput of prepare on two sizes, beside what the tokenizer alone does on the same rendered text.

    python benchmarks/prepare.py [MB ...]

Prints MB of JSONL a second, the share of the tokenizer's own speed, and peak memory. Required: at least 15 MB/s or
60 % of the tokenizer, whichever is smaller, and the same at both sizes. The records are multi-turn conversations
between the people of the chitchat data, which is real text.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "true"  # the tokenizer alone may use all cores

from eagle3lib import prepare, targets  # noqa: E402
from eagle3lib.chat import Chat  # noqa: E402
from eagle3lib.evalsets import package_file  # noqa: E402


def write_records(path: Path, megabytes: float) -> None:
    chats = json.loads(package_file("chitchat-dataset", "chitchat_dataset/dataset.json").read_bytes()).values()
    turns = [text for chat in chats for turn in chat["messages"] if (text := "\n".join(m["text"] for m in turn).strip())]
    draw, written = random.Random(0), 0

    def text(most: int) -> str:
        return " ".join(draw.choices(turns, k=draw.randint(1, most)))

    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            pairs = [({"role": "user", "content": text(6)}, {"role": "assistant", "content": text(12)}) for _ in range(draw.randint(1, 4))]
            written += file.write(json.dumps({"messages": [turn for pair in pairs for turn in pair]}, ensure_ascii=False) + "\n")


def tokenizer_alone(chat: Chat, path: Path) -> float:
    """Seconds that the tokenizer takes for the rendered text, in batches, its own threads on."""
    seconds = 0.0
    with path.open(encoding="utf-8") as file:
        while batch := [chat.render(json.loads(line)["messages"]) for line in islice(file, 1000)]:
            start = time.perf_counter()
            chat.tokenizer(batch, add_special_tokens=False)
            seconds += time.perf_counter() - start
    return seconds


def measure(chat: Chat, folder: Path, megabytes: float) -> None:
    path = folder / f"{megabytes:g}.jsonl"
    write_records(path, megabytes)
    size = path.stat().st_size / 1e6
    alone = tokenizer_alone(chat, path)
    start = time.perf_counter()
    options = prepare.Options(prompts=str(path), answer="data", max_prompts=0, max_tokens=8000)
    prepared = prepare.build(prepare.load(options), chat, folder / f"run-{megabytes:g}")
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{size:8.1f} MB: {size / seconds:6.2f} MB/s ({prepared.about['tokens'] / seconds:,.0f} tok/s); tokenizer alone "
          f"{size / alone:6.2f} MB/s; share {alone / seconds:.0%}; peak memory {peak:.2f} GB", flush=True)


def main() -> None:
    chat = Chat.of(targets.resolve(targets.SMOLLM2))
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(float, sys.argv[1:] or ["10", "40"]):
            measure(chat, Path(folder), megabytes)


if __name__ == "__main__":
    main()
