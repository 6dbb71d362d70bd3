"""Training-time test: unroll the draft K steps over a batch, the way it will be served.

Legend: N rows, M supervised positions, M_k those supervised at step k, H hidden size, Q query heads, G key/value
heads, C head size, B documents, S keys of the longest document.

Step 0 sees true states at every row; step k >= 1 feeds a row its own output of step k-1 and the true token k places on.
When serving, such guessed rows sit behind the true rows of the context, so at step k row i attends to the keys of
step 0 at rows <= i of its document, and to its own keys of steps 1..k; never to another row's later steps. Hence only
supervised rows are carried past the keys and values of step 0, and each later step adds one key a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lib import deep
from eagle3lib.batches import Batch
from eagle3lib.draft import Draft, KeyValue


def unroll(draft: Draft, batch: Batch, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield, for each step k, the supervised positions m int64 [M_k] (ascending) and the layer's output [M_k, H].

    The output of position m at step k is to be held against target m + k. Stops early when no row is left.
    """
    if draft.cfg.num_layers > 1:
        yield from deep.unroll(draft, batch, steps)
        return
    layer, attention = draft.midlayer, draft.midlayer.self_attn
    hidden_NH = draft.fuse(batch.aux.to(draft.fc.weight.dtype))
    x = layer.mix(draft.embed(batch.token), hidden_NH)
    true = attention.keys_values(x, *draft.rope(batch.position))
    x, hidden = x.index_select(0, batch.row), hidden_NH.index_select(0, batch.row)
    own: list[KeyValue] = []
    alive = torch.arange(len(batch), device=batch.row.device)
    for k in range(steps):
        if k:
            kept = (batch.left[alive] > k).nonzero().flatten()
            alive, hidden = alive[kept], hidden.index_select(0, kept)
            own = [(key.index_select(0, kept), value.index_select(0, kept)) for key, value in own]
            x = layer.mix(draft.embed(batch.token[batch.row[alive] + k]), hidden)
        if not len(alive):
            return
        rows = batch.row[alive]
        rope = draft.rope(batch.position[rows] + k)
        if k:
            own.append(attention.keys_values(x, *rope))
        attended = attend(attention.queries(x, *rope), true, own, Pads.of(batch, rows))
        hidden = draft.hand_on(layer.finish(hidden, attended.flatten(1)))
        yield alive, hidden


@dataclass
class Pads:
    """Where packed rows lie in [documents, slots] grids, one for the queries and one for the keys."""

    query: Tensor  # int64 [M_k] flat place in a grid of B x query_slots
    query_slots: int
    key: Tensor  # int64 [N] flat place in a grid of B x key_slots
    key_slots: int
    seen: Tensor  # bool [B, query_slots, key_slots]: the key's row is not after the query's

    @classmethod
    def of(cls, batch: Batch, rows: Tensor) -> Pads:
        documents = len(batch.ids)
        document = batch.document[rows]
        counts = torch.bincount(document, minlength=documents)
        slot = torch.arange(len(rows), device=rows.device) - (counts.cumsum(0) - counts)[document]
        query_slots, key_slots = int(counts.max()), int(batch.position.max()) + 1
        query = document * query_slots + slot
        at = torch.zeros(documents * query_slots, dtype=torch.int64, device=rows.device)
        at[query] = batch.position[rows]  # empty slots look at row 0, and nobody reads them
        seen = torch.arange(key_slots, device=rows.device) <= at.view(documents, query_slots, 1)
        return cls(query, query_slots, batch.document * key_slots + batch.position, key_slots, seen)


def attend(q: Tensor, true: KeyValue, own: list[KeyValue], pads: Pads) -> Tensor:
    """Softmax attention of q [M_k, Q, C] over step 0's keys (`true`, [N, G, C]) and the row's `own` ones [M_k, G, C].

    The part over step 0 comes with its log-sum-exp; the own keys join by that weight, as if all had been one softmax.
    """
    out, lse = causal(q, true, pads)
    if not own:
        return out
    group = q.shape[1] // true[0].shape[1]
    keys, values = (torch.stack(t, dim=1).repeat_interleave(group, dim=2) for t in zip(*own, strict=True))
    scores = (q.unsqueeze(1) * keys).sum(-1) * q.shape[-1] ** -0.5  # [M_k, k, Q]
    weight = torch.cat((lse.unsqueeze(1), scores), dim=1).softmax(dim=1).unsqueeze(-1)
    return weight[:, 0] * out + (weight[:, 1:] * values).sum(1)


def causal(q: Tensor, true: KeyValue, pads: Pads) -> tuple[Tensor, Tensor]:
    """q [M_k, Q, C] over keys and values [N, G, C] -> attention [M_k, Q, C] and log-sum-exp [M_k, Q]."""
    documents, heads = pads.seen.shape[0], true[0].shape[1]
    k, v = (spread(t, pads.key, documents, pads.key_slots).transpose(1, 2) for t in true)  # [B, G, S, C]
    grid = spread(q.unflatten(1, (heads, -1)), pads.query, documents, pads.query_slots)
    grid = grid.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, group * slots, C]: one product a key head
    scores = (grid @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.unflatten(2, (-1, pads.query_slots)).masked_fill(~pads.seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp().flatten(2, 3) @ v
    out = out.unflatten(2, (-1, pads.query_slots)).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [B * slots, G, group, C]
    lse = lse.permute(0, 3, 1, 2).flatten(0, 1)
    return out.index_select(0, pads.query).flatten(1, 2), lse.index_select(0, pads.query).flatten(1, 2)


def spread(x: Tensor, places: Tensor, documents: int, slots: int) -> Tensor:
    """Packed rows [N, ...] -> a grid [documents, slots, ...] with zeros where no row lies."""
    grid = x.new_zeros(documents * slots, *x.shape[1:])
    return grid.index_copy_(0, places, x).unflatten(0, (documents, slots))
