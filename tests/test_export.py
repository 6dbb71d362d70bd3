"""The exported folder: names and fields that SGLang reads, an independent reader that computes the same logits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from drafts import HIDDEN, OPTIONS, VOCAB, small_draft
from safetensors.torch import load_file, save_file

from eagle3lib import draftcheck, export
from eagle3lib.draft import Draft
from eagle3lib.draftfile import DraftFile
from eagle3lib.errors import Eagle3Error

STEPS = 5


def rows(draft, count=9, seed=3):
    """True rows of a draft: aux states [T, A*H] and the token after each."""
    generator = torch.Generator().manual_seed(seed)
    aux = torch.randn(count, 3 * HIDDEN, generator=generator)
    return aux, torch.randint(0, draft.cfg.vocab_size, (count,), generator=generator).tolist()


def test_the_folder_holds_what_sglang_reads(tmp_path):
    draft = small_draft()
    folder = export.export(draft, tmp_path / "draft", dtype="bfloat16", card="# a card\n")
    config = json.loads((folder / "config.json").read_text())
    tensors = load_file(folder / "model.safetensors")
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert set(tensors) == set(draft.exported())
    assert {str(t.dtype) for n, t in tensors.items() if n not in ("d2t", "t2d")} == {"torch.bfloat16"}
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert torch.equal(tensors["d2t"] + torch.arange(30), tensors["t2d"].nonzero().flatten())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["torch_dtype"] == "bfloat16" and config["num_hidden_layers"] == 1
    # residual streams (1, 2, 3) enter layers 1, 2, 3; SGLang names the layers they leave
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert config["eagle_config"]["use_aux_hidden_state"] is True


def test_transformers_reads_back_the_same_sizes_and_rope(tmp_path):
    from transformers import AutoConfig

    draft = small_draft()
    config = AutoConfig.from_pretrained(export.export(draft, tmp_path / "draft"))
    assert (config.hidden_size, config.head_dim, config.vocab_size, config.draft_vocab_size) == (HIDDEN, 6, VOCAB, 30)
    assert config.rope_parameters["rope_theta"] == draft.cfg.rope_theta
    assert config.tie_word_embeddings is False and config.rms_norm_eps == draft.cfg.rms_norm_eps


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_independent_reader_computes_the_trainers_logits(tmp_path, dtype):
    draft = small_draft()
    folder = export.export(draft, tmp_path / "draft", dtype=dtype)
    found = export.round_trip(draft, folder, *rows(draft), STEPS)
    assert found.difference < 1e-5
    assert found.scale > 1  # logits of a size that makes 1e-5 mean something
    assert found.unread == []
    assert (found.rounding == 0) == (dtype == "float32")


SERVED = {"sglang": [n for n in OPTIONS if n != "own embeddings"], "vllm": list(OPTIONS)}
CASES = [(layout, name) for layout, names in SERVED.items() for name in names]


@pytest.mark.parametrize(("layout", "name"), CASES, ids=[f"{layout}-{name}" for layout, name in CASES])
def test_both_layouts_hold_every_option_of_a_draft(tmp_path, layout, name):
    draft = small_draft(**OPTIONS[name])
    folder = export.export(draft, tmp_path / "draft", dtype="float32", layout=layout)
    assert [str(p) for p in draftcheck.check_draft(folder)] == []
    found = export.round_trip(draft, folder, *rows(draft), STEPS)
    assert found.difference < 1e-5 < 1 < found.scale and found.unread == []
    other = small_draft(**{**OPTIONS[name], "norm_output": not OPTIONS[name].get("norm_output", False)})
    other.load_state_dict(draft.state_dict())
    assert export.round_trip(other, folder, *rows(draft), STEPS).difference > 1e-3  # the reader obeys the field


def test_vllm_names_layers_and_streams_its_own_way(tmp_path):
    folder = export.export(small_draft(num_layers=2), tmp_path / "draft", layout="vllm")
    config, names = json.loads((folder / "config.json").read_text()), set(load_file(folder / "model.safetensors"))
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3] and config["norm_before_residual"] is False
    assert "eagle_aux_hidden_state_layer_ids" not in config["eagle_config"]  # SGLang would add one
    assert {"layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "layers.1.input_layernorm.weight"} <= names
    assert not {n for n in names if n.startswith("midlayer.") or n == "layers.1.hidden_norm.weight"}
    sglang = set(load_file(export.export(small_draft(num_layers=2), tmp_path / "other") / "model.safetensors"))
    assert "layers.1.hidden_norm.weight" in sglang and "layers.1.input_layernorm.weight" not in sglang


@pytest.mark.parametrize(("options", "layout", "word"), [
    ({"train_embeddings": True}, "sglang", "SGLang 0.5.14 puts the target's embeddings in their place"),
    ({"aux_layers": (1, 3)}, "vllm", "built for 3"), ({}, "trtllm", "one of sglang, vllm")])
def test_what_an_engine_cannot_serve_is_not_written(tmp_path, options, layout, word):
    with pytest.raises(Eagle3Error, match=word):
        export.export(small_draft(**options), tmp_path / "draft", layout=layout)
    assert not (tmp_path / "draft").exists()


def test_images_lie_beside_the_card_that_shows_them(tmp_path):
    folder = export.export(small_draft(), tmp_path / "draft", card="# a card\n", images={"curves.png": b"png"})
    assert (folder / "curves.png").read_bytes() == b"png" and "![curves](curves.png)" in (folder / "README.md").read_text()


@pytest.mark.parametrize("scaling", [
    {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16},
    {"rope_type": "linear", "factor": 4.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
])
def test_rope_scaling_survives(tmp_path, scaling):
    plain = small_draft()
    draft = Draft(replace(plain.cfg, rope_scaling=scaling, rope_theta=500.0), plain.d2t, plain.t2d)
    draft.load_state_dict(plain.state_dict())
    folder = export.export(draft, tmp_path / "draft", dtype="float32")
    assert export.round_trip(draft, folder, *rows(draft, 20), STEPS).difference < 1e-5
    assert export.round_trip(draft, export.export(plain, tmp_path / "plain", dtype="float32"), *rows(draft, 20), 1).difference > 1e-3


@pytest.mark.parametrize("name", [n for n in small_draft().exported() if n not in ("d2t", "t2d")])
def test_every_tensor_matters_to_the_reader(tmp_path, name):
    """A reader that ignored a tensor would call any file good."""
    draft = small_draft()
    folder = export.export(draft, tmp_path / "draft", dtype="float32")
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name] + 0.1 * torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors")
    assert export.round_trip(draft, folder, *rows(draft), STEPS).difference > 1e-3


def test_a_left_over_tensor_is_named(tmp_path):
    draft = small_draft()
    folder = export.export(draft, tmp_path / "draft")
    save_file({**load_file(folder / "model.safetensors"), "surplus": torch.zeros(2)}, folder / "model.safetensors")
    assert export.round_trip(draft, folder, *rows(draft), 2).unread == ["surplus"]


def test_the_reader_turns_draft_ids_into_target_ids(tmp_path):
    draft = small_draft()
    aux, tokens = rows(draft)
    logits, guesses = DraftFile(export.export(draft, tmp_path / "draft"), draft.embed_tokens.weight).chain(aux, tokens, 3)
    assert guesses == draft.to_target(logits.argmax(-1)).tolist()
    assert all(draft.t2d[g] for g in guesses)


def test_exporting_again_replaces_the_folder_whole(tmp_path):
    folder = export.export(small_draft(seed=1), tmp_path / "draft")
    (folder / "stray.safetensors").write_bytes(b"left by someone")
    export.export(small_draft(seed=2), folder, dtype="float32")
    assert sorted(p.name for p in folder.iterdir()) == ["README.md", "config.json", "model.safetensors"]
    assert torch.equal(load_file(folder / "model.safetensors")["fc.weight"], small_draft(seed=2).fc.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_a_failing_export_leaves_the_old_folder(tmp_path, monkeypatch):
    folder = export.export(small_draft(seed=1), tmp_path / "draft", card="old\n")
    monkeypatch.setattr(export, "save_file", lambda *a, **k: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(Eagle3Error, match="No space left.*free"):
        export.export(small_draft(seed=2), folder)
    assert (folder / "README.md").read_text() == "old\n"
    assert [p.name for p in tmp_path.iterdir()] == ["draft"]


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(Eagle3Error, match="is no draft folder"):
        export.export(small_draft(), tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_an_unknown_dtype_lists_the_known_ones(tmp_path):
    with pytest.raises(Eagle3Error, match="fp8.*float32, bfloat16, float16"):
        export.export(small_draft(), tmp_path / "draft", dtype="fp8")


def test_the_card_of_the_other_engine_and_a_nested_fingerprint():
    card = export.model_card(small_draft(num_layers=2), "t", {}, {"target": {"weights": "ab12"}}, 3, layout="vllm")
    for text in ("vllm serve", '"num_speculative_tokens": 3', "- target.weights: `ab12`", "2 decoder layers"):
        assert text in card


def test_the_card_says_how_to_serve_and_what_was_measured():
    card = export.model_card(small_draft(), "some-target", {"acceptance length, gsm8k": "1.71 [1.60, 1.82]"}, {"weights": "ab12"}, 3)
    for text in ("some-target", "| acceptance length, gsm8k | 1.71 [1.60, 1.82] |", "weights: `ab12`", "[1, 2, 3]",
                 "--speculative-num-steps 3", "--speculative-num-draft-tokens 4", "first miss"):
        assert text in card
