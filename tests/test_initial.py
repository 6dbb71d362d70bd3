"""The start of training: the target's own head and norm, features at unit size whatever their outliers."""

from __future__ import annotations

import torch
from drafts import HIDDEN, LAYERS, make_sample
from safetensors.torch import load_file
from tiny import tiny_config

from eagle3lib import targets
from eagle3lib.draft import DraftConfig
from eagle3lib.initial import feature_scale, new_draft


class Listed(list):
    def read(self, i):
        return self[i]


def scaled_samples(*sizes, outlier=1e5):
    """Samples whose streams have these sizes, and a token 0 far above them."""
    samples = Listed(make_sample(12, [(4, 11)], seed=seed) for seed in range(4))
    for sample in samples:
        sample.hidden[:, : len(sizes)] *= torch.tensor(sizes)[:, None]
        sample.hidden[0] *= outlier
    return samples


def test_the_scale_is_the_nearest_power_of_two_of_the_typical_token():
    assert feature_scale(scaled_samples(1.0, 6.0, 560.0), range(4)).tolist() == [1.0, 8.0, 512.0]
    assert feature_scale(scaled_samples(0.0, 1.0, 0.3), [0]).isfinite().all()


def test_only_the_given_samples_are_read():
    samples = scaled_samples(1.0, 1.0, 1.0)
    samples[2] = None
    assert feature_scale(samples, [0, 1, 3]).shape == (len(LAYERS),)


def test_head_norm_and_embedding_are_the_targets_own(tiny):
    cfg = DraftConfig.from_target(tiny_config(), 100, [2, 4, 5])
    ids = torch.arange(320).ge(50) & torch.arange(320).lt(150)
    stored = Listed(make_sample(9, [(3, 8)]) for _ in range(2))
    stored[:] = [type(s)(s.id, s.input_ids, s.loss_mask, torch.randn(9, 4, 64) * 40) for s in stored]
    make = lambda seed: new_draft(cfg, ids.nonzero().flatten() - torch.arange(100), ids, tiny, stored, [0, 1], seed)  # noqa: E731
    draft, again, other = make(0), make(0), make(1)
    weights = load_file(next(tiny.glob("*.safetensors")))
    assert torch.equal(draft.lm_head.weight, weights["lm_head.weight"][50:150])
    assert torch.equal(draft.norm.weight, weights["model.norm.weight"])
    assert torch.equal(draft.embed_tokens.weight, targets.head_weights(tiny)[1])
    assert torch.equal(draft.fc.weight, again.fc.weight) and not torch.equal(draft.fc.weight, other.fc.weight)
    g = draft.fuse(torch.randn(200, 3 * 64) * 40)
    assert 0.5 < g.std() < 2
    assert HIDDEN != 64
