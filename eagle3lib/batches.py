"""Batches: samples of a store, cut to the rows that training needs and packed behind each other without padding.

Legend: N rows of all documents of a batch, M supervised positions, A captured layers, H target hidden size.

Row i of a document joins the states of token i with token i+1. It is supervised at TTT step k iff tokens i+1 .. i+2+k
all lie in one reply (a run of True in the loss mask). So at step 0 there is one supervised row for every reply token
but the last, and step k of the row of supervised position m meets the token, and the target, of position m + k: nothing
about later steps has to be stored. Rows after a document's last supervised row are never read and are cut.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.flash import Varlen
from eagle3lib.samples import Sample, Stack, stack


@dataclass
class Batch:
    """`ids` names the documents in order. Everything about tokens counts from a document's own start."""

    ids: list[str]
    aux: Tensor  # [N, A*H] captured states of the row's token
    token: Tensor  # int64 [N] the token after it: the row's input
    position: Tensor  # int64 [N] the row's number i in its document
    document: Tensor  # int64 [N] index into `ids`, ascending
    row: Tensor  # int64 [M] row that is supervised at step 0, ascending
    left: Tensor  # int64 [M] steps at which it is supervised, counted from step 0: 1, 2, ...
    last: Tensor  # [M, H] target's last hidden state at the row's input token: its distribution is the row's target
    greedy: Tensor  # int64 [M] the target's own greedy choice there, over the whole vocabulary
    places: Varlen | None = None  # where the GPU's attention kernel is to be used; else ttt lays the rows out itself

    def __len__(self) -> int:
        return len(self.row)

    @property
    def queries(self) -> int:
        """Rows from each document's first supervised one to its end, together."""
        first, _ = self.offsets()
        return int((np.bincount(self.document.cpu().numpy(), minlength=len(self.ids)) - first)[: int(self.document.max()) + 1].sum())

    def map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor changed, for example moved."""
        return Batch(self.ids, **_each(lambda name: change(getattr(self, name))), places=self.places and self.places.map(change))

    def to(self, device: torch.device | str) -> Batch:
        """Moved without waiting: the source must stay as it is until the device has caught up."""
        return self.map(lambda t: t.to(device, non_blocking=True))

    def offsets(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each document its first supervised row's number [B], and of each supervised position its distance from that [M]."""
        document, number = self.document[self.row].cpu().numpy(), self.position[self.row].cpu().numpy()
        first = np.zeros(len(self.ids), dtype=np.int64)
        places, at = np.unique(document, return_index=True)
        first[places] = number[at]
        return first, number - first[document]


STATES = ("aux", "last")  # what is large
TENSORS = tuple(f.name for f in fields(Batch) if f.name not in ("ids", "places"))


def _each(make: Callable[[str], Tensor]) -> dict[str, Any]:
    return {name: make(name) for name in TENSORS}


class Samples(Protocol):
    """What training needs of a store."""

    def read(self, i: int) -> Sample: ...

    def read_many(self, numbers: Sequence[int], scratch: np.ndarray | None = None) -> Stack: ...


def steps_left(loss_mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """bool [T] of documents of these lengths -> int64 [T]: how many tokens of the same reply follow each token; -1 outside replies."""
    over = ~np.append(loss_mask[1:], False)
    over[np.cumsum(lengths) - 1] = True
    ends, at = np.flatnonzero(loss_mask & over), np.arange(len(loss_mask))
    if not len(ends):
        return np.full(len(at), -1)
    return np.where(loss_mask, ends[np.searchsorted(ends, at).clip(max=len(ends) - 1)] - at, -1)


def greedy_tokens(last: Tensor, head: Tensor, chunk: int = 4096) -> Tensor:
    """Last hidden states [M, H], the target's lm_head [V, H] -> the target's greedy token of each, int64 [M], on `last`'s device.

    The head may lie on the host while the states are on a GPU: `chunk` of its rows at a time then pass through.
    """
    best, token = last.new_full((len(last),), float("-inf"), dtype=torch.float32 if head.dtype == torch.bfloat16 else head.dtype), None
    for start in range(0, len(head) if len(last) else 0, chunk):
        part = head[start : start + chunk].to(last.device, non_blocking=True)
        value, at = products.wide(last.to(part.dtype), part).max(-1)
        token = at if token is None else torch.where(value > best, at + start, token)
        best = torch.maximum(best, value)
    return torch.zeros(0, dtype=torch.int64, device=last.device) if token is None else token


class Reader:
    """Makes batches of a store's samples. The target's greedy tokens are computed once a sample and then kept."""

    def __init__(self, store: Samples, head: Tensor, device: torch.device | str = "cpu") -> None:
        """`head` [V, H]: the target's lm_head on the host, in the format to compute greedy tokens in, on `device`."""
        self.store, self.device = store, torch.device(device)
        self.head = head.pin_memory() if self.device.type == "cuda" else head
        self._greedy: dict[str, Tensor] = {}
        self._local = threading.local()  # each thread that reads has a scratch buffer

    def batch(self, samples: Sequence[int]) -> Batch:
        """Pack these samples of the store. Those without a supervised row take no room; the batch may be empty."""
        cuda = self.device.type == "cuda"
        found = self.store.read_many(samples, getattr(self._local, "scratch", None))
        self._keep_scratch(found.hidden.nbytes)
        batch = lay(found, pin=cuda)
        self._add_greedy(batch)
        if cuda and len(batch):
            batch.places = Varlen.of(batch)
        return batch

    def _keep_scratch(self, size: int) -> None:
        if size > len(getattr(self._local, "scratch", ())):
            self._local.scratch = np.empty(size + size // 4, np.uint8)

    def _add_greedy(self, batch: Batch) -> None:
        if not len(batch):
            return
        lasts = batch.last.split(torch.bincount(batch.document[batch.row], minlength=len(batch.ids)).tolist())
        new = {name: last for name, last in zip(batch.ids, lasts, strict=True) if name not in self._greedy}
        if new:
            found = greedy_tokens(torch.cat(list(new.values())).to(self.device), self.head).cpu()
            self._greedy.update(zip(new, found.split([len(last) for last in new.values()]), strict=True))
        batch.greedy = torch.cat([self._greedy[name] for name in batch.ids])


def document(sample: Sample) -> Batch:
    """One sample as a batch, `greedy` left at -1."""
    return lay(stack([sample]))


def lay(given: Stack, pin: bool = False) -> Batch:
    """Samples behind each other as one batch, without those that have no supervised row, `greedy` left at -1.

    States are copied once, for a GPU into pinned memory.
    """
    sample = np.repeat(np.arange(len(given.ids)), given.lengths)
    number = np.arange(len(sample)) - (np.cumsum(given.lengths) - given.lengths)[sample]
    left = steps_left(given.loss_mask, given.lengths)
    at = np.flatnonzero((left >= 1) & (number >= 1))  # in a reply and not its last; the row is the token before, so never a sample's first
    rows = np.zeros(len(given.ids), dtype=np.int64)
    rows[sample[at]] = number[at]  # of each sample, up to its last supervised row
    inside = number < rows[sample]
    taken, kept = np.flatnonzero(inside), np.flatnonzero(rows)
    document, place = np.searchsorted(kept, sample[taken]), np.cumsum(inside) - 1
    streams = given.hidden.shape[1]
    packed = {"token": given.input_ids[taken + 1], "position": number[taken], "document": document, "row": place[at - 1], "left": left[at]}
    small: dict[str, Any] = {name: torch.from_numpy(part.astype(np.int64)) for name, part in packed.items()}
    return Batch(
        ids=[given.ids[n] for n in kept] or given.ids[:1], **small,
        aux=_picked(given.hidden.flatten(1)[:, : (streams - 1) * given.hidden.shape[2]], taken, pin), last=_picked(given.hidden[:, -1], at, pin),
        greedy=torch.full((len(at),), -1),
    )


def _picked(states: Tensor, rows: np.ndarray, pin: bool) -> Tensor:
    out = torch.empty(len(rows), states.shape[1], dtype=states.dtype, pin_memory=pin)
    return torch.index_select(states, 0, torch.from_numpy(rows), out=out)


def pack(batches: list[Batch]) -> Batch:
    """Lay batches of one document each behind each other, dropping the empty ones."""
    kept = [d for d in batches if len(d)] or batches[:1]
    starts = np.cumsum([0] + [len(d.token) for d in kept])
    cat = _each(lambda name: torch.cat([getattr(d, name) for d in kept]))
    cat["document"] = torch.repeat_interleave(torch.arange(len(kept)), torch.tensor(np.diff(starts)))
    cat["row"] = torch.cat([d.row + int(start) for d, start in zip(kept, starts, strict=False)])
    return Batch(ids=[d.ids[0] for d in kept], **cat)


def pad(batch: Batch, rows: int, positions: int, queries: int, documents: int, states: bool = True) -> Batch:
    """Fill up to fixed sizes with one more document whose supervised positions are known at no step, so that they count for nothing.

    Without `states`, aux and last stay as long as they are; zeros behind them are to follow on the device.

    rows [N], positions [M], queries (rows from a document's first supervised one on, over all documents) and documents are
    totals; each must exceed the batch's own by at least one, and by as much as the one named after it, documents aside.
    """
    more_rows, more, behind = rows - len(batch.token), positions - len(batch), queries - batch.queries
    if not (more_rows >= behind >= more >= 1 and documents > len(batch.ids)):
        raise ValueError(f"cannot pad {len(batch.token)} rows, {len(batch)} positions, {batch.queries} queries, {len(batch.ids)} documents "
                         f"to {rows}, {positions}, {queries}, {documents}")
    row = torch.arange(rows - more, rows)
    row[0] = rows - behind
    filler = Batch(
        ids=[""] * (documents - len(batch.ids)), aux=batch.aux.new_zeros(more_rows, batch.aux.shape[1]),
        token=batch.token.new_zeros(more_rows), position=torch.arange(more_rows),
        document=torch.full((more_rows,), len(batch.ids)), row=row,
        left=batch.left.new_zeros(more), last=batch.last.new_zeros(more, batch.last.shape[1]), greedy=batch.greedy.new_zeros(more),
    )
    whole = _each(lambda name: torch.cat((getattr(batch, name), getattr(filler, name))) if states or name not in STATES else getattr(batch, name))
    return Batch(batch.ids + filler.ids, **whole)


def plan(lengths: np.ndarray, samples: np.ndarray, batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """The epoch's batches: `samples` in an order drawn from seed and epoch, cut whenever `batch_tokens` are full.

    `lengths` [all samples] in tokens. A sample longer than `batch_tokens` is a batch of its own.
    """
    order = np.random.default_rng([seed, epoch]).permutation(samples)
    batches: list[list[int]] = []
    room = 0
    for i in order.tolist():
        if lengths[i] > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(i)
        room -= int(lengths[i])
    return batches
