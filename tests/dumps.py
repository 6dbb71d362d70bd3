"""Dumps made by transformers in float32 and rounded to bf16: what a faultless capture would write, without a server."""

from __future__ import annotations

from pathlib import Path

import torch
from datasets import Dataset
from safetensors.torch import save_file

from eagle3lib import targets
from eagle3lib.store import Sample, Store, make_manifest, sample_id

LAYERS = [2, 4, 5]


def greedy_rows(model: torch.nn.Module, count: int, prompt: int = 12, reply: int = 20, seed: int = 0) -> list[dict]:
    """Prepared rows: a random prompt, the target's own greedy reply as the supervised part."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(3, 259, (count, prompt), generator=generator)
    whole = model.generate(prompts, max_new_tokens=reply, min_new_tokens=reply, do_sample=False)
    mask = [False] * prompt + [True] * reply
    return [{"sample_id": sample_id(ids, mask), "input_ids": ids.tolist(), "loss_mask": mask, "n_tokens": len(ids), "n_supervised": reply,
             "source": "test", "heldout": n % 5 == 0} for n, ids in enumerate(whole)]


def hidden_states(model: torch.nn.Module, ids: list[int], layers: list[int] = LAYERS) -> torch.Tensor:
    """[T, A+1, H] float32: r_k for k in layers, then the last hidden state after the final norm."""
    with torch.inference_mode():
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.stack([states[k][0] for k in (*layers, -1)], dim=1)


def write_dump(run: Path, target: Path, rows: list[dict], model: torch.nn.Module, spoil=None, store_rows=None, store_dtype="") -> Store:
    """A run folder as 02_extract leaves it. `spoil(hidden, row) -> hidden` injects a fault before the bf16 rounding."""
    fingerprint = {"engine": "none", "target": targets.fingerprint(target)}
    manifest = make_manifest(fingerprint, LAYERS, model.config.hidden_size, "bfloat16", store_dtype)
    with Store.create(run / "store", manifest, 2**16) as writer:
        for row in rows if store_rows is None else store_rows:
            hidden = hidden_states(model, row["input_ids"])
            hidden = hidden if spoil is None else spoil(hidden, row)
            writer.append(Sample(row["sample_id"], torch.tensor(row["input_ids"]), torch.tensor(row["loss_mask"]), hidden.bfloat16()))
    write_probes(run / "probes.safetensors", rows[:2], model)
    return Store.open(run / "store")


def write_probes(path: Path, rows: list[dict], model: torch.nn.Module, k: int = 5) -> None:
    tensors = {}
    for row in rows:
        with torch.inference_mode():
            top = torch.log_softmax(model(input_ids=torch.tensor([row["input_ids"]])).logits[0].float(), -1).topk(k)
        tensors |= {f"{row['sample_id']}.logprobs": top.values.contiguous(), f"{row['sample_id']}.ids": top.indices.to(torch.int32).contiguous()}
    save_file(tensors, path)


def as_dataset(rows: list[dict]) -> Dataset:
    return Dataset.from_list(rows)
