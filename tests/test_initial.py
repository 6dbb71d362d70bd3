"""The start of training: the target's own head and norm, features at unit size whatever their outliers."""

from __future__ import annotations

import pytest
import torch
from drafts import HIDDEN, LAYERS, make_sample
from safetensors.torch import load_file
from tiny import tiny_config

from eagle3lib import targets
from eagle3lib.draft import DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.initial import feature_scale, new_draft, principal_axes


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


def random_states(count=2):
    return Listed(type(s)(s.id, s.input_ids, s.loss_mask, torch.randn(9, 4, 64) * 40) for s in (make_sample(9, [(3, 8)]) for _ in range(count)))


@pytest.mark.parametrize("width", [48, 80])
def test_another_width_starts_with_the_targets_logits_as_well_as_its_width_allows(tiny, width):
    """Fed the stream that the target's head reads, a fresh draft's head says nearly what the target's says."""
    cfg = DraftConfig.from_target(tiny_config(), 320, [2, 4, 5], hidden_size=width, train_embeddings=True)
    draft = new_draft(cfg, torch.zeros(320, dtype=torch.int64), torch.ones(320, dtype=torch.bool), tiny, random_states(), [0, 1], 0)
    head, embed = targets.head_weights(tiny)
    norm = targets.find_tensor(tiny, ("model.norm.weight",))
    stream = torch.randn(500, 64)
    axes = principal_axes(head * norm, width)
    said, meant = draft.logits(stream @ axes), stream / stream.pow(2).mean(-1, keepdim=True).sqrt() * norm @ head.T
    similar = torch.nn.functional.cosine_similarity(said, meant).mean()
    assert similar > (0.999 if width > 64 else 0.85), similar
    assert draft.embed_tokens.weight.shape == (320, width) and draft.embed_tokens.weight.requires_grad
    torch.testing.assert_close(draft.embed_tokens.weight.norm(), embed.norm(), rtol=0.15, atol=0)


def test_norms_before_fc_need_no_scale(tiny):
    cfg = DraftConfig.from_target(tiny_config(), 320, [2, 4, 5], fc_norm=True)
    draft = new_draft(cfg, torch.zeros(320, dtype=torch.int64), torch.ones(320, dtype=torch.bool), tiny, random_states(), [0, 1], 0)
    assert (draft.feature_scale == 1).all()
    assert 0.5 < draft.fuse(torch.randn(200, 3 * 64) * 40).std() < 2
    with pytest.raises(Eagle3Error, match="fc_norm brings"):
        draft.scale_features(torch.ones(3 * 64))
