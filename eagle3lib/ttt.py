"""Training-time test: unroll the draft K steps over a batch, the way it will be served.

Legend: N rows, M supervised positions, H hidden size, Q query heads, G key/value heads, C head size, B documents, S keys
of the longest document.

Step 0 sees true states at every row; step k >= 1 feeds a row its own output of step k-1 and the true token k places on.
When serving, such guessed rows sit behind the true rows of the context, so at step k row i attends to the keys of
step 0 at rows <= i of its document, and to its own keys of steps 1..k; never to another row's later steps. Hence only
supervised rows are carried past the keys and values of step 0, and each later step adds one key a row. A row goes through
all K steps, also those at which its reply has ended: sizes then do not depend on the data, and the loss gives it no weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagle3lib.batches import Batch
from eagle3lib.draft import Draft, KeyValue
from eagle3lib.flash import Varlen, flash_attend


def unroll(draft: Draft, batch: Batch, steps: int) -> Iterator[Tensor]:
    """Yield what the draft hands on [M, H] at each step k = 0 .. steps-1. Position m at step k is to be held against target m + k,
    and means something only where `batch.left[m] > k`."""
    *inner, last = draft.stack
    places: Grid | Varlen = batch.places or Grid.of(batch)
    whole = every_row(batch) if inner else places
    hidden, embeds_NH, rope = draft.fuse(batch.aux), draft.embed(batch.token), draft.rope(batch.position)
    true: list[KeyValue] = []
    for layer in inner:  # keys of the layer behind it follow from the stream at every row
        x = layer.mix(embeds_NH, hidden)
        true.append(layer.self_attn.keys_values(x, *rope))
        hidden = layer.finish(hidden, attend(layer.self_attn.queries(x, *rope), true[-1], [], whole).flatten(1))
    x = last.mix(embeds_NH, hidden)
    true.append(last.self_attn.keys_values(x, *rope))
    x, hidden, rope = x.index_select(0, batch.row), hidden.index_select(0, batch.row), draft.rope(batch.position[batch.row])
    hidden = draft.hand_on(last.finish(hidden, attend(last.self_attn.queries(x, *rope), true[-1], [], places).flatten(1)))
    yield hidden
    own: list[list[KeyValue]] = [[] for _ in true]
    for k in range(1, steps):
        embeds = embeds_NH.index_select(0, (batch.row + k).clamp(max=len(batch.token) - 1))
        rope = draft.rope(batch.position[batch.row] + k)
        for layer, keys, later in zip(draft.stack, true, own, strict=True):
            x = layer.mix(embeds, hidden)
            later.append(layer.self_attn.keys_values(x, *rope))
            hidden = layer.finish(hidden, attend(layer.self_attn.queries(x, *rope), keys, later, places).flatten(1))
        hidden = draft.hand_on(hidden)
        yield hidden


def every_row(batch: Batch) -> Grid | Varlen:
    """Places for queries at all rows."""
    if isinstance(batch.places, Varlen):
        return batch.places.whole(len(batch.token))
    return Grid.of(replace(batch, row=torch.arange(len(batch.token), device=batch.row.device)))


@dataclass
class Grid:
    """Where packed rows lie in [documents, slots] grids. A document's queries are its rows from the first supervised one on."""

    query: Tensor  # int64 [M] flat place in a grid of B x query_slots
    query_slots: int
    key: Tensor  # int64 [N] flat place in a grid of B x key_slots
    key_slots: int
    seen: Tensor  # bool [B, query_slots, key_slots]: the key's row is not after the query's

    @classmethod
    def of(cls, batch: Batch) -> Grid:
        first, offset = batch.offsets()
        query_slots, key_slots = int(offset.max(initial=0)) + 1, int(batch.position.max()) + 1
        device = batch.row.device
        at = torch.from_numpy(first).to(device)[:, None] + torch.arange(query_slots, device=device)
        seen = torch.arange(key_slots, device=device) <= at[..., None]
        query = batch.document[batch.row] * query_slots + torch.from_numpy(offset).to(device)
        return cls(query, query_slots, batch.document * key_slots + batch.position, key_slots, seen)


def attend(q: Tensor, true: KeyValue, own: list[KeyValue], places: Grid | Varlen) -> Tensor:
    """Softmax attention of q [M, Q, C] over step 0's keys (`true`, [N, G, C]) and the row's `own` ones [M, G, C].

    The part over step 0 comes with its log-sum-exp; the own keys join by that weight, as if all had been one softmax.
    """
    if isinstance(places, Varlen):
        return flash_attend(q, true, own, places)
    out, lse = causal(q, true, places)
    if not own:
        return out
    group = q.shape[1] // true[0].shape[1]
    keys, values = (torch.stack(t, dim=1).repeat_interleave(group, dim=2) for t in zip(*own, strict=True))
    scores = (q.unsqueeze(1) * keys).sum(-1) * q.shape[-1] ** -0.5  # [M, k, Q]
    weight = torch.cat((lse.unsqueeze(1), scores), dim=1).softmax(dim=1).unsqueeze(-1)
    return weight[:, 0] * out + (weight[:, 1:] * values).sum(1)


def causal(q: Tensor, true: KeyValue, grid: Grid) -> tuple[Tensor, Tensor]:
    """q [M, Q, C] over keys and values [N, G, C] -> attention [M, Q, C] and log-sum-exp [M, Q]."""
    documents, heads = grid.seen.shape[0], true[0].shape[1]
    k, v = (spread(t, grid.key, documents, grid.key_slots).transpose(1, 2) for t in true)  # [B, G, S, C]
    queries = spread(q.unflatten(1, (heads, -1)), grid.query, documents, grid.query_slots)
    queries = queries.permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, G, group * slots, C]: one product a key head
    scores = (queries @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    scores = scores.unflatten(2, (-1, grid.query_slots)).masked_fill(~grid.seen[:, None, None], float("-inf"))
    lse = scores.logsumexp(-1)
    out = (scores - lse.unsqueeze(-1)).exp().flatten(2, 3) @ v
    out = out.unflatten(2, (-1, grid.query_slots)).permute(0, 3, 1, 2, 4).flatten(0, 1)  # [B * slots, G, group, C]
    lse = lse.permute(0, 3, 1, 2).flatten(0, 1)
    return out.index_select(0, grid.query).flatten(1, 2), lse.index_select(0, grid.query).flatten(1, 2)


def spread(x: Tensor, places: Tensor, documents: int, slots: int) -> Tensor:
    """Packed rows [N, ...] -> a grid [documents, slots, ...] with zeros where no row lies."""
    grid = x.new_zeros(documents * slots, *x.shape[1:])
    return grid.index_copy_(0, places, x).unflatten(0, (documents, slots))
