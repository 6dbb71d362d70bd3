"""Speed of a training step on random data, for named shapes: python benchmarks/train.py smol --device cuda

Prints one JSON line a shape: tokens/s (each position counted once), ms a step (median), peak memory, the share of the
machine's own matrix speed that the model's arithmetic reaches, and on a CPU the share of time inside matrix products.
Needs no target and no engine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eagle3lib.batches import Batch, document, pack
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.loss import objective
from eagle3lib.precision import fast_products
from eagle3lib.store import Sample

PRODUCTS = ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm", "aten::baddbmm")


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    drafted: int
    documents: int
    tokens: int  # a document
    steps: int = 7  # TTT
    supervised: float = 0.6


SHAPES = {
    "smollm2-cpu": Shape(576, 1536, 9, 3, 49152, 4096, 8, 128, steps=5),
    "smol": Shape(576, 1536, 9, 3, 49152, 16384, 8, 1024),
    "llama8b-2k": Shape(4096, 14336, 32, 8, 128256, 32000, 1, 2048),
    "llama8b-8k": Shape(4096, 14336, 32, 8, 128256, 32000, 1, 8192),
}


def make_batch(shape: Shape) -> Batch:
    """Documents of random tokens and states, the last `supervised` share of each being one reply."""
    documents = []
    for n in range(shape.documents):
        ids = torch.randint(0, shape.vocab, (shape.tokens,))
        mask = torch.arange(shape.tokens) >= round(shape.tokens * (1 - shape.supervised))
        one = document(Sample(f"{n}", ids, mask, torch.randn(shape.tokens, 4, shape.hidden).bfloat16()))
        one.greedy = torch.randint(0, shape.drafted, one.row.shape)
        documents.append(one)
    return pack(documents)


def make_draft(shape: Shape) -> Draft:
    cfg = DraftConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_heads=shape.heads, num_kv_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads, vocab_size=shape.vocab, draft_vocab_size=shape.drafted,
        target_hidden_size=shape.hidden, aux_layers=(2, 15, 27), max_position_embeddings=shape.tokens,
    )  # fmt: skip
    return Draft(cfg, torch.zeros(shape.drafted, dtype=torch.int64), torch.arange(shape.vocab) < shape.drafted)


def step_flops(shape: Shape, batch: Batch) -> float:
    """Arithmetic of one step's matrix products, forward and backward (three products each; the target's head one)."""
    h, i, d, c = shape.hidden, shape.intermediate, shape.drafted, shape.hidden // shape.heads
    key = 2 * 2 * h * 2 * shape.kv_heads * c  # keys and values of a row
    layer = 2 * 2 * h * h + key + 2 * h * h + 3 * 2 * h * i  # queries, own keys and values, output, MLP
    rows = [int((batch.left > k).sum()) for k in range(shape.steps)]
    attended = sum(int((batch.position[batch.row[batch.left > k]] + 1).sum()) for k in range(shape.steps))
    forward = len(batch.token) * (2 * 3 * h * h + key) + sum(rows) * (layer + 2 * h * d) - rows[0] * key + attended * 4 * h
    return 3 * forward + len(batch) * 2 * h * d


def matrix_speed(shape: Shape, device: str) -> float:
    """FLOP/s of this machine's own product of a typical size, in the precision that training uses."""
    a, b = torch.randn(1024, shape.hidden, device=device), torch.randn(shape.hidden, shape.drafted, device=device)
    return 2 * 1024 * shape.hidden * shape.drafted / statistics.median(timed(lambda: a @ b, 10, device))


def timed(function, count: int, device: str) -> list[float]:
    function()
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        function()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds


def product_share(step) -> float:
    """Share of the CPU time of one step inside matrix products."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        step()
    own = {event.key: event.self_cpu_time_total for event in traced.key_averages()}
    return sum(own.get(name, 0.0) for name in PRODUCTS) / sum(own.values())


def measure(name: str, shape: Shape, device: str, count: int) -> dict[str, object]:
    torch.manual_seed(0)
    draft, batch = make_draft(shape).to(device), make_batch(shape).to(device)
    head = torch.randn_like(draft.lm_head.weight)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        objective(draft, batch, head, shape.steps, 0.8).loss.backward()
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
        optimizer.step()

    seconds = statistics.median(timed(step, count, device))
    tokens, flops = shape.documents * shape.tokens, step_flops(shape, batch)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    found = {
        "shape": name, "device": device, "tokens_per_s": round(tokens / seconds), "supervised_per_s": round(len(batch) / seconds),
        "ms_per_step": round(seconds * 1e3, 1), "peak_gib": round(peak / 2**30, 2), "mflop_per_token": round(flops / tokens / 1e6),
        "tflops": round(flops / seconds / 1e12, 3),
        "share_of_matrix_speed": round(flops / seconds / matrix_speed(shape, device), 3),
    }  # fmt: skip
    return found if device == "cuda" else {**found, "share_in_products": round(product_share(step), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["smollm2-cpu"], help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=20, help="steps timed")
    parser.add_argument("--exact", action="store_true", help="multiply in float32 throughout")
    parser.add_argument("--draft-vocab", type=int, help="another draft vocabulary than the shape's [tokens]")
    args = parser.parse_args()
    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"no shape {name!r}; there are {', '.join(SHAPES)}")
        shape = replace(SHAPES[name], drafted=args.draft_vocab or SHAPES[name].drafted)
        if args.exact:
            print(json.dumps(measure(name, shape, args.device, args.count)), flush=True)
            continue
        with fast_products():
            print(json.dumps(measure(name, shape, args.device, args.count)), flush=True)


if __name__ == "__main__":
    main()
