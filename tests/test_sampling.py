"""Above temperature 0: the tokens are distributed as the target's own. Oracle: every sequence of a tiny vocabulary, enumerated."""

from __future__ import annotations

import copy
from collections import Counter
from itertools import product

import pytest
import torch
from drafts import LAYERS, small_draft
from scipy import stats
from toys import greedy, noisy, prompts_of
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3lib import acceptance, speculate
from eagle3lib import verifier as verifier_module
from eagle3lib.acceptance import Shape
from eagle3lib.drafter import Drafter
from eagle3lib.verifier import Drafts, Verifier

VOCAB, LENGTH, TEMPERATURE, DRAWS = 5, 4, 0.8, 12_000
PROMPT = [1, 4, 2]


@pytest.fixture(scope="module")
def target():
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=32, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=0, pad_token_id=0, tie_word_embeddings=False)).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=weight.shape[-1] ** -0.5 * 1.5)
    return model


@pytest.fixture(scope="module")
def truth(target):
    """Probability of each sequence of LENGTH tokens behind PROMPT."""
    every = torch.tensor(list(product(range(VOCAB), repeat=LENGTH)))
    logits = target(torch.cat([torch.tensor(PROMPT).expand(len(every), -1), every], dim=1)).logits[:, len(PROMPT) - 1 : -1].double()
    logp = (logits / TEMPERATURE).log_softmax(-1).gather(2, every[:, :, None])[:, :, 0].sum(1)
    return dict(zip(map(tuple, every.tolist()), logp.exp().tolist(), strict=True))


def draw(target, draft, steps, seed=0):
    replies = []
    for part in range(DRAWS // 4000):
        batch, _ = speculate.generate(target, draft, [PROMPT] * 4000, shape=Shape(steps), max_new_tokens=LENGTH, ends=set(),
                                      temperature=TEMPERATURE, seed=seed + part)
        replies += batch
    return replies


def p_value(replies, truth):
    """Chi-square over all sequences; rare ones are pooled."""
    seen = Counter(tuple(r.tokens) for r in replies)
    cells = sorted(truth, key=truth.get, reverse=True)
    common = [c for c in cells if truth[c] * len(replies) >= 5]
    expected = [truth[c] * len(replies) for c in common]
    observed = [seen[c] for c in common]
    expected.append(len(replies) - sum(expected))
    observed.append(len(replies) - sum(observed))
    return stats.chisquare(observed, expected).pvalue


@pytest.mark.parametrize(("drafted", "steps"), [(VOCAB, 3), (3, 3), (3, 1), (1, 2)])
def test_sequences_are_distributed_as_the_targets_own(target, truth, drafted, steps):
    """Also with a draft vocabulary that lacks tokens: what the draft can never say must come at its full share."""
    replies = draw(target, small_draft(vocab=VOCAB, drafted=drafted), steps)
    assert p_value(replies, truth) > 0.001
    length = acceptance.measured([r.rounds for r in replies], steps).length
    assert 1.05 < length < steps + 0.95, "drafts are always or never accepted: the test would show little"


@pytest.mark.parametrize("fault", ["keeps every draft", "draws the rest from p", "draft at another temperature", "shared coins"])
def test_a_sampler_that_is_nearly_right_is_found_out(target, truth, monkeypatch, fault):
    draft = small_draft(vocab=VOCAB, drafted=3)
    spoil = {"keeps every draft": lambda d: Drafts(d.tokens_BN, None, d.probs_BNV * 1e-9 + 1e-12),
             "draws the rest from p": lambda d: d,
             "draft at another temperature": lambda d: Drafts(d.tokens_BN, None, (d.probs_BNV + 1e-12) ** 0.5 /
                                                             ((d.probs_BNV + 1e-12) ** 0.5).sum(-1, keepdim=True)),
             "shared coins": lambda d: Drafts(d.tokens_BN[:1].expand_as(d.tokens_BN), None, d.probs_BNV)}[fault]
    if fault == "draws the rest from p":
        monkeypatch.setattr(verifier_module, "residual", lambda p, q: p)
    propose = Drafter.propose
    monkeypatch.setattr(Drafter, "propose", lambda self, *a: spoil(propose(self, *a)))
    assert p_value(draw(target, draft, 3), truth) < 1e-6


def test_near_zero_temperature_is_greedy(toy):
    target, _, draft = toy
    prompts = prompts_of(4, seed=3)
    replies, _ = speculate.generate(target, noisy(draft, 0.3), prompts, shape=Shape(3), max_new_tokens=15, ends=set(), temperature=1e-4)
    assert [r.tokens for r in replies] == [greedy(target, p, 15) for p in prompts]


def test_a_draft_that_is_the_target_is_never_rejected(target):
    """p = q: whatever is drawn stays."""
    verifier, generator = Verifier(target, LAYERS, 1.0, torch.Generator().manual_seed(0)), torch.Generator().manual_seed(1)
    first, _ = verifier.prefill([PROMPT] * 50)
    tokens, probs = [torch.tensor(first)[:, None]], []
    for _ in range(3):
        seen = torch.cat([torch.tensor(PROMPT).expand(50, -1), *tokens], dim=1)
        probs.append(target(seen).logits[:, -1].double().softmax(-1))
        tokens.append(torch.multinomial(probs[-1], 1, generator=generator))
    emitted, _ = verifier.verify(first, Drafts(torch.cat(tokens[1:], 1), None, torch.stack(probs, 1) * (1 - 1e-6)))
    assert all(len(t) == 4 for t in emitted)
    assert [t[:3] for t in emitted] == torch.cat(tokens[1:], 1).tolist()


def test_the_seed_decides(toy):
    target, _, draft = toy
    spoilt, prompts = noisy(copy.deepcopy(draft), 0.3), prompts_of(3)
    once, again, other = (speculate.generate(target, spoilt, prompts, shape=Shape(2), max_new_tokens=12, ends=set(), temperature=3.0, seed=s)[0]
                          for s in (1, 1, 2))
    assert once == again != other


def test_drafts_without_their_distribution_are_refused(target):
    verifier = Verifier(target, LAYERS, 1.0)
    first, _ = verifier.prefill([PROMPT])
    with pytest.raises(ValueError, match="with its distributions"):
        verifier.verify(first, Drafts(torch.tensor([[1, 2]])))
