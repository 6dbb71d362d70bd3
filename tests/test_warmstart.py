"""A draft folder becomes a draft to train on: the same logits as its file, or a refusal that names what is wrong."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_draftcheck import change_config, change_tensors, fitting_draft

from eagle3lib import export, targets, warmstart
from eagle3lib.errors import Eagle3Error

SIZES = {"plain": {}, "3.1": {"fc_norm": True, "norm_output": True}, "two layers": {"num_layers": 2}, "narrow": {"hidden_size": 48},
         "rope": {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}}


@pytest.fixture(params=["sglang", "vllm"])
def layout(request):
    return request.param


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_the_draft_read_computes_what_the_folder_holds(tiny, tmp_path, layout, sizes):
    draft = fitting_draft(tiny, **sizes)
    if not draft.cfg.own_embeddings:
        draft.embed_tokens.weight.data.copy_(targets.head_weights(tiny)[1])
    folder = export.export(draft, tmp_path / "draft", dtype="float32", layout=layout)
    read = warmstart.read(folder, tiny)
    assert read.cfg.aux_layers == draft.cfg.aux_layers and replace(read.cfg, train_embeddings=False) == replace(draft.cfg, train_embeddings=False)
    for name, tensor in draft.exported().items():
        assert torch.equal(tensor, read.exported()[name]), name
    assert torch.equal(read.embed_tokens.weight, draft.embed_tokens.weight)
    aux, tokens = torch.randn(9, 3 * 64), torch.randint(0, 320, (9,)).tolist()
    assert export.round_trip(read, folder, aux, tokens, 4).difference < 1e-5 * 64


def test_a_foreign_folder_gets_what_the_engine_takes_for_missing_fields(tiny, tmp_path, capsys):
    """Other spellings, no t2d, no head_dim, rope in rope_parameters: as trainers elsewhere write them."""
    draft = fitting_draft(tiny)
    folder = export.export(draft, tmp_path / "draft", dtype="bfloat16")
    change_tensors(folder, lambda t: (t.pop("t2d"), [t.update({n.replace("midlayer", "model.layers.0"): t.pop(n)}) for n in list(t) if "mid" in n]))
    fields = ("head_dim", "rope_scaling", "rope_theta", "norm_output", "fc_norm", "eagle_config", "target_hidden_size")
    change_config(folder, lambda c: ([c.pop(f) for f in fields], c.update(rope_parameters={"rope_type": "default", "rope_theta": 10000.0})))
    read = warmstart.read(folder, tiny)
    assert read.cfg == draft.cfg and torch.equal(read.t2d, draft.t2d)
    assert read.fc.weight.dtype == torch.float32 and torch.equal(read.fc.weight, draft.fc.weight.bfloat16().float())
    assert "warning: head_dim" in capsys.readouterr().out


def test_a_broken_folder_is_refused_with_every_name(tiny, tmp_path):
    folder = export.export(fitting_draft(tiny), tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    del tensors["fc.weight"], tensors["norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(Eagle3Error, match=r"2 error\(s\)"):
        warmstart.read(folder, tiny)


def test_a_draft_that_reads_other_streams_is_refused(tiny, tmp_path):
    folder = export.export(fitting_draft(tiny), tmp_path / "draft")
    with pytest.raises(Eagle3Error, match=r"reads the residual streams \[2, 4, 5\], the store holds \[1, 4, 5\]"):
        warmstart.require_streams(warmstart.read(folder, tiny), folder, [1, 4, 5])
    warmstart.require_streams(warmstart.read(folder, tiny), folder, [2, 4, 5])
    assert json.loads((folder / "config.json").read_text())["num_hidden_layers"] == 1
