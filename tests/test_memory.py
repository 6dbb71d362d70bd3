"""The memory forecast is above what training takes, not absurdly so, and refuses what cannot fit."""

from __future__ import annotations

import pytest
import torch
from drafts import OPTIONS, make_batch, make_sample, small_draft

from eagle3lib import memory
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.loss import objective

SIZES = dict(hidden_size=64, intermediate_size=160, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=500, draft_vocab_size=400,
             target_hidden_size=64, aux_layers=(2, 4, 5))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_parameters_are_counted_exactly(options):
    draft = small_draft(**options)
    assert memory._parameters(draft.cfg) == sum(p.numel() for p in draft.parameters() if p.requires_grad)


@pytest.mark.parametrize(("steps", "layers"), [(1, 1), (8, 1), (3, 2)])
def test_activations_are_an_upper_bound_and_no_absurd_one(steps, layers):
    cfg = DraftConfig(**SIZES, num_layers=layers)
    draft = Draft(cfg, torch.zeros(400, dtype=torch.int64), torch.arange(500) < 400)
    sample = make_sample(400, [(1, 400)], vocab=500)
    sample.hidden.resize_(400, 4, 64).normal_()
    head, kept = torch.randn(500, 64), {}
    batch = make_batch([sample], head)

    def keep(t):
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        outcome = objective(draft, batch, head[:400], steps, 0.8)
    weights = {p.untyped_storage().data_ptr() for p in draft.parameters()}
    saved = sum(n for at, n in kept.items() if at not in weights)
    assert outcome.loss is not None and saved > 0
    forecast = memory.of(cfg, steps, 400, 500, "cpu").activations - memory.of(cfg, steps, 0, 500, "cpu").activations
    assert saved <= forecast <= 1.7 * saved, (saved, forecast)


def test_what_cannot_fit_is_refused_with_the_numbers_and_a_way_out(monkeypatch, capsys):
    monkeypatch.setattr(memory, "free_bytes", lambda device: 10**9)
    forecast = memory.of(DraftConfig(**SIZES), 5, 1024, 500, "cpu")
    forecast.require("cpu")
    assert "memory forecast: " in capsys.readouterr().out
    with pytest.raises(Eagle3Error, match=r"activations .* 1.0 GB are free on cpu: lower batch_tokens or ttt_steps"):
        memory.of(DraftConfig(**SIZES), 5, 10**6, 500, "cpu").require("cpu")
    big = DraftConfig(**{**SIZES, "hidden_size": 4096, "target_hidden_size": 4096, "vocab_size": 128256, "draft_vocab_size": 128256})
    with pytest.raises(Eagle3Error, match="lower draft_vocab, or use a larger device"):
        memory.of(big, 5, 100, 128256, "cpu").require("cpu")


def test_a_containers_limit_counts(tmp_path):
    for name, text in {"memory.max": "1000\n", "memory.current": "400\n", "memory.stat": "anon 5\ninactive_file 100\n"}.items():
        (tmp_path / name).write_text(text)
    assert memory._container_bytes(tmp_path) == 700
    (tmp_path / "memory.max").write_text("max\n")
    assert memory._container_bytes(tmp_path) > 10**15
