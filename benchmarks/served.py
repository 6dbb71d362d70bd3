"""Does the acceptance length survive serving? SGLang with a run's exported draft, beside the lossless loop, on the same prompts.

    python benchmarks/served.py runs/latest --steps 3 --prompts 24 --tokens 128        needs a GPU: SGLang cannot speculate on a CPU

Served: (completion tokens - 1) / verify steps over the replies of a set (the first token comes from the prefill, not from a verify
step), with a 95 % bootstrap interval over prompts. Measured and simulated: eagle3lib.evaluate, float32.
"""

from __future__ import annotations

import argparse
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3lib import checkpoint, evaluate, targets
from eagle3lib.chat import Chat
from eagle3lib.engine import Engine

SETS = ["mtbench", "humaneval", "gsm8k"]


def serve(target: Path, draft: Path, asked: evaluate.Asked, steps: int, tokens: int) -> list[dict[str, Any]]:
    """meta_info of every reply, in the order asked."""
    flags = {"algorithm": "EAGLE3", "draft-model-path": str(draft.resolve()), "num-steps": str(steps), "eagle-topk": "1",
             "num-draft-tokens": str(steps + 1)}
    extra = [word for name, value in flags.items() for word in (f"--speculative-{name}", value)]
    with tempfile.TemporaryDirectory() as scratch, Engine.start(target, Path(scratch), extra_args=[*extra, "--disable-cuda-graph"]) as engine:
        def ask(n: int) -> dict[str, Any]:
            return engine.client.post(asked.questions[n].ids, f"served-{n}", {"temperature": 0, "max_new_tokens": tokens})["meta_info"]

        with ThreadPoolExecutor(32) as pool:
            return list(pool.map(ask, range(len(asked.questions))))


def served_length(metas: list[dict[str, Any]], seed: int = 0) -> tuple[float, float, float, int]:
    """(acceptance length, low, high, verify steps)."""
    written = np.array([m["completion_tokens"] - 1 for m in metas])
    verified = np.array([m["spec_verify_ct"] for m in metas])
    draws = np.random.default_rng(seed).integers(0, len(metas), (2000, len(metas)))
    low, high = np.percentile(written[draws].sum(1) / verified[draws].sum(1), [2.5, 97.5])
    return float(written.sum() / verified.sum()), float(low), float(high), int(verified.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--target", default="smollm2")
    for name, default in (("steps", 3), ("prompts", 24), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("served acceptance needs a GPU: SGLang cannot speculate on a CPU")
    target = targets.resolve(args.target)
    chat, model = Chat.of(target), targets.load_model(target, device="cuda")
    asked = evaluate.questions(SETS, args.prompts, chat, room=evaluate.room(model, args.tokens, args.steps))
    metas = serve(target, args.run / "draft", asked, args.steps, args.tokens)
    for name in SETS:
        own = [m for m, q in zip(metas, asked.questions, strict=True) if q.set == name]
        length, low, high, rounds = served_length(own)
        print(f"served {name}: {length:.2f} [{low:.2f}, {high:.2f}] over {rounds:,} verify steps")
    draft = checkpoint.load(args.run / "checkpoint", target)
    print(evaluate.measure(model, draft, asked, chat, steps=args.steps, max_new_tokens=args.tokens).table())


if __name__ == "__main__":
    main()
