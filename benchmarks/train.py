"""Speed of training on random data, for named shapes: python benchmarks/train.py smol llama8b-2k --device cuda

Writes a synthetic store, then reads, packs, sends and trains as 04_train does. Prints one JSON line a shape: tokens/s (each
position counted once), ms a step, peak device memory, the share of the time for which the device had no batch, the rate of
the model's arithmetic and its share of the machine's own matrix speed; on a GPU the share of a step in which no kernel ran,
on a CPU the share of its time inside matrix products. Needs no target and no engine.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from eagle3lib import step
from eagle3lib.batches import Batch, Reader
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.feed import Feed
from eagle3lib.loss import DISTANCES
from eagle3lib.parallel import Group
from eagle3lib.precision import fast_products
from eagle3lib.recipe import Recipe
from eagle3lib.store import Sample, Store, make_manifest, sample_id

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


def make_store(shape: Shape, folder: Path, batches: int) -> Store:
    """Documents of random tokens and states, the last `supervised` share of each being one reply."""
    with Store.create(folder, make_manifest({"made": "up"}, [2, 15, 27], shape.hidden, "bfloat16")) as writer:
        for _ in range(batches * shape.documents):
            ids = torch.randint(0, shape.vocab, (shape.tokens,))
            mask = torch.arange(shape.tokens) >= round(shape.tokens * (1 - shape.supervised))
            writer.append(Sample(sample_id(ids, mask), ids, mask, torch.randn(shape.tokens, 4, shape.hidden).bfloat16()))
    return Store.open(folder)


def make_head(shape: Shape, dtype: torch.dtype) -> torch.Tensor:
    """A target's lm_head whose greedy token always lies in the draft vocabulary, so that every supervised row counts."""
    head = torch.randn(shape.vocab, shape.hidden) * shape.hidden**-0.5
    head[shape.drafted :] = 0
    return head.to(dtype)


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
    dtype, rows = (torch.bfloat16, 8192) if device == "cuda" else (torch.float32, 1024)
    a, b = torch.randn(rows, shape.hidden, device=device, dtype=dtype), torch.randn(shape.hidden, shape.drafted, device=device, dtype=dtype)
    seconds = []
    for _ in range(12):
        start = time.perf_counter()
        a @ b
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return 2 * rows * shape.hidden * shape.drafted / statistics.median(seconds)


class Trainer:
    """A store of a few batches, gone through again and again."""

    def __init__(self, shape: Shape, device: str, folder: Path, distance: str) -> None:
        self.store, self.shape, self.device = make_store(shape, folder, 4), shape, device
        head = make_head(shape, torch.bfloat16 if device == "cuda" else torch.float32)
        self.recipe = Recipe(ttt_steps=shape.steps, batch_tokens=shape.documents * shape.tokens, loss=distance)
        self.reader, self.draft = Reader(self.store, head, device), make_draft(shape).to(device)
        optimizer = torch.optim.AdamW([p for p in self.draft.parameters() if p.requires_grad], lr=1e-4, fused=True, capturable=device == "cuda")
        self.step = step.make(self.draft, head[: shape.drafted].to(device), optimizer, self.recipe, Group(), self.recipe.batch_tokens)
        self.order = [list(range(n, n + shape.documents)) for n in range(0, len(self.store), shape.documents)]

    def run(self, count: int) -> tuple[float, float]:
        """Seconds a step of `count` steps, and those of them without a batch."""
        todo, waited = [self.order[n % len(self.order)] for n in range(count)], 0.0
        with Feed(self.reader, todo, self.step.send, self.draft.t2d, self.shape.steps) as feed:
            start = time.perf_counter()
            for n, fed in enumerate(feed):
                waited += fed.waited if n else 0.0
                self.step.take(fed.sent, fed.rows, 1e-4)
            if self.device == "cuda":
                torch.cuda.synchronize()
            return (time.perf_counter() - start) / count, waited / count

    def batch(self) -> Batch:
        return self.reader.batch(self.order[0])

    def traced(self) -> dict[str, float]:
        """Of one step: the share of CPU time in matrix products, or of its time on the GPU in which no kernel ran."""
        sent, rows = self.step.send(self.batch()), torch.ones(self.shape.steps)
        activity = ProfilerActivity.CUDA if self.device == "cuda" else ProfilerActivity.CPU
        with profile(activities=[activity]) as trace:
            for _ in range(3):
                self.step.take(sent, rows, 1e-4)
            if self.device == "cuda":
                torch.cuda.synchronize()
        if self.device == "cuda":
            return {"idle_share": round(idle_share(trace), 3)}
        own = {event.key: event.self_cpu_time_total for event in trace.key_averages()}
        return {"share_in_products": round(sum(own.get(name, 0.0) for name in PRODUCTS) / sum(own.values()), 3)}


def idle_share(trace: Any) -> float:
    """Share of the time between the first and the last kernel in which none ran."""
    spans = sorted((e.time_range.start, e.time_range.end) for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return 1 - busy / (end - spans[0][0])


def measure(name: str, shape: Shape, device: str, count: int, distance: str) -> dict[str, Any]:
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(shape, device, Path(folder) / "store", distance)
        trainer.run(24)  # greedy tokens, kernels, graphs, pinned memory
        seconds, waited = trainer.run(count)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        tokens, batch, traced = shape.documents * shape.tokens, trainer.batch(), trainer.traced()
    flops = step_flops(shape, batch)
    return {
        "shape": name, "device": device, "tokens_per_s": round(tokens / seconds), "supervised_per_s": round(len(batch) / seconds),
        "ms_per_step": round(seconds * 1e3, 1), "peak_gib": round(peak / 2**30, 2), "wait_share": round(waited / seconds, 3), **traced,
        "mflop_per_token": round(flops / tokens / 1e6), "tflops": round(flops / seconds / 1e12, 3),
        "share_of_matrix_speed": round(flops / seconds / matrix_speed(shape, device), 3),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", default=["smollm2-cpu"], help=f"any of {', '.join(SHAPES)}")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--count", type=int, default=20, help="steps timed")
    parser.add_argument("--exact", action="store_true", help="multiply in float32 throughout")
    parser.add_argument("--loss", choices=DISTANCES, default="ce")
    parser.add_argument("--draft-vocab", type=int, help="another draft vocabulary than the shape's [tokens]")
    args = parser.parse_args()
    for name in args.shapes:
        if name not in SHAPES:
            parser.error(f"no shape {name!r}; there are {', '.join(SHAPES)}")
        shape = replace(SHAPES[name], drafted=args.draft_vocab or SHAPES[name].drafted)
        if args.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        with nullcontext() if args.exact else fast_products():
            print(json.dumps(measure(name, shape, args.device, args.count, args.loss)), flush=True)


if __name__ == "__main__":
    main()
