"""How fast is the lossless loop beside what its own acceptance and bare step times allow?

    python benchmarks/loop.py                                       SmolLM2 and a random draft: the loop's own cost
    python benchmarks/loop.py --run runs/latest --device cuda       a trained draft

Allowed: tokens a round x prompts / (one bare target forward over a round's tokens + the bare draft steps). Bare: the same model calls at
the same batch and context, with a cache, without masks, captured states, bookkeeping or acceptance. The issue's line: at least 0.8.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache

from eagle3lib import acceptance, checkpoint, evaluate, questions, speculate, targets
from eagle3lib.acceptance import Shape
from eagle3lib.chat import Chat
from eagle3lib.draft import Draft, DraftConfig


def random_draft(target: Path, vocab: int) -> Draft:
    """The target's first `vocab` tokens, random weights, the target's embedding."""
    config = targets.text_config(target)
    cfg = DraftConfig.from_target(config, vocab, targets.capture_layers(config.num_hidden_layers))
    draft = Draft(cfg, torch.zeros(vocab, dtype=torch.int64), torch.arange(config.vocab_size) < vocab)
    draft.embed_tokens.weight.data.copy_(targets.head_weights(target)[1])
    return draft.eval()


def median_s(call: Callable[[], object], device: str, times: int = 9) -> float:
    taken = []
    for _ in range(times + 2):
        begun = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begun)
    return statistics.median(taken[2:])


@torch.inference_mode()
def bare_target(model: torch.nn.Module, batch: int, context: int, rows: int, device: str) -> float:
    """Seconds of one forward over `rows` tokens behind `context` cached ones."""
    cache, ids = DynamicCache(), torch.randint(100, 10_000, (batch, context), device=device)
    model(ids, past_key_values=cache, logits_to_keep=1)

    def step() -> None:
        model(ids[:, :rows], past_key_values=cache)
        cache.crop(context)

    return median_s(step, device)


@torch.inference_mode()
def bare_draft(draft: Draft, batch: int, context: int, shape: Shape, device: str) -> float:
    """Seconds of the draft's steps of one round: `steps` calls of its layer and head on top-k rows (the first on one)."""
    def rows(n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return draft.embed(torch.randint(0, 1000, (batch, n), device=device)), torch.randn(batch, n, draft.cfg.hidden_size, device=device)

    def at(n: int, first: int) -> torch.Tensor:
        return (torch.arange(n, device=device) + first).expand(batch, n)

    _, past = draft.layer(*rows(context), at(context, 0))

    def step() -> None:
        for k in range(shape.steps):
            n = shape.topk if k else 1
            out, _ = draft.layer(*rows(n), at(n, context + k), past)
            draft.logits(out).argmax(-1)

    return median_s(step, device)


def measure(model: torch.nn.Module, draft: Draft, prompts: list[list[int]], shape: Shape, tokens: int, device: str) -> dict[str, float]:
    """One line of the table. Prompts have one length, so that the bare steps see the loop's context."""
    speculate.generate(model, draft, prompts, shape=shape, max_new_tokens=8, ends=set())  # warm
    replies, times = speculate.generate(model, draft, prompts, shape=shape, max_new_tokens=tokens, ends=set())
    length = acceptance.measured([r.rounds for r in replies], shape.steps).length
    context = len(prompts[0]) + tokens // 2
    target_s, draft_s = bare_target(model, len(prompts), context, shape.tokens, device), bare_draft(draft, len(prompts), context, shape, device)
    plain_s = bare_target(model, len(prompts), context, 1, device)
    allowed = (times.tokens / times.forwards) / (target_s + draft_s)
    return {"batch": len(prompts), "acceptance": length, "tokens_per_s": times.tokens_per_s, "allowed": allowed,
            "share": times.tokens_per_s / allowed, "verify_ms": 1e3 * times.verify / times.forwards, "bare_target_ms": 1e3 * target_s,
            "draft_ms": 1e3 * times.draft / max(times.forwards - 1, 1), "bare_draft_ms": 1e3 * draft_s,
            "plain_tokens_per_s": len(prompts) / plain_s}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--run", type=Path)
    parser.add_argument("--device", default="auto")
    for name, default in (("tokens", 64), ("prompt", 64), ("vocab", 16384)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    args = parser.parse_args()
    target, device = targets.resolve(args.target), evaluate.device(args.device)
    model = targets.load_model(target, device=device)
    draft = (checkpoint.load(args.run / "checkpoint", target) if args.run else random_draft(target, args.vocab)).to(device)
    asked = questions.choose(["ifbench", "mtbench", "humaneval"], 40, Chat.of(target), room=2000, turns=1)
    prompts = [q.ids[: args.prompt] for q in asked.questions if len(q.ids) >= args.prompt]
    for shape in (Shape(3), Shape(5), Shape(5, 4, 16)):
        for batch in args.batches:
            line = measure(model, draft, prompts[:batch], shape, args.tokens, device)
            print(f"{shape}: " + ", ".join(f"{name} {value:.3g}" for name, value in line.items()), flush=True)


if __name__ == "__main__":
    main()
