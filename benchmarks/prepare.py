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
from statistics import median

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


def prepare_all(chat: Chat, path: Path, run: Path) -> tuple[float, int]:
    """(seconds from the file to the finished folder, tokens)."""
    start = time.perf_counter()
    options = prepare.Options(prompts=str(path), answer="data", max_prompts=0, max_tokens=8000)
    prepared = prepare.build(prepare.load(options), chat, run)
    return time.perf_counter() - start, prepared.about["tokens"]


def measure(chat: Chat, folder: Path, megabytes: float) -> None:
    """Tokenizer and prepare in turn, three times each; medians, because other work on the machine disturbs both."""
    path = folder / f"{megabytes:g}.jsonl"
    write_records(path, megabytes)
    size = path.stat().st_size / 1e6
    alone, ours, shares = [], [], []
    for turn in range(3):
        alone.append(tokenizer_alone(chat, path))
        seconds, tokens = prepare_all(chat, path, folder / f"run-{megabytes:g}-{turn}")
        ours.append(seconds)
        shares.append(alone[-1] / seconds)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"{size:8.1f} MB: {size / median(ours):6.2f} MB/s ({tokens / median(ours):,.0f} tok/s); tokenizer alone "
          f"{size / median(alone):6.2f} MB/s; share {median(shares):.0%}; peak memory {peak:.2f} GB", flush=True)


def main() -> None:
    chat = Chat.of(targets.resolve(targets.SMOLLM2))
    with tempfile.TemporaryDirectory() as folder:
        for megabytes in map(float, sys.argv[1:] or ["10", "40"]):
            measure(chat, Path(folder), megabytes)


if __name__ == "__main__":
    main()
