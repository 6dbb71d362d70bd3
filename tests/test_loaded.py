"""The server's own checksums against the draft's file: SGLang's real hash kernel is the oracle, run by Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from drafts import small_draft
from safetensors.torch import load_file, save_file

from eagle3lib import export, loaded
from eagle3lib.checks import Checks

KERNEL = """
import importlib.util, json, sys, torch
from safetensors.torch import load_file
spec = importlib.util.spec_from_file_location("hashing", sys.argv[1])
hashing = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hashing)
def words(t):
    data = t.contiguous().reshape(-1).view(torch.uint8)
    return torch.cat([data, data.new_zeros(-len(data) % 4)]).view(torch.uint32)
class Here(torch.Tensor):
    is_cuda = True
hashing._as_uint32_words = words
found = {n: hashing.gpu_tensor_hash.__wrapped__(t.as_subclass(Here)) for n, t in load_file(sys.argv[2]).items()}
print(json.dumps({n: f"{h:016x}" for n, h in found.items()}))
"""


def test_hashes_are_those_of_sglangs_kernel(tmp_path, monkeypatch):
    kernel = Path(find_spec("sglang").submodule_search_locations[0]) / "srt/layers/multimodal.py"
    generator = torch.Generator().manual_seed(0)
    tensors = {f"{n}": torch.randn(*shape, generator=generator).to(dtype) for n, (shape, dtype) in enumerate([
        ((1,), torch.bfloat16), ((3,), torch.bfloat16), ((1,), torch.float32), ((128, 128), torch.bfloat16), ((129, 129), torch.bfloat16),
        ((257, 131), torch.float32)])}
    save_file(tensors, tmp_path / "t.safetensors")
    done = subprocess.run([sys.executable, "-c", KERNEL, str(kernel), str(tmp_path / "t.safetensors")], capture_output=True, text=True,
                          env={**os.environ, "TRITON_INTERPRET": "1"})
    assert done.returncode == 0, done.stderr
    monkeypatch.setattr(loaded, "PART", loaded.TILE)  # a tensor of several parts hashes like one of a single part
    assert {n: loaded.tensor_hash(t) for n, t in tensors.items()} == json.loads(done.stdout)


@pytest.fixture
def folder(tmp_path):
    return export.export(small_draft(), tmp_path / "draft")


def held_by_sglang(folder):
    """What the server would hold: SGLang's names, stacked projections, a padded head, and the target's own tensors."""
    t = load_file(folder / "model.safetensors")
    layer = {f"draft.model.layers.0.{n}": t[f"midlayer.{n}"] for n in (
        "input_layernorm.weight", "hidden_norm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")}
    layer["draft.model.layers.0.self_attn.qkv_proj.weight"] = torch.cat([t[f"midlayer.self_attn.{p}_proj.weight"] for p in "qkv"])
    layer["draft.model.layers.0.mlp.gate_up_proj.weight"] = torch.cat([t[f"midlayer.mlp.{p}_proj.weight"] for p in ("gate", "up")])
    head = torch.zeros(64, t["lm_head.weight"].shape[1], dtype=torch.bfloat16)
    head[: len(t["lm_head.weight"])] = t["lm_head.weight"]
    return {**layer, "draft.model.fc.weight": t["fc.weight"], "draft.model.norm.weight": t["norm.weight"], "draft.lm_head.weight": head,
            "draft.model.embed_tokens.weight": torch.zeros(4), "lm_head.weight": torch.ones(4)}


def answer(tensors, ranks=1):
    return {"success": True, "ranks": [{"checksums": {n: loaded.tensor_hash(t) for n, t in tensors.items()}}] * ranks}


def test_a_server_that_holds_the_file_passes(folder):
    check = loaded.check(Checks(), answer(held_by_sglang(folder)), folder, "bfloat16")
    assert check.passed and check.measured == "all 10 as in the file"


@pytest.mark.parametrize("name", ["draft.model.fc.weight", "draft.lm_head.weight", "draft.model.layers.0.self_attn.qkv_proj.weight",
                                  "draft.model.norm.weight"])
@pytest.mark.parametrize("fault", ["other", "missing", "surplus"])
def test_a_tensor_that_is_not_as_in_the_file_is_named(folder, name, fault):
    held = held_by_sglang(folder)
    if fault == "other":  # one weight, by the least step
        held[name] = held[name].clone()
        held[name].view(-1)[-1] += 2**-6
    if fault == "missing":
        del held[name]
    if fault == "surplus":
        name = name.replace(".weight", ".bias")
        held[name] = torch.zeros(3)
    check = loaded.check(Checks(), answer(held), folder, "bfloat16")
    assert not check.passed and name in check.measured


def test_no_answer_fails_and_several_ranks_are_not_compared(folder):
    assert not loaded.check(Checks(), {}, folder, "bfloat16").passed
    refused = loaded.check(Checks(), {"success": False, "message": "no such action"}, folder, "bfloat16")
    assert not refused.passed and "no such action" in refused.measured
    two = loaded.check(Checks(), answer(held_by_sglang(folder), ranks=2), folder, "bfloat16")
    assert two.passed and "2 ranks, not compared" in two.measured
