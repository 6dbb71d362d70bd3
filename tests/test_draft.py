"""The draft served step by step equals the draft unrolled in training; names, sizes, rotary embedding, vocabulary."""

from __future__ import annotations

import pytest
import torch
from drafts import HIDDEN, OPTIONS, VOCAB, make_batch, make_sample, small_draft, unrolled
from tiny import tiny_config
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaRotaryEmbedding

from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error

EXPORTED = {
    "fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d",
    "midlayer.input_layernorm.weight", "midlayer.hidden_norm.weight", "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.q_proj.weight", "midlayer.self_attn.k_proj.weight", "midlayer.self_attn.v_proj.weight",
    "midlayer.self_attn.o_proj.weight", "midlayer.mlp.gate_proj.weight", "midlayer.mlp.up_proj.weight",
    "midlayer.mlp.down_proj.weight",
}  # fmt: skip


def served(draft, sample, row, steps):
    """Outputs [steps, H] of a chain behind `row`: prefill the true rows, then the draft's own output, as an engine does."""
    x, aux = sample.input_ids, sample.hidden[:, :-1].flatten(1).to(draft.fc.weight.dtype)
    at = torch.arange(row + 1)[None]
    out, past = draft.layer(draft.embed(x[1 : row + 2])[None], draft.fuse(aux[: row + 1])[None], at)
    outs = [out[0, -1]]
    for k in range(1, steps):
        embed = draft.embed(x[row + 1 + k])[None, None]
        out, past = draft.layer(embed, out[:, -1:], torch.tensor([[row + k]]), past)
        outs.append(out[0, -1])
    return torch.stack(outs)


@torch.no_grad()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_unrolled_steps_equal_sequential_drafting_with_a_cache(options):
    steps, draft = 5, small_draft(torch.float64, **options)
    samples = [make_sample(18, [(4, 16)], seed=1), make_sample(12, [(2, 6), (7, 11)], seed=2)]
    batch = make_batch(samples, torch.randn(VOCAB, HIDDEN).double())
    seen = 0
    for k, (alive, out) in enumerate(unrolled(draft, batch, steps)):
        for m, trained in zip(alive.tolist(), out, strict=True):
            row = batch.row[m]
            sample = samples[batch.document[row]]
            chain = served(draft, sample, int(batch.position[row]), k + 1)
            torch.testing.assert_close(trained, chain[k], rtol=0, atol=1e-10)
            seen += 1
    assert seen == sum((11 - k) + max(0, 3 - k) * 2 for k in range(steps))


@torch.no_grad()
@pytest.mark.parametrize("layers", [1, 2])
def test_a_cache_filled_in_pieces_equals_one_prefill(layers):
    draft, n = small_draft(torch.float64, num_layers=layers), 9
    embeds, hidden, at = torch.randn(2, n, HIDDEN).double(), torch.randn(2, n, HIDDEN).double(), torch.arange(n).expand(2, n)
    whole, kept = draft.layer(embeds, hidden, at)
    first, past = draft.layer(embeds[:, :4], hidden[:, :4], at[:, :4])
    before = past[0].clone()
    second, joined = draft.layer(embeds[:, 4:], hidden[:, 4:], at[:, 4:], past)
    torch.testing.assert_close(torch.cat((first, second), 1), whole)
    torch.testing.assert_close(joined, kept)
    assert torch.equal(past[0], before) and past[0].shape == (2, 2 * layers, 4, 6)


@torch.no_grad()
def test_a_mask_hides_padded_rows():
    draft = small_draft(torch.float64)
    embeds, hidden, at = torch.randn(1, 6, HIDDEN).double(), torch.randn(1, 6, HIDDEN).double(), torch.arange(6)[None]
    plain, _ = draft.layer(embeds[:, 2:], hidden[:, 2:], at[:, :4])
    padded, _ = draft.layer(embeds, hidden, (at - 2).clamp(min=0), mask=(torch.arange(6) >= 2).expand(1, 6, 6))
    torch.testing.assert_close(padded[:, 2:], plain)


@torch.no_grad()
@pytest.mark.parametrize("scaling", [None, {"rope_type": "linear", "factor": 4.0}, {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}])
def test_attention_is_transformers_llama_attention(scaling):
    """The embedding half switched off, the projections are those of a Llama layer: same rotary, grouping and scale."""
    rope = {"rope_type": "default", **(scaling or {}), "rope_theta": 5000.0}
    config = LlamaConfig(hidden_size=HIDDEN, intermediate_size=24, num_attention_heads=4, num_key_value_heads=2, head_dim=6,
                         num_hidden_layers=8, vocab_size=VOCAB, max_position_embeddings=64, rope_parameters=rope,
                         attn_implementation="eager")
    cfg = DraftConfig.from_target(config, VOCAB, [2, 4, 5])
    assert (cfg.rope_theta, cfg.rope_scaling) == (5000.0, scaling)
    draft = Draft(cfg, torch.zeros(VOCAB, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool))
    theirs = LlamaAttention(config, layer_idx=0)
    for name, module in draft.midlayer.self_attn.named_children():
        weight = getattr(theirs, name).weight
        module.weight.copy_(weight if name == "o_proj" else torch.cat((torch.zeros_like(weight), weight), 1))
    x, at = torch.randn(1, 20, HIDDEN), torch.arange(20)[None]
    mask = torch.full((20, 20), float("-inf")).triu(1)[None, None]
    expected, _ = theirs(x, LlamaRotaryEmbedding(config)(x, at), mask)
    out, _ = draft.layer(torch.zeros_like(x), x / x.pow(2).mean(-1, keepdim=True).add(1e-5).sqrt(), at)
    # what attention added to the residual, before the MLP: undo the MLP by making it add nothing
    draft.midlayer.mlp.down_proj.weight.zero_()
    normed = x / x.pow(2).mean(-1, keepdim=True).sqrt()
    draft.midlayer.hidden_norm.eps = 0.0
    out, _ = draft.layer(torch.zeros_like(x), normed, at)
    expected, _ = theirs(normed, LlamaRotaryEmbedding(config)(x, at), mask)
    torch.testing.assert_close(out - normed, expected, rtol=1e-5, atol=1e-5)


def test_names_and_shapes_are_those_that_sglang_loads():
    draft = small_draft()
    tensors = draft.exported()
    assert set(tensors) == EXPORTED
    assert tensors["fc.weight"].shape == (HIDDEN, 3 * HIDDEN)
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (24, 2 * HIDDEN)
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    assert not draft.embed_tokens.weight.requires_grad


def test_options_add_the_tensors_that_sglang_names_and_no_others():
    names = {name: set(small_draft(**options).exported()) - EXPORTED for name, options in OPTIONS.items()}
    deep = {f"layers.1.{n.removeprefix('midlayer.')}" for n in EXPORTED if n.startswith("midlayer.")} - {"layers.1.input_layernorm.weight"}
    assert names["plain"] == names["norm_output"] == set()
    assert names["fc_norm"] == {f"fc_norm.{n}.weight" for n in range(3)}
    assert names["own embeddings"] == names["narrow"] == names["wide"] == {"embed_tokens.weight"}
    assert names["two layers"] == deep
    assert small_draft(num_layers=2).exported()["layers.1.self_attn.q_proj.weight"].shape == (24, HIDDEN)
    assert small_draft(hidden_size=12).exported()["fc.weight"].shape == (12, 3 * HIDDEN)


@pytest.mark.parametrize(("options", "word"), [({"hidden_size": 3 * HIDDEN}, "skip `fc`"), ({"num_layers": 0}, "num_layers is 0"),
                                               ({"head_dim": 5}, "head_dim is 5")])
def test_sizes_that_cannot_be_served_are_refused(options, word):
    with pytest.raises(Eagle3Error, match=word):
        small_draft(**options)


def test_draft_ids_become_target_ids_by_offset():
    draft = small_draft()
    ids = draft.t2d.nonzero().flatten()
    assert torch.equal(draft.target_ids, ids)
    assert torch.equal(draft.to_target(torch.tensor([[0, 5], [29, 1]])), ids[torch.tensor([[0, 5], [29, 1]])])


def test_another_dtype_keeps_the_rotary_frequencies_exact():
    draft = small_draft()
    before = draft.inv_freq.clone()
    assert torch.equal(draft.to(torch.bfloat16).inv_freq, before) and before.dtype == torch.float32
    cos, _ = draft.rope(torch.tensor([1000]))
    assert torch.equal(cos[0, :3], (1000 * before).cos().bfloat16())


@torch.no_grad()
def test_scaled_features_change_no_exported_bit_and_no_output_of_the_file():
    draft, plain = small_draft(), small_draft(seed=1)
    scale = torch.tensor([0.25, 4.0, 16.0]).repeat_interleave(HIDDEN)
    before = {name: t.clone() for name, t in draft.exported().items()}
    draft.scale_features(scale)
    draft.load(before)
    assert all(torch.equal(t, before[name]) for name, t in draft.exported().items())
    assert not torch.equal(draft.fc.weight, before["fc.weight"])
    plain.load(draft.exported())
    aux = torch.randn(5, 3 * HIDDEN)
    torch.testing.assert_close(plain.fuse(aux), draft.fuse(aux), rtol=1e-5, atol=1e-6)
    with pytest.raises(Eagle3Error, match="powers of two"):
        draft.scale_features(scale * 1.5)


@pytest.mark.parametrize(("d2t", "t2d", "word"), [
    (torch.zeros(5, dtype=torch.int64), torch.ones(VOCAB, dtype=torch.bool), r"expected \[30\]"),
    (torch.arange(30), torch.arange(VOCAB) < 30, "offsets"),  # ids in place of offsets
    (torch.zeros(30, dtype=torch.int64), torch.arange(VOCAB) >= 10, "offsets"),
])  # fmt: skip
def test_a_wrong_vocabulary_is_refused(d2t, t2d, word):
    with pytest.raises(Eagle3Error, match=word):
        Draft(small_draft().cfg, d2t, t2d)


def test_sizes_come_from_the_target_unless_given():
    cfg = DraftConfig.from_target(tiny_config(), 100, [2, 4, 5], intermediate_size=48)
    assert (cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.intermediate_size) == (64, 4, 2, 16, 48)
    assert DraftConfig(**cfg.to_dict()) == cfg
    with pytest.raises(Eagle3Error, match="1000 tokens"):
        DraftConfig.from_target(tiny_config(), 1000, [2, 4, 5])
    with pytest.raises(Eagle3Error, match="no multiple"):
        DraftConfig.from_target(tiny_config(), 100, [2, 4, 5], num_kv_heads=3)
