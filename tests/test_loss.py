"""The objective against an independent reference, row by row; alignment, masks, and what must not matter."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drafts import HIDDEN, LAYERS, OPTIONS, VOCAB, make_batch, make_sample, small_draft, unrolled

from eagle3lib import acceptance, products
from eagle3lib.batches import document, pack, steps_left
from eagle3lib.distances import row_gradients
from eagle3lib.feed import trained_rows
from eagle3lib.loss import joint_hits, objective, simulate
from eagle3lib.store import Sample, sample_id

MIXED = [make_sample(14, [(4, 10)], seed=1), make_sample(20, [(3, 5), (8, 19)], seed=2), make_sample(9, [(5, 9)], seed=3)]


def target_head(dtype=torch.float64, vocab=VOCAB):
    return torch.randn(vocab, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(dtype)


def test_steps_left_counts_to_the_end_of_each_reply():
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 0, 1, 1], dtype=bool)
    assert steps_left(mask, np.array([10])).tolist() == [-1, 2, 1, 0, -1, -1, 0, -1, 1, 0]
    assert steps_left(mask, np.array([3, 7])).tolist() == [-1, 1, 0, 0, -1, -1, 0, -1, 1, 0]  # a reply ends with its document
    assert steps_left(np.zeros(3, dtype=bool), np.array([3])).tolist() == [-1] * 3


# Golden ----------------------------------------------------------------------------------------------------------------


def reference(w, cfg, samples, head, ids, steps, decay):
    """EAGLE-3's loss one row at a time, straight from its definition. `ids` are the draft vocabulary's target ids."""
    norm = lambda x, g: g * x / (x.pow(2).mean() + cfg.rms_norm_eps).sqrt()  # noqa: E731
    lw = lambda name: w[f"midlayer.{name}.weight"]  # noqa: E731
    normed = lambda aux: torch.cat([norm(a, w[f"fc_norm.{n}.weight"]) if cfg.fc_norm else a for n, a in enumerate(aux)])  # noqa: E731
    c, group = cfg.head_dim, cfg.num_heads // cfg.num_kv_heads

    def turn(x, position):  # x [heads, C]: pair (j, j + C/2) rotates by position * theta^(-2j/C)
        angle = (position * (1.0 / 10000.0 ** (torch.arange(0, c, 2).float() / c))).float()
        a, b, cos, sin = x[:, : c // 2], x[:, c // 2 :], angle.cos().double(), angle.sin().double()
        return torch.cat((a * cos - b * sin, b * cos + a * sin), 1)

    sums, counts = [0.0] * steps, [0] * steps
    for s in samples:
        x, m, n = s.input_ids, s.loss_mask, len(s.input_ids)
        g = [w["fc.weight"] @ normed(s.hidden[i, :-1].double()) for i in range(n)]
        mixed = lambda h, t: torch.cat((norm(w["embed_tokens.weight"][t], lw("input_layernorm")), norm(h, lw("hidden_norm"))))  # noqa: E731
        kv = lambda z, p: (turn((lw("self_attn.k_proj") @ z).view(-1, c), p), (lw("self_attn.v_proj") @ z).view(-1, c))  # noqa: E731
        true = [kv(mixed(g[i], x[i + 1]), i) for i in range(n - 1)]
        for i in range(n - 1):
            h, own = g[i], []
            for k in range(steps):
                if i + 2 + k >= n or not m[i + 1 : i + 3 + k].all():
                    break
                z = mixed(h, x[i + 1 + k])
                own += [kv(z, i + k)] if k else []
                q, seen, heads = turn((lw("self_attn.q_proj") @ z).view(-1, c), i + k), true[: i + 1] + own, []
                for j in range(cfg.num_heads):
                    score = torch.stack([q[j] @ key[j // group] for key, _ in seen]) / c**0.5
                    heads.append(score.softmax(0) @ torch.stack([value[j // group] for _, value in seen]))
                mid = h + lw("self_attn.o_proj") @ torch.cat(heads)
                y = norm(mid, lw("post_attention_layernorm"))
                h = mid + lw("mlp.down_proj") @ (F.silu(lw("mlp.gate_proj") @ y) * (lw("mlp.up_proj") @ y))
                final = norm(h, w["norm.weight"])
                h = final if cfg.norm_output else h
                p = head @ s.hidden[i + 1 + k, -1].double()
                if p.argmax() in ids:
                    counts[k] += 1
                    sums[k] = sums[k] - p[ids].softmax(0) @ (w["lm_head.weight"] @ final).log_softmax(0)
    return sum(decay**k * sums[k] / max(counts[k], 1) for k in range(steps))


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "train_embeddings": True, "hidden_size": 12}],
                         ids=["eagle 3", "eagle 3.1, narrow"])
def test_golden_loss_and_every_gradient(options):
    draft, head = small_draft(torch.float64, **options), target_head()
    weights = {n: p.detach().clone().requires_grad_(p.requires_grad) for n, p in draft.named_parameters()}
    expected = reference(weights, draft.cfg, MIXED, head, draft.target_ids, steps=4, decay=0.8)
    expected.backward()
    outcome = objective(draft, make_batch(MIXED, head), head[draft.target_ids], steps=4, decay=0.8)
    outcome.loss.backward()
    torch.testing.assert_close(outcome.loss, expected, rtol=0, atol=1e-8)
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=0, atol=1e-8, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_reach_every_draft_parameter_and_no_target_parameter(options):
    draft, head = small_draft(**options), target_head(torch.float32).requires_grad_()
    objective(draft, make_batch(MIXED, head), head[draft.target_ids], 3, 0.8).loss.backward()
    assert head.grad is None and (draft.embed_tokens.weight.grad is None) == (not options.get("train_embeddings"))
    silent = [n for n, p in draft.named_parameters() if p.requires_grad and (p.grad is None or (p.grad == 0).all())]
    assert not silent


def test_every_number_of_steps_goes_backward():
    head = target_head(torch.float32)
    for steps in (1, 2, 7):
        draft = small_draft()
        outcome = objective(draft, make_batch(MIXED, head), head[draft.target_ids], steps, 0.8)
        outcome.loss.backward()
        assert outcome.hits.shape == (5 + 1 + 10 + 3, steps)
        assert all(torch.isfinite(p.grad).all() for p in draft.parameters() if p.requires_grad)


# Alignment -------------------------------------------------------------------------------------------------------------


def traceable(length, start, end, sample):
    """States whose value is sample, position and stream: 1000 * sample + 10 * position + stream; token t = 5 + t."""
    value = 1000 * sample + 10 * torch.arange(length)[:, None] + torch.arange(len(LAYERS) + 1)
    ids = 5 + torch.arange(length)
    mask = (torch.arange(length) >= start) & (torch.arange(length) < end)
    return Sample(sample_id(ids, mask), ids, mask, value[..., None].expand(-1, -1, HIDDEN).float())


def test_rows_that_receive_gradient_are_exactly_the_supervised_ones():
    """(state read, input token, state of the target, its label) of every supervised pair at every step."""
    prompt, length = 4, 10  # reply: tokens 4..8; token 9 is template
    batch = pack([document(traceable(length, prompt, 9, sample)) for sample in (0, 1)])
    draft, found = small_draft(), []
    for k, (alive, _) in enumerate(unrolled(draft, batch, 6)):
        for m in alive.tolist():
            state = int(batch.aux[batch.row[m], 0])
            target = int(batch.last[m + k, 0]) - len(LAYERS)
            found.append((k, state, int(batch.token[batch.row[m] + k]) - 5, target, target % 1000 // 10 + 1))
    expected = [
        (k, 1000 * sample + 10 * i, i + 1 + k, 1000 * sample + 10 * (i + 1 + k), i + 2 + k)
        for k in range(6) for sample in (0, 1) for i in range(length) if i + 1 >= prompt and i + 2 + k <= 8
    ]
    assert found == expected
    first = found[0]
    assert first == (0, 30, 4, 40, 5)  # last prompt row; the first reply token goes in; the second is the label
    assert max(label for *_, label in found) == 8  # the reply's last token; nothing past it
    assert {k for k, *_ in found} == {0, 1, 2, 3}  # five reply tokens allow four labels


def test_the_target_is_the_distribution_at_the_token_before_the_label():
    """Gradient pulls towards the token that the target's state names, at the right rows and no other."""
    draft, head = small_draft(torch.float64, drafted=VOCAB), torch.eye(VOCAB, HIDDEN, dtype=torch.float64)
    sample = make_sample(9, [(4, 8)], seed=5)
    sample.hidden[:, -1] = 0
    for t in range(9):
        sample.hidden[t, -1, t] = 30.0  # the target at position t says: token t
    batch = make_batch([sample], head)
    assert batch.greedy.tolist() == [4, 5, 6] and (batch.row + 1).tolist() == [4, 5, 6]
    objective(draft, batch, head, 1, 1.0).loss.backward()
    pulled = (draft.lm_head.weight.grad * draft.lm_head.weight).sum(1)
    assert set((draft.lm_head.weight.grad.norm(dim=1)).topk(3).indices.tolist()) == {4, 5, 6}, pulled


# What must not matter --------------------------------------------------------------------------------------------------


def gradients(samples, steps=4, dtype=torch.float32, **options):
    draft, head = small_draft(dtype, **options), target_head(dtype)
    outcome = objective(draft, make_batch(samples, head), head[draft.target_ids], steps, 0.8)
    outcome.loss.backward()
    return [outcome.loss.detach(), *(p.grad for p in draft.parameters() if p.requires_grad)]


def padded(sample, by, seed=77):
    """Unsupervised garbage, large and infinite, behind a sample."""
    junk = make_sample(by, [], seed=seed)
    junk.hidden[:] = float("inf")
    ids, mask = torch.cat((sample.input_ids, junk.input_ids)), torch.cat((sample.loss_mask, junk.loss_mask))
    return Sample(sample_id(ids, mask), ids, mask, torch.cat((sample.hidden, junk.hidden)))


@pytest.mark.parametrize("options", [{}, {"fc_norm": True, "norm_output": True, "num_layers": 2}], ids=["plain", "options"])
def test_padding_changes_no_bit(options):
    plain = gradients(MIXED, **options)
    behind = gradients([padded(s, 5 + n) for n, s in enumerate(MIXED)], **options)
    unsupervised = make_sample(30, [], seed=4)
    between = gradients([unsupervised, MIXED[0], unsupervised, *MIXED[1:], make_sample(8, [(7, 8)], seed=6)], **options)
    for other in (behind, between):
        assert all(torch.equal(a, b) for a, b in zip(plain, other, strict=True))


@pytest.mark.parametrize("layers", [1, 2])
def test_packed_and_single_documents_give_the_same_rows(layers):
    draft, head = small_draft(torch.float64, num_layers=layers), target_head()
    together = list(unrolled(draft, make_batch(MIXED, head), 4))
    alone = [list(unrolled(draft, make_batch([s], head), 4)) for s in MIXED]
    for k, (_, out) in enumerate(together):
        single = torch.cat([steps[k][1] for steps in alone if len(steps) > k])
        torch.testing.assert_close(out, single, rtol=0, atol=1e-12)


def test_packed_and_single_documents_give_the_same_loss_per_row():
    """A packed batch's loss is the mean over its rows: that of the documents alone, each weighed by its rows."""
    draft, head = small_draft(torch.float64), target_head()
    sums, rows = torch.zeros(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    for sample in MIXED:
        batch = make_batch([sample], head)
        losses = objective(draft, batch, head[draft.target_ids], 4, 0.8).losses
        trained = torch.tensor([sum(bool(draft.t2d[batch.greedy[m + k]]) for m in range(len(batch)) if batch.left[m] > k) for k in range(4)])
        sums, rows = sums + losses.nan_to_num() * trained, rows + trained
    together = objective(draft, make_batch(MIXED, head), head[draft.target_ids], 4, 0.8).losses
    torch.testing.assert_close(together, sums / rows, rtol=0, atol=1e-12)


@pytest.mark.parametrize("layers", [1, 2])
def test_the_mask_by_perturbation(layers):
    """What a row may see: states and tokens up to its own, at later steps the true tokens of its own future inputs."""
    draft, head, sample = small_draft(torch.float64, num_layers=layers), target_head(), make_sample(14, [(4, 13)], seed=8)

    def outputs(changed):
        other = make_sample(14, [(4, 13)], seed=8)
        changed(other)
        return list(unrolled(draft, make_batch([other], head), 4))

    plain = list(unrolled(draft, make_batch([sample], head), 4))
    for t in range(13):
        states = outputs(lambda s, t=t: s.hidden[t, :-1].neg_())
        token = outputs(lambda s, t=t: s.input_ids[t].copy_((s.input_ids[t] + 1) % VOCAB))
        for k, (alive, out) in enumerate(plain):
            row = alive + 3  # first supervised row: the last prompt token
            assert torch.equal((states[k][1] != out).any(1), row >= t)
            assert torch.equal((token[k][1] != out).any(1), row + 1 + k >= t) or t == 0
    last = outputs(lambda s: s.hidden[:, -1].neg_())
    assert all(torch.equal(a[1], b[1]) for a, b in zip(plain, last, strict=True))


def test_documents_do_not_see_each_other():
    draft, head = small_draft(torch.float64), target_head()
    other = make_sample(20, [(3, 5), (8, 19)], seed=22)
    a, b = (list(unrolled(draft, make_batch([MIXED[0], middle, MIXED[2]], head), 4)) for middle in (MIXED[1], other))
    for (alive, x), (_, y) in zip(a, b, strict=True):
        middle = (alive >= 5) & (alive < 16)
        same = (x == y).all(1)
        assert same[~middle].all() and not same[middle].any()


# Rows without supervision, out of the vocabulary -----------------------------------------------------------------------


def test_a_batch_without_a_supervised_row_costs_nothing():
    draft, head = small_draft(), target_head(torch.float32)
    for samples in ([make_sample(9, [])], [make_sample(9, [(5, 6)])], [make_sample(9, []), make_sample(3, [(0, 1)])]):
        outcome = objective(draft, make_batch(samples, head), head[draft.target_ids], 3, 0.8)
        assert outcome.loss is None and outcome.hits.shape == (0, 3)
        hits, known = simulate(draft, make_batch(samples, head), 3)
        assert hits.shape == known.shape == (0, 3)


def test_a_reply_at_the_very_start_has_no_row_before_it():
    batch = pack([document(make_sample(6, [(0, 4)]))])
    assert batch.row.tolist() == [0, 1] and batch.left.tolist() == [2, 1]


def test_greedy_tokens_outside_the_draft_vocabulary_are_no_loss_and_a_miss():
    draft, head = small_draft(torch.float64), target_head()
    batch = make_batch(MIXED, head)
    outside = ~draft.t2d[batch.greedy]
    assert 0 < outside.sum() < len(outside)
    outcome = objective(draft, batch, head[draft.target_ids], 1, 1.0)
    batch.greedy[outside] = int(draft.t2d.nonzero()[0])  # were they inside, the loss would differ
    assert objective(draft, batch, head[draft.target_ids], 1, 1.0).loss != outcome.loss
    assert not outcome.hits[outside].any() and outcome.known.all()
    batch.greedy[:] = int((~draft.t2d).nonzero()[0])
    nothing = objective(draft, batch, head[draft.target_ids], 2, 1.0)
    assert nothing.loss is None and not nothing.hits.any() and nothing.losses.isnan().all()


def test_parts_of_a_batch_add_up_to_it():
    """Several processes: each divides by the rows of all, so that losses and gradients simply add up. Counts are unequal."""
    head = target_head()

    def grads(samples, rows=None):
        draft = small_draft(torch.float64)
        batch = make_batch(samples, head)
        outcome = objective(draft, batch, head[draft.target_ids], 4, 0.8, rows=rows)
        outcome.loss.backward()
        return trained_rows(batch, draft.t2d, 4), [outcome.loss.detach(), *(p.grad for p in draft.parameters() if p.requires_grad)]

    rows, whole = grads(MIXED)
    parts = [grads(part, rows) for part in ([MIXED[1]], [MIXED[0], MIXED[2]])]
    assert torch.equal(sum(count for count, _ in parts), rows)
    for together, *each in zip(whole, *(found for _, found in parts), strict=True):
        torch.testing.assert_close(sum(each), together, rtol=0, atol=1e-12)


def test_losses_by_step_add_up_to_the_loss():
    draft, head = small_draft(torch.float64), target_head()
    outcome = objective(draft, make_batch(MIXED, head), head[draft.target_ids], 4, 0.7)
    torch.testing.assert_close(outcome.loss.detach(), (outcome.losses * 0.7 ** torch.arange(4)).sum())


def test_chunks_do_not_matter(monkeypatch):
    whole = gradients(MIXED, dtype=torch.float64)
    monkeypatch.setattr("eagle3lib.loss.chunk_targets", lambda drafted, steps, positions, device: 3)
    for a, b in zip(whole, gradients(MIXED, dtype=torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("distance", ["ce", "kl", "lk"])
@pytest.mark.parametrize("apart", [1.0, 30.0, 150.0, 1e3])
def test_distances_and_gradients_of_distributions_far_apart(distance, apart):
    """Against autograd over the definition in logarithms; rows that do not count are 0, also when they are no numbers."""
    generator = torch.Generator().manual_seed(3)
    z, t = (torch.randn(shape, generator=generator) for shape in ((2, 3, 20), (2, 20)))
    z[..., 0], t[:, 1] = apart, apart
    live = torch.tensor([[True, True, False], [True, False, True]])
    x = z.double().requires_grad_()
    logp, logq = t.double().log_softmax(-1).unsqueeze(1), x.log_softmax(-1)
    entropy = (logp.exp() * logp).sum(-1) if distance == "kl" else 0
    expected = -torch.minimum(logp, logq).logsumexp(-1) if distance == "lk" else entropy - (logp.exp() * logq).sum(-1)
    expected[live].sum().backward()
    logits = z.masked_fill(~live.unsqueeze(-1), float("nan"))
    each, guess, slope = row_gradients(logits.flatten(0, 1), t, live, distance, torch.float32)
    torch.testing.assert_close(each[live].double(), expected[live].detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(slope.view(2, 3, -1).double(), x.grad, rtol=1e-3, atol=1e-6)
    assert (each[~live] == 0).all() and torch.equal(guess[live], z.argmax(-1)[live])


# Hits ------------------------------------------------------------------------------------------------------------------


def test_hits_are_the_drafts_greedy_tokens_in_target_ids():
    draft, head = small_draft(torch.float64), target_head()
    batch = make_batch(MIXED, head)
    with torch.no_grad():
        for k, (alive, out) in enumerate(unrolled(draft, batch, 3)):
            batch.greedy[alive[::2] + k] = draft.to_target(draft.logits(out).argmax(-1))[::2]
            break
    hits, known = simulate(draft, batch, 3)
    assert hits[::2, 0].all()
    assert torch.equal(hits, objective(draft, batch, head[draft.target_ids], 3, 0.8).hits)
    assert torch.equal(known, batch.left[:, None] > torch.arange(3))


@pytest.mark.parametrize("short", [False, True])
def test_held_out_hits_come_from_the_products_that_training_multiplies_with(monkeypatch, short):
    """On a GPU: the short copy of lm_head, added up in float32. `wide` must see it; rounded logits have other maxima."""
    draft, head, seen = small_draft(), target_head(torch.float32), []
    if short:
        draft.lm_head.short = draft.lm_head.weight.detach().roll(1, 0)  # would give other tokens than the weight
    batch, original = make_batch(MIXED, head), products.wide
    monkeypatch.setattr(products, "wide", lambda rows, matrix: seen.append(matrix) or original(rows, matrix))
    hits, _ = simulate(draft, batch, 3)
    assert seen and all(matrix is (draft.lm_head.short if short else draft.lm_head.weight) for matrix in seen)
    assert torch.equal(hits, objective(draft, batch, head[draft.target_ids], 3, 0.8).hits)


def test_joint_hits_end_at_the_first_miss():
    hits = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1]], dtype=torch.bool)
    known = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0]], dtype=torch.bool)
    assert joint_hits(hits, known).int().tolist() == [[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 0, 0]]


def test_joint_counts_by_document_make_the_simulated_acceptance():
    batch = make_batch(MIXED, target_head())
    hits = torch.ones(len(batch), 4, dtype=torch.bool)
    known = batch.left[:, None] > torch.arange(4)
    empty, document = torch.zeros(3, 4, dtype=torch.int64), batch.document[batch.row]
    joint, tried = (empty.index_add(0, document, t.long()) for t in (joint_hits(hits, known), known))
    assert tried.tolist() == [[5, 4, 3, 2], [11, 9, 8, 7], [3, 2, 1, 0]] and torch.equal(joint, tried)
    assert acceptance.from_counts(joint.numpy(), tried.numpy()).length == 5.0
