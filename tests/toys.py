"""A toy that is known exactly: a target that is a fixed function of the last token, a draft that never misses it, and ways to spoil it."""

from __future__ import annotations

import copy

import torch
from drafts import successor_target

from eagle3lib import targets
from eagle3lib.batches import Reader
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.loss import objective
from eagle3lib.samples import stack
from eagle3lib.store import Sample, sample_id

LAYERS, STEPS = (2, 4, 5), 4


def new_draft(folder, vocab=256, first=3):
    """A draft of the tiny target with the ids first .. first + vocab - 1 as draft vocabulary."""
    config = targets.text_config(folder)
    ids = torch.arange(first, first + vocab)
    draft = Draft(DraftConfig.from_target(config, vocab, list(LAYERS)), torch.full((vocab,), first),
                  torch.zeros(config.vocab_size, dtype=torch.bool).index_fill(0, ids, True))
    draft.embed_tokens.weight.data.copy_(targets.head_weights(folder)[1])
    return draft.eval()


class Listed:
    def __init__(self, samples):
        self.samples = samples

    def read_many(self, numbers, scratch=None):
        return stack([self.samples[i] for i in numbers])


@torch.no_grad()
def toy_samples(target, f, count, prompt, reply=20):
    """Random prompts, each continued by f; states from the target, rounded as a store would."""
    ids = torch.randint(3, 259, (count, prompt), generator=torch.Generator().manual_seed(prompt))
    for _ in range(reply):
        ids = torch.cat([ids, f[ids[:, -1:]]], dim=1)
    states = target(ids, output_hidden_states=True).hidden_states
    hidden = torch.stack([states[k] for k in (*LAYERS, -1)], dim=2).bfloat16()
    mask = torch.arange(ids.shape[1]) >= prompt
    return [Sample(sample_id(i, mask), i, mask, h) for i, h in zip(ids, hidden, strict=True)]


def make_toy(folder):
    """A target that always continues x with f(x), its f, and a draft trained on it until it never misses: (model, f, draft)."""
    folder, f = successor_target(folder)
    torch.manual_seed(0)
    target, draft, head = targets.load_model(folder), new_draft(folder), targets.head_weights(folder)[0]
    samples = [s for prompt in (1, 2, 3, 5, 9) for s in toy_samples(target, f, 400, prompt)]
    reader, optimizer = Reader(Listed(samples), head), torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad])
    for step in range(250):
        optimizer.param_groups[0]["lr"] = 5e-3 * (1 - step / 250)
        outcome = objective(draft, reader.batch(torch.randperm(len(samples))[:16].tolist()), head[draft.target_ids], STEPS, 0.8)
        optimizer.zero_grad()
        outcome.loss.backward()
        optimizer.step()
    assert (outcome.hits == outcome.known).all(), "the toy draft did not learn; nothing below would mean anything"
    return target, f, draft


def prompts_of(count, seed=0, low=1, high=40):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(low, high, (count,), generator=generator).tolist()
    return [torch.randint(3, 259, (n,), generator=generator).tolist() for n in lengths]


def greedy(model, prompt, new, ends=()):
    """The target alone, by transformers' own generate."""
    out = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=new, eos_token_id=list(ends) or None, pad_token_id=0)
    return out[0, len(prompt):].tolist()


def noisy(draft, amount):
    """The draft with its head disturbed: right often, wrong often."""
    other = copy.deepcopy(draft)
    other.lm_head.weight.data += amount * torch.randn(other.lm_head.weight.shape, generator=torch.Generator().manual_seed(5))
    return other
