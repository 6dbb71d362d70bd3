"""Training-time test of a draft with more than one layer: the same rules as in ttt, for the rare case that needs them.

Layers behind the first have keys of their own, which follow from the stream at every true row, so step 0 runs over all rows and
not over the supervised ones alone. Attention is dense over the batch (scores [Q, M, N]): keep `batch_tokens` moderate.

Legend: N rows, M_k supervised positions of step k, H hidden size, Q query heads, G key/value heads, C head size.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from eagle3lib.batches import Batch
from eagle3lib.draft import Draft, KeyValue


def unroll(draft: Draft, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each step k, the supervised positions m int64 [M_k] (ascending) and what the draft hands on [M_k, H]."""
    if not len(batch):
        return
    stack = draft.stack
    at, document = batch.position, batch.document
    seen_NN = (document[:, None] == document) & (at <= at[:, None])
    hidden, true = draft.fuse(batch.aux.to(draft.fc.weight.dtype)), list[KeyValue]()
    embeds, rope = draft.embed(batch.token), draft.rope(at)
    for layer in stack:
        x = layer.mix(embeds, hidden)
        true.append(layer.self_attn.keys_values(x, *rope))
        hidden = layer.finish(hidden, attend(layer.self_attn.queries(x, *rope), true[-1], [], seen_NN))
    hidden, alive = draft.hand_on(hidden)[batch.row], torch.arange(len(batch), device=batch.row.device)
    own: list[list[KeyValue]] = [[] for _ in stack]
    yield alive, hidden
    for k in range(1, steps):
        kept = (batch.left[alive] > k).nonzero().flatten()
        alive, hidden = alive[kept], hidden[kept]
        if not len(alive):
            return
        rows = batch.row[alive]
        embeds, rope = draft.embed(batch.token[rows + k]), draft.rope(at[rows] + k)
        for n, layer in enumerate(stack):
            x = layer.mix(embeds, hidden)
            own[n] = [(key[kept], value[kept]) for key, value in own[n]] + [layer.self_attn.keys_values(x, *rope)]
            hidden = layer.finish(hidden, attend(layer.self_attn.queries(x, *rope), true[n], own[n], seen_NN[rows]))
        hidden = draft.hand_on(hidden)
        yield alive, hidden


def attend(q: Tensor, true: KeyValue, own: list[KeyValue], seen: Tensor) -> Tensor:
    """Softmax attention of q [M_k, Q, C] over the true rows ([N, G, C], where `seen` [M_k, N]) and the row's own keys [M_k, G, C]."""
    group, scale = q.shape[1] // true[0].shape[1], q.shape[-1] ** -0.5
    keys, values = (t.repeat_interleave(group, dim=1) for t in true)
    scores = (torch.einsum("mqc,nqc->mqn", q, keys) * scale).masked_fill(~seen[:, None], float("-inf"))
    if not own:
        return torch.einsum("mqn,nqc->mqc", scores.softmax(-1), values).flatten(1)
    later, said = (torch.stack(t, dim=1).repeat_interleave(group, dim=2) for t in zip(*own, strict=True))
    weight = torch.cat([scores, torch.einsum("mqc,mkqc->mqk", q, later) * scale], dim=-1).softmax(-1)
    mixed = torch.einsum("mqn,nqc->mqc", weight[..., : len(keys)], values) + torch.einsum("mqk,mkqc->mqc", weight[..., len(keys) :], said)
    return mixed.flatten(1)
