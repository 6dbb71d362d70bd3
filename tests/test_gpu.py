"""The training step on a GPU against the plain one in float64. Needs CUDA: `python -m pytest tests/test_gpu.py` on such a machine."""

from __future__ import annotations

import pytest
import torch
from drafts import VOCAB, make_batch, make_sample

from eagle3lib.batches import document, pack
from eagle3lib.distances import row_gradients
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.loss import objective
from eagle3lib.ttt import Grid, attend

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: the training step on a GPU cannot run here")
WIDTH, LAYERS = 256, (1, 2, 3)


def error(found, expected):
    return float((found.detach().cpu().double() - expected.detach().cpu().double()).norm() / expected.detach().cpu().double().norm())


@pytest.mark.parametrize("distance", ["ce", "kl", "lk"])
@pytest.mark.parametrize("drafted", [33, 4096, 20000])
def test_rows_by_triton_equal_the_plain_ones(distance, drafted):
    torch.manual_seed(0)
    logits, target, live = torch.randn(14, drafted) * 3, torch.randn(2, drafted) * 3, torch.ones(2, 7) > 0
    live[1, 3] = False
    each, guess, slope = row_gradients(logits.cuda(), target.cuda(), live.cuda(), distance, torch.float32)
    e, g, s = row_gradients(logits.double(), target.double(), live, distance, torch.float64)
    assert error(each.cpu()[live], e[live]) < 1e-5 and torch.equal(guess.cpu()[live], g[live])
    assert error(slope.view(2, 7, -1)[live], s.view(2, 7, -1)[live]) < 1e-5 and (slope.view(2, 7, -1)[1, 3] == 0).all()


def test_distributions_far_apart_have_a_finite_distance_and_gradient():
    logits, target, live = torch.zeros(3, 500), torch.zeros(1, 500), torch.ones(1, 3) > 0
    logits[:, 0], target[:, 1] = torch.tensor([40.0, 150.0, 1e4]), 1e4
    each, _, slope = row_gradients(logits.cuda(), target.cuda(), live.cuda(), "lk", torch.float32)
    assert each.isfinite().all() and slope.isfinite().all() and each.max() < 86


@pytest.mark.parametrize(("heads", "keys", "width", "own"), [(8, 2, 64, 0), (8, 2, 64, 3), (9, 3, 64, 6), (32, 8, 128, 2)])
def test_attention_and_its_gradients(heads, keys, width, own):
    from eagle3lib.flash import Varlen

    torch.manual_seed(0)
    batch = pack([document(make_sample(200, [(20, 60), (90, 180)], seed=1)), document(make_sample(150, [(40, 149)], seed=2))])
    rows, positions = len(batch.token), len(batch)
    leaves = [torch.randn(n, h, width).double() for n, h in [(positions, heads), (rows, keys), (rows, keys), *[(positions, keys)] * 2 * own]]
    slope = torch.randn(positions, heads, width).double()
    plain, fast = [t.clone().requires_grad_() for t in leaves], [t.cuda().bfloat16().requires_grad_() for t in leaves]
    batch.places = Varlen.of(batch)
    outs = []
    for tensors, places in ((plain, Grid.of(batch)), (fast, batch.to("cuda").places)):
        pairs = list(zip(tensors[3 : 3 + own], tensors[3 + own :], strict=True))
        outs.append(attend(tensors[0], (tensors[1], tensors[2]), pairs, places))
        outs[-1].backward(slope.to(outs[-1]))
    assert error(outs[1], outs[0]) < 1e-2
    assert all(error(b.grad, a.grad) < 1e-2 for a, b in zip(plain, fast, strict=True))


def gpu_draft(drafted=96):
    torch.manual_seed(0)
    cfg = DraftConfig(hidden_size=WIDTH, intermediate_size=512, num_heads=4, num_kv_heads=2, head_dim=64, vocab_size=VOCAB * 4,
                      draft_vocab_size=drafted, target_hidden_size=16, aux_layers=LAYERS)
    return Draft(cfg, torch.zeros(drafted, dtype=torch.int64), torch.arange(VOCAB * 4) < drafted)


def step_of(draft, **changed):
    from eagle3lib.graph import GraphStep

    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0,
                                  fused=True, capturable=True)
    settings = {"steps": 5, "decay": 0.8, "distance": "ce", "grad_clip": 0.5, "batch_tokens": 512, **changed}
    return GraphStep(draft.cuda(), torch.randn(96, 16, generator=torch.Generator().manual_seed(4)).cuda(), optimizer, **settings)


def batches(count=8):
    head = torch.randn(VOCAB * 4, 16, generator=torch.Generator().manual_seed(4))
    made = []
    for n in range(count):
        samples = [make_sample(60 + 11 * n + 30 * i, [(20, 31), (35, 50 + 9 * n)], seed=10 * n + i, vocab=VOCAB * 4) for i in range(3)]
        made.append(make_batch(samples, head))
    return made


@pytest.mark.parametrize("distance", ["ce", "lk"])
def test_weights_follow_the_plain_trainer(distance):
    """Ten steps over batches of several sizes, first eager, then captured, then replayed, against float64 on the CPU."""
    plain, fast = gpu_draft().double(), gpu_draft()
    before = {name: p.detach().clone() for name, p in plain.named_parameters()}
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0)
    step = step_of(fast, distance=distance)
    head = torch.randn(96, 16, generator=torch.Generator().manual_seed(4)).double()
    for batch in [*batches(5), *batches(5), *batches(5)]:
        outcome, norm = step(step.prepare(batch), 1e-3)
        expected = objective(plain, batch, head, 5, 0.8, distance)
        optimizer.zero_grad()
        expected.loss.backward()
        true_norm = torch.nn.utils.clip_grad_norm_([p for p in plain.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        assert abs(float(outcome.loss) - float(expected.loss)) < 0.02 * abs(float(expected.loss))
        assert abs(float(norm) - float(true_norm)) < 0.1 * float(true_norm)
        assert torch.equal(outcome.known[: len(batch)].cpu(), expected.known) and torch.equal(outcome.rows.cpu(), expected.rows)
    assert any(c.graph is not None for c in step.captured.values())
    for (name, a), b in zip(plain.named_parameters(), fast.parameters(), strict=True):
        if a.requires_grad:
            assert error(b.detach().cpu() - before[name].float(), a.detach() - before[name]) < 0.25, name


def test_a_gradient_that_is_not_finite_changes_no_weight():
    draft = gpu_draft()
    step, batch = step_of(draft), batches(1)[0]
    step(step.prepare(batch), 1e-3)
    before = [p.detach().clone() for p in draft.parameters()]
    batch.aux[5] = float("nan")
    for _ in range(3):
        _, norm = step(step.prepare(batch), 1e-3)
        assert not torch.isfinite(norm)
    assert all(torch.equal(a, b) for a, b in zip(before, draft.parameters(), strict=True))
