"""Small drafts and samples for the training tests: random ones, traceable ones, and a target that is a fixed function."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tiny import byte_tokenizer, tiny_config
from torch import Tensor
from transformers import LlamaForCausalLM

from eagle3lib.batches import Batch, document, greedy_tokens, pack
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.store import Sample, sample_id
from eagle3lib.ttt import unroll

VOCAB, HIDDEN, LAYERS = 40, 16, (1, 2, 3)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {}, "fc_norm": {"fc_norm": True}, "norm_output": {"norm_output": True}, "two layers": {"num_layers": 2},
    "own embeddings": {"train_embeddings": True}, "narrow": {"hidden_size": 12}, "wide": {"hidden_size": 20, "train_embeddings": True},
    "everything": {"fc_norm": True, "norm_output": True, "num_layers": 3, "hidden_size": 12, "train_embeddings": True, "num_heads": 2},
}


def small_draft(dtype: torch.dtype = torch.float32, *, vocab: int = VOCAB, drafted: int = 30, seed: int = 0, **options: Any) -> Draft:
    """A random draft whose every weight matters: norms are not one, the draft vocabulary skips ids. `options`: of DraftConfig."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = dict(hidden_size=HIDDEN, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=6, vocab_size=vocab,
                                 draft_vocab_size=drafted, target_hidden_size=HIDDEN, aux_layers=LAYERS, max_position_embeddings=64)
    cfg = DraftConfig(**{**sizes, **options})
    ids = torch.randperm(vocab)[:drafted].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool).index_fill(0, ids, True)
    draft = Draft(cfg, ids - torch.arange(drafted), t2d)
    for parameter in draft.parameters():
        parameter.data = torch.randn_like(parameter) * (0.5 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
        parameter.data += parameter.dim() == 1
    return draft.to(dtype)


def make_sample(length: int, replies: list[tuple[int, int]], *, seed: int = 0, vocab: int = VOCAB) -> Sample:
    """Random tokens and states; `replies` are half-open spans of supervised tokens."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocab, (length,), generator=generator)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in replies:
        mask[start:end] = True
    hidden = torch.randn(length, len(LAYERS) + 1, HIDDEN, generator=generator).bfloat16()
    return Sample(sample_id(ids, mask), ids, mask, hidden)


def make_batch(samples: list[Sample], head: Tensor) -> Batch:
    """Pack samples, greedy tokens from `head` [V, H]."""
    documents = [document(s) for s in samples]
    for one in documents:
        one.greedy = greedy_tokens(one.last, head)
    return pack(documents)


def unrolled(draft: Draft, batch: Batch, steps: int) -> list[tuple[Tensor, Tensor]]:
    """Of each TTT step, the positions that are supervised at it and their outputs."""
    outs = enumerate(unroll(draft, batch, steps))
    return [(alive, out[alive]) for k, out in outs if len(alive := (batch.left > k).nonzero().flatten())]


# A target whose next token is a fixed function of the current one -----------------------------------------------------


def successor_target(folder: Path, *, seed: int = 0, hidden: int = 64) -> tuple[Path, Tensor]:
    """Write a Llama that always continues x with f(x), and return its folder and f as int64 [V].

    Its layers add nothing (o_proj and down_proj are zero), so the stream is the embedding throughout, and the row f(x)
    of its lm_head points along the embedding of x. f permutes the byte tokens 3..258, so it never ends a turn.
    """
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(8, hidden))
    vocab = model.config.vocab_size
    f = torch.arange(vocab)
    cycle = 3 + torch.randperm(256)
    f[cycle] = cycle.roll(-1)
    f[:3] = torch.tensor([10, 11, 12])
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight.zero_()
        embed = torch.randn(vocab, hidden)
        embed /= embed.pow(2).mean(1, keepdim=True).sqrt()
        model.model.embed_tokens.weight.copy_(embed)
        model.lm_head.weight.zero_()
        model.lm_head.weight[f[3:]] = embed[3:] / 4  # logit 16 for the right token, about 2 at random
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return Path(folder), f


@torch.no_grad()
def successor_samples(folder: Path, f: Tensor, count: int, prompt: int = 6, reply: int = 24, seed: int = 1) -> list[Sample]:
    """Random prompts of byte tokens, each answered by the chain x, f(x), f(f(x)), ...; states from transformers.

    The replies start evenly spaced along the cycle of f, so that together they pass through every transition.
    """
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    samples, cycle = [], [3]
    while f[cycle[-1]] != 3:
        cycle.append(int(f[cycle[-1]]))
    for n in range(count):
        ids = [*torch.randint(3, 259, (prompt - 1,), generator=generator).tolist(), cycle[n * len(cycle) // count]]
        for _ in range(reply):
            ids.append(int(f[ids[-1]]))
        states = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
        mask = torch.arange(prompt + reply) >= prompt
        hidden = torch.stack([states[k][0] for k in (2, 4, 5, 8)], dim=1).bfloat16()
        samples.append(Sample(sample_id(ids, mask), torch.tensor(ids), mask, hidden))
    return samples
