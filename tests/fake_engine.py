"""An engine without a server: dumps are functions of the token ids, written as the plugin writes them. Faults can be scripted.

`faults[k]` spoils the k-th prompt ever asked for (counted from 0): a function of (folder, rid, ids, hidden) that writes the
dump itself, or returns other hidden states to be written.
"""

from __future__ import annotations

import json
import secrets
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3lib import capture
from eagle3lib.client import Reply
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import make_manifest, sample_id

LAYERS, H = [2, 4, 5], 16


def fake_target(folder: Path, hidden: int = H, layers: int = 8) -> Path:
    """A target of which only the sizes are known."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": layers,
                                                    "hidden_size": hidden, "vocab_size": 1000, "num_attention_heads": 4,
                                                    "num_key_value_heads": 2, "intermediate_size": 32}))
    return folder


def states(ids: list[int], hidden: int = H) -> torch.Tensor:
    """What this target computes: any two prompts differ, the same prompt gives the same; token 0 is an outlier as in a Llama."""
    generator = torch.Generator().manual_seed(int(sample_id(ids, [True] * len(ids))[:8], 16))
    found = torch.randn(len(ids), len(LAYERS) + 1, hidden, generator=generator)
    found[0] *= 170
    return found.bfloat16()


def make_rows(count: int, longest: int = 40, seed: int = 0) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(count):
        length = int(torch.randint(2, longest, (1,), generator=generator))
        ids = torch.randint(0, 1000, (length,), generator=generator).tolist()
        mask = [n >= length // 2 for n in range(length)]
        rows.append({"sample_id": sample_id(ids, mask), "input_ids": ids, "loss_mask": mask, "n_tokens": length})
    return rows


class FakeEngine:
    def __init__(self, folder: Path, hidden: int = H, weights: str = "w1", seconds_a_batch: float = 0.0, dies_after: int = -1):
        self.base, self.hidden, self.seconds, self.dies_after = Path(folder), hidden, seconds_a_batch, dies_after
        self.settings = types.SimpleNamespace(dtype="bfloat16")
        self.fingerprint = {"target": {"weights": weights}}
        self.client = types.SimpleNamespace(prefill=self.prefill, abort_all=lambda: None)
        self.faults: dict[int, Callable[..., torch.Tensor | None]] = {}
        self.asked = self.batches = 0
        self.alone: list[str] = []  # requests that were the only one of their batch
        self._guard = threading.Lock()
        self.begin()

    def begin(self) -> None:
        self.nonce = secrets.token_hex(8)
        self.dump_dir = self.base / self.nonce
        self.dump_dir.mkdir(parents=True)
        self.dead = False
        self.handshake = {"nonce": self.nonce, "layers": LAYERS, "hidden_size": self.hidden, "dtype": "bfloat16"}

    def manifest(self) -> dict[str, Any]:
        return make_manifest(self.fingerprint, LAYERS, self.hidden, "bfloat16")

    def rid(self, name: str) -> str:
        return capture.dump_rid(self.nonce, name)

    def require_alive(self) -> None:
        if self.dead:
            raise Eagle3Error("engine: the server ended with exit code -9")

    def prefill(self, prompts: list[list[int]], rids: list[str]) -> list[Reply]:
        self.require_alive()
        time.sleep(self.seconds)
        with self._guard:
            first, self.asked, self.batches = self.asked, self.asked + len(prompts), self.batches + 1
            if 0 <= self.dies_after <= self.batches:
                self.dead, self.dies_after = True, -1
                raise Eagle3Error("engine: connection reset")
        if len(rids) == 1:
            self.alone.append(rids[0])
        return [self._answer(first + n, ids, rid) for n, (ids, rid) in enumerate(zip(prompts, rids, strict=True))]

    def _answer(self, number: int, ids: list[int], rid: str) -> Reply:
        hidden: torch.Tensor | None = states(ids, self.hidden)
        if number in self.faults:
            hidden = self.faults[number](self.dump_dir, rid, ids, hidden)
        if hidden is not None:
            self.write(rid, ids, hidden)
        return Reply([1], "length", len(ids), 0, rid)

    def write(self, rid: str, ids: list[int], hidden: torch.Tensor) -> None:
        part = self.dump_dir / f".{rid}.part"
        save_file({"hidden": hidden.contiguous(), "input_ids": torch.tensor(ids)}, part,
                  {"nonce": self.nonce, "rid": rid, "start": "0", "layers": ",".join(map(str, LAYERS))})
        part.rename(self.dump_dir / f"{rid}.0.safetensors")


class RestartingEngine(FakeEngine):
    restarts = 0

    def restart(self, why: str) -> None:
        self.restarts += 1
        if self.restarts > 2:
            raise Eagle3Error(f"engine: restarted 2 times already; now again: {why}")
        self.begin()
