"""Extraction through the whole path against the same server prefilling the same prompts with the plugin off, in one run.

    python benchmarks/extract.py [--device cpu|cuda] [--target smollm2] [--tokens N] [--rounds 3]

Prints both rates and their ratio, the client's peak memory, what the client alone can take on this machine, and what the
index costs. On a CPU the two servers stand side by side and take turns, so that other work on the machine disturbs both
alike; on a GPU they come one after the other.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import resource
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from datasets import Dataset

from eagle3lib import capture, extract, inbox, preflight, shards, targets
from eagle3lib.arrivals import Norms
from eagle3lib.client import Reply
from eagle3lib.engine import Engine
from eagle3lib.manifest import as_captured
from eagle3lib.store import Store, sample_id
from eagle3lib.work import Work

IN_FLIGHT = 32768


def make_rows(tokens: int, vocab: int, longest: int) -> Dataset:
    """Random prompts with the lengths of chats: most short, some long, `tokens` in all."""
    rng, rows, left = np.random.default_rng(0), [], tokens
    while left > 0:
        length = int(np.clip(rng.lognormal(5, 0.8), 8, min(longest, max(left, 8))))
        ids = rng.integers(10, vocab - 10, length).tolist()
        mask = [False] * (length // 3) + [True] * (length - length // 3)
        rows.append({"sample_id": sample_id(ids, mask), "input_ids": ids, "loss_mask": mask, "n_tokens": length})
        left -= length
    return Dataset.from_list(rows)


def prefill(engine: Engine, rows: Dataset) -> float:
    """Tokens a second of the server alone: the same batches, as many under way, nothing dumped and nothing stored."""
    lengths = np.asarray(rows["n_tokens"], np.int64)
    work = Work(np.arange(len(rows)), lengths, IN_FLIGHT // extract.REQUESTS, extract.REQUESTS)

    def take(_: int) -> None:
        while batch := work.take():
            prompts = rows[[task.row for task in batch]]["input_ids"]
            engine.client.prefill(prompts, [f"plain-{time.monotonic_ns()}-{n}" for n in range(len(prompts))])
            work.done()

    begun = time.monotonic()
    with ThreadPoolExecutor(extract.REQUESTS) as pool:
        list(pool.map(take, range(extract.REQUESTS)))
    return float(lengths.sum()) / (time.monotonic() - begun)


def dump(engine: Engine, rows: Dataset, folder: Path, target: Path) -> float:
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = extract.extract(engine, rows, folder, target, shard_mb=1024, tokens_in_flight=IN_FLIGHT)
    assert len(Store.open(folder)) == len(rows)
    return result.tokens_per_s


@contextlib.contextmanager
def server(kind: str, args: argparse.Namespace, target: Path, folder: Path) -> Iterator[Engine]:
    layers = targets.capture_layers(targets.text_config(target).num_hidden_layers)
    plain = ["--disable-radix-cache", *(["--disable-cuda-graph"] if args.device == "cuda" else [])]  # as the capture needs them
    with Engine.start(target, folder / kind, device=args.device, chunked_prefill_size=args.chunk or None, start_timeout_s=600,
                      **({"capture_layers": layers} if kind == "capture" else {"extra_args": plain})) as engine:
        yield engine


def compare(args: argparse.Namespace, rows: Dataset, target: Path, folder: Path) -> None:
    off: list[float] = []
    on: list[float] = []
    if args.device == "cpu":
        with server("plain", args, target, folder) as plain, server("capture", args, target, folder) as capturing:
            prefill(plain, rows.select(range(4)))
            for turn in range(args.rounds):
                off.append(prefill(plain, rows))
                on.append(dump(capturing, rows, folder / f"store-{turn % 2}", target))
    else:
        with server("plain", args, target, folder) as plain:
            off = [prefill(plain, rows) for _ in range(args.rounds + 1)][1:]
        with server("capture", args, target, folder) as capturing:
            on = [dump(capturing, rows, folder / f"store-{turn % 2}", target) for turn in range(args.rounds + 1)][1:]
    print(f"plugin off {median(off):10,.0f} tok/s  ({', '.join(f'{r:,.0f}' for r in off)})")
    print(f"whole path {median(on):10,.0f} tok/s  ({', '.join(f'{r:,.0f}' for r in on)})")
    print(f"ratio      {median(a / b for a, b in zip(on, off, strict=True)):10.3f}  (median of the rounds)", flush=True)


class Stub:
    """Stands for an engine whose dumps are there already: what one thread of the client alone takes."""

    def __init__(self, folder: Path, manifest: dict[str, Any]):
        self.dump_dir, self.nonce = folder, "0123456789abcdef"
        self.handshake = {"nonce": self.nonce, "layers": manifest["layers"], "hidden_size": manifest["hidden_size"], "dtype": manifest["dtype"]}

    def require_alive(self) -> None:
        pass


def client_alone(rows: Dataset, target: Path, folder: Path) -> None:
    """Dumps of a few hundred rows in shared memory, received and stored by one thread; processor seconds, so others do not count."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    manifest = extract._manifest(target, "bfloat16", "", {})
    shm = preflight.dump_base() / f"bench-{time.monotonic_ns():x}"
    shm.mkdir(parents=True)
    engine, chosen = Stub(shm, manifest), [rows[i] for i in range(min(len(rows), 300))]
    states = torch.randn(max(map(len, rows["input_ids"])), manifest["streams"], manifest["hidden_size"]).bfloat16()
    try:
        replies = [Reply([1], "length", len(row["input_ids"]), 0, f"{engine.nonce}-{row['sample_id']}") for row in chosen]
        for reply, row in zip(replies, chosen, strict=True):
            save_file({"hidden": states[: len(row["input_ids"])].contiguous(), "input_ids": torch.tensor(row["input_ids"])},
                      shm / f"{reply.rid}.0.safetensors", {"nonce": engine.nonce, "rid": reply.rid, "start": "0",
                                                           "layers": ",".join(map(str, manifest["layers"]))})
        with Store.create(folder / "alone", manifest) as writer:
            box = inbox.Inbox(manifest, Norms([*map(str, manifest["layers"]), "last"]))
            begun = time.thread_time()
            for at in range(0, len(chosen), 50):
                box.receive(engine, replies[at : at + 50], chosen[at : at + 50],
                            lambda row, parts: writer.append_parts(row["sample_id"], len(row["input_ids"]), parts))
            capture.delete_dumps(shm, [reply.rid for reply in replies])
            seconds = time.thread_time() - begun
    finally:
        shutil.rmtree(shm)
    tokens = sum(len(row["input_ids"]) for row in chosen)
    print(f"client alone, a core: {tokens * as_captured(manifest).hidden_bytes / seconds / 1e9:.2f} GB/s, {tokens / seconds:,.0f} tok/s, "
          f"{len(chosen) / seconds:,.0f} samples/s of {tokens / len(chosen):.0f} tokens", flush=True)


def index_cost(folder: Path, samples: int = 1_000_000, a_shard: int = 1000) -> None:
    """A million records appended as the writer does it, the first tenth beside the last."""
    seconds = []
    for start in range(0, samples, a_shard):
        begun = time.thread_time()
        records = b"".join(shards.make_record(f"{start + n:032x}", start // a_shard, n, 1, n, n) for n in range(a_shard))
        shards.append_records(folder / "index.bin", records)
        seconds.append((time.thread_time() - begun) / a_shard)
    tenth = len(seconds) // 10
    begun = time.monotonic()
    good = shards.good_records(shards.read_records(folder / "index.bin"))
    print(f"index: {median(seconds[:tenth]) * 1e6:.1f} us a sample at first, {median(seconds[-tenth:]) * 1e6:.1f} us at {samples:,}; "
          f"{good.sum():,} records read and proved in {time.monotonic() - begun:.2f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=["cpu", "cuda"])
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--tokens", type=int, default=0, help="tokens a round; 0: 12,000 on a CPU, 4 million on a GPU")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunk", type=int, default=0, help="tokens of a forward pass; 0: SGLang's choice")
    parser.add_argument("--longest", type=int, default=2000, help="tokens of the longest prompt")
    args = parser.parse_args()
    target = targets.resolve(args.target)
    rows = make_rows(args.tokens or (12_000 if args.device == "cpu" else 4_000_000), targets.text_config(target).vocab_size, args.longest)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        client_alone(rows, target, Path(folder))
        index_cost(Path(folder))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        compare(args, rows, target, Path(folder))
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"client memory: {after / 1e3:,.0f} MB at most, {before / 1e3:,.0f} MB of it before the first request; "
          f"{len(rows):,} samples, {sum(rows['n_tokens']):,} tokens a round")


if __name__ == "__main__":
    main()
