"""Tree drafting: a tree of one branch is the chain, the output is the target's, the tree is the one that a brute force grows."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from toys import STEPS, greedy, new_draft, noisy, prompts_of

from eagle3lib import acceptance, proof, speculate, targets
from eagle3lib.acceptance import Shape
from eagle3lib.drafter import Drafter, pick
from eagle3lib.verifier import Drafts, Verifier

CHAIN = Shape(STEPS)
TREES = [Shape(STEPS, 2, 8), Shape(STEPS, 3, 16), Shape(STEPS, 3, 31), Shape(1, 4, 5), Shape(2, 5, 12)]


@pytest.fixture(scope="module")
def model(tiny):
    return targets.load_model(tiny)


def figure(replies, steps=STEPS):
    return acceptance.measured([r.rounds for r in replies], steps)


@pytest.mark.parametrize("amount", [0.0, 0.3])
def test_a_tree_of_one_branch_is_the_chain(toy, monkeypatch, amount):
    """The tree's own code with k = 1: other masks, positions and bookkeeping, the same rounds."""
    target, _, draft = toy
    draft, prompts = noisy(draft, amount), prompts_of(6, seed=21)
    chain, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=23, ends={40, 90})
    monkeypatch.setattr(Drafter, "_chain", Drafter._tree)
    tree, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=23, ends={40, 90})
    assert tree == chain


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_greedy_output_is_the_targets_own(model, tiny, shape):
    torch.manual_seed(3)
    prompts = prompts_of(5, seed=4)
    replies, _ = speculate.generate(model, new_draft(tiny), prompts, shape=shape, max_new_tokens=24, ends=set())
    assert [r.tokens for r in replies] == [greedy(model, p, 24) for p in prompts]


@pytest.mark.parametrize("shape", TREES, ids=str)
def test_a_tree_accepts_at_least_what_the_chain_accepts(toy, shape):
    """On the same text: behind any prefix the tree holds the chain's branch, or other branches that it thought better."""
    target, _, draft = toy
    draft, prompts = noisy(draft, 0.4), prompts_of(12, seed=23)
    chain, _ = speculate.generate(target, draft, prompts, shape=Shape(shape.steps), max_new_tokens=40, ends=set())
    tree, times = speculate.generate(target, draft, prompts, shape=shape, max_new_tokens=40, ends=set())
    assert [r.tokens for r in tree] == [r.tokens for r in chain]
    assert all(proof.prove(target, p, r.tokens, draft.cfg.aux_layers).mismatch is None for p, r in zip(prompts, tree, strict=True))
    more, less = figure(tree, shape.steps), figure(chain, shape.steps)
    assert more.length > less.length + 0.05 and more.length <= shape.steps + 1
    assert times.rounds < sum(len(r.rounds) for r in chain)


def test_a_perfect_draft_reaches_exactly_k_plus_one(toy):
    target, _, draft = toy
    replies, _ = speculate.generate(target, draft, prompts_of(8, low=3, high=10), shape=Shape(STEPS, 2, 9), max_new_tokens=21, ends=set())
    found = figure(replies)
    assert (found.length, found.low) == (STEPS + 1, STEPS + 1)


def test_prompts_in_a_batch_come_out_as_they_would_alone(toy):
    target, _, draft = toy
    draft, prompts, shape = noisy(draft, 0.4), prompts_of(7, seed=2), Shape(STEPS, 3, 10)
    together, _ = speculate.generate(target, draft, prompts, shape=shape, max_new_tokens=20, ends={60, 99})
    alone = [speculate.generate(target, draft, [p], shape=shape, max_new_tokens=20, ends={60, 99})[0][0] for p in prompts]
    assert together == alone and 1.2 < figure(together).length < STEPS + 0.8


# The tree itself -----------------------------------------------------------------------------------------------------


@torch.no_grad()
def brute_force(draft, aux, tokens, shape):
    """The same tree without cache or batch: {path: score}, the best shape.tokens - 1 of what was looked at."""

    def after(path):
        """(log-probabilities behind this path, by a plain forward over true rows and the path)."""
        ids, hidden = list(tokens), draft.fuse(aux)[None]
        out, past = draft.layer(draft.embed(torch.tensor([ids])), hidden, torch.arange(len(ids))[None])
        for n, token in enumerate(path):
            out, past = draft.layer(draft.embed(torch.tensor([[token]])), out[:, -1:], torch.tensor([[len(ids) + n]]), past)
        return draft.logits(out[0, -1]).log_softmax(-1)

    looked, front = {}, {(): 0.0}
    for _ in range(shape.steps):
        grown = {}
        for path, score in front.items():
            values, ids = after(path).topk(shape.topk)
            for value, i in zip(values.tolist(), draft.to_target(ids).tolist(), strict=True):
                grown[(*path, i)] = score + value
        looked |= grown
        front = dict(sorted(grown.items(), key=lambda item: -item[1])[: shape.topk])
    return dict(sorted(looked.items(), key=lambda item: -item[1])[: shape.tokens - 1])


def paths_of(drafts, b):
    paths = [()]
    for token, parent in zip(drafts.tokens_BN[b].tolist(), drafts.parents_BN[b].tolist(), strict=True):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("shape", [*TREES, Shape(STEPS, 3, 5)], ids=str)
def test_the_tree_is_the_one_that_a_brute_force_grows(tiny, shape):
    torch.manual_seed(7)
    draft = new_draft(tiny)
    fresh = prompts_of(3, seed=9, low=2, high=9)
    aux = torch.randn(3, max(map(len, fresh)), draft.fc.in_features)
    with torch.inference_mode():
        drafts = Drafter(draft, shape).propose(aux, fresh)
    for b, tokens in enumerate(fresh):
        assert set(paths_of(drafts, b)) == set(brute_force(draft, aux[b, : len(tokens)], tokens, shape))
        assert max(map(len, paths_of(drafts, b))) <= shape.steps


def test_the_parent_of_what_is_picked_is_picked():
    """Certain tokens: children score as high as their parents, and the earlier one must win."""
    scores = torch.tensor([[-1.0, -2.0, -1.0, -3.0, -1.0, -1.0, -2.5, -2.5]])
    parents = torch.tensor([[-1, -1, 0, 0, 2, 2, 1, 1]])
    found = pick(torch.arange(10, 18)[None], scores, parents, 3)
    assert (found.tokens_BN.tolist(), found.parents_BN.tolist()) == ([[10, 12, 14]], [[0, 1, 2]])
    found = pick(torch.arange(10, 18)[None], scores, parents, 6)
    assert (found.tokens_BN.tolist(), found.parents_BN.tolist()) == ([[10, 11, 12, 14, 15, 16]], [[0, 0, 1, 3, 3, 2]])


def test_family_of_a_tree_and_of_a_chain():
    tree = Drafts(torch.zeros(1, 5, dtype=torch.int64), torch.tensor([[0, 0, 1, 3, 2]]))
    parents, kin = tree.family()
    assert parents.tolist() == [[0, 0, 0, 1, 3, 2]]
    assert [row.nonzero().flatten().tolist() for row in kin[0]] == [[0], [0, 1], [0, 2], [0, 1, 3], [0, 1, 3, 4], [0, 2, 5]]
    chain = Drafts(torch.zeros(2, 3, dtype=torch.int64))
    as_tree = Drafts(torch.zeros(2, 3, dtype=torch.int64), torch.arange(3).expand(2, 3))
    assert all(torch.equal(a, b) for a, b in zip(chain.family(), as_tree.family(), strict=True))
    deep = Drafts(torch.zeros(1, 40, dtype=torch.int64), torch.arange(40)[None]).family()[1]
    assert torch.equal(deep[0], torch.ones(41, 41, dtype=torch.bool).tril())


@torch.no_grad()
def test_rows_of_a_tree_see_what_they_would_see_alone(model):
    """Logits and states of every node equal those of a plain forward over prompt and path; siblings and cousins stay unseen."""
    prompts, parents = [[5, 6, 7, 8], [9, 10]], torch.tensor([[0, 0, 1, 1, 4, 2], [0, 1, 1, 0, 4, 3]])
    tokens = torch.randint(3, 259, (2, 6), generator=torch.Generator().manual_seed(1))
    verifier, seen = Verifier(model, (2, 4, 5)), {}
    first, _ = verifier.prefill(prompts)
    judge = verifier._judge
    verifier._judge = lambda logits, *rest: (seen.update(logits=logits), judge(logits, *rest))[1]
    verifier.verify(first, Drafts(tokens, parents))
    for b, prompt in enumerate(prompts):
        for row, path in enumerate([(), *paths_of(Drafts(tokens, parents), b)]):
            plain = model(torch.tensor([[*prompt, first[b], *path]])).logits[0, -1]
            torch.testing.assert_close(seen["logits"][b, row], plain, rtol=1e-4, atol=1e-4)


def test_what_the_target_would_say_behind_a_wrong_draft_is_not_kept(model):
    """The right continuation of a wrong branch, in a tree and in a chain."""
    prompt = prompts_of(1, seed=6)[0]
    (first, own) = greedy(model, prompt, 2)
    wrong = (own + 1) % 300
    behind = greedy(model, [*prompt, first, wrong], 1)[0]
    for parents in (None, torch.tensor([[0, 1]])):
        verifier = Verifier(model, (2, 4, 5))
        with torch.inference_mode():
            (newest,), _ = verifier.prefill([prompt])
            (tokens,), aux = verifier.verify([newest], Drafts(torch.tensor([[wrong, behind]]), parents))
        assert newest == first and tokens == [own] and aux.shape[1] == 1 and int(verifier.true.sum()) == len(prompt) + 1


def test_the_branch_that_the_target_follows_is_kept_whatever_its_place(model):
    """The true continuation hidden in the last branch, wrong tokens elsewhere; the next round starts from the right states."""
    prompt = prompts_of(1, seed=6)[0]
    truth = greedy(model, prompt, 12)
    wrong = [(t + 1) % 300 for t in truth]
    verifier = Verifier(model, (2, 4, 5))
    with torch.inference_mode():
        first, _ = verifier.prefill([prompt])
        drafts = Drafts(torch.tensor([[wrong[1], wrong[2], truth[1], wrong[2], truth[2], wrong[3], truth[3]]]),
                        torch.tensor([[0, 1, 0, 3, 3, 5, 5]]))
        (tokens,), aux = verifier.verify(first, drafts)
        assert tokens == truth[1:5] and aux.shape[1] == 4
        plain = proof.prove(model, prompt, truth, (2, 4, 5)).sample.hidden[len(prompt) : len(prompt) + 4, :-1].flatten(1)
        torch.testing.assert_close(aux[0], plain, rtol=1e-4, atol=1e-4)
        (again,), _ = verifier.verify([truth[4]], Drafts(torch.tensor([[truth[5], wrong[6]]])))
    assert again == truth[5:7] and int(verifier.true.sum()) == len(prompt) + 4 + 2


def test_rounds_of_a_tree_follow_each_other_without_gap(toy):
    target, _, draft = toy
    for reply, prompt in zip(speculate.generate(target, noisy(draft, 0.4), prompts_of(4, seed=8), shape=Shape(3, 2, 8), max_new_tokens=21,
                                                ends=set())[0], prompts_of(4, seed=8), strict=True):
        starts = [r.context for r in reply.rounds] + [len(prompt) + 21]
        assert starts[0] == len(prompt) + 1
        assert [b - a for a, b in pairwise(starts)] == [r.accepted + 1 for r in reply.rounds]
