"""A training step on a GPU: padded to few sizes, captured once a size as a CUDA graph, replayed without waiting for the host.

Legend: N rows, M supervised positions, B documents, K TTT steps.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.batches import Batch, pad
from eagle3lib.draft import Draft
from eagle3lib.flash import Varlen
from eagle3lib.loss import Outcome, objective

UNDER_WAY = 2  # steps that the host may be ahead: enough to hide it, and no more batches on the device
SHARES = 64  # a new size is rounded up to this part of a batch's tokens
SLACK = 1.12  # a known size is taken rather than a new one while it is at most this much larger


Sizes = tuple[int, int, int, int, int]  # N, M, B, query places, bound of a document's rows: all that a graph has baked in


@dataclass
class Prepared:
    """A padded batch, all its small tensors behind each other in one, so that few copies and few calls bring it to the device."""

    ids: list[str]
    sizes: Sizes
    whole: Tensor  # int64
    aux: Tensor  # [rows, A*H], not padded
    last: Tensor  # [positions, H], not padded


class Inputs:
    """A place on the device for batches of one size."""

    def __init__(self, given: Prepared) -> None:
        """`given`, on the device."""
        rows, positions, *_ = self.sizes = given.sizes
        self.ids, self.whole = given.ids, torch.empty_like(given.whole)
        self.aux, self.last = (t.new_empty(n, t.shape[1]) for t, n in ((given.aux, rows), (given.last, positions)))
        self.fill(given)

    def fill(self, given: Prepared) -> None:
        self.whole.copy_(given.whole)
        for place, states in ((self.aux, given.aux), (self.last, given.last)):
            place[: len(states)].copy_(states)
            place[len(states) :].zero_()

    def batch(self) -> Batch:
        rows, positions, documents, slots, longest = self.sizes
        parts = self.whole.split([rows] * 3 + [positions] * 4 + [documents + 1] * 2)
        token, position, document, row, left, greedy, slot, query_ends, key_ends = parts
        places = Varlen(slot, query_ends.int(), key_ends.int(), slots, longest)
        return Batch(self.ids, self.aux, token, position, document, row, left, self.last, greedy, places)


@dataclass
class Captured:
    """A size of batches: its place on the device and, from the second of its kind on, the graph and where its results appear."""

    inputs: Inputs
    graph: Any = None
    results: Any = None


class GraphStep:
    """Loss, gradients and AdamW for one batch after the other. `draft` multiplies in bfloat16 from here on (see products)."""

    def __init__(self, draft: Draft, head: Tensor, optimizer: torch.optim.AdamW, *, steps: int, decay: float, distance: str,
                 grad_clip: float, batch_tokens: int) -> None:
        self.draft, self.head, self.optimizer = draft, head.bfloat16(), optimizer
        self.steps, self.decay, self.distance, self.grad_clip, self.batch_tokens = steps, decay, distance, grad_clip, batch_tokens
        self.layers = products.shorten(draft)
        self.parameters = [p for p in draft.parameters() if p.requires_grad]
        self.lr = torch.tensor(0.0, device=self.head.device)
        self.captured: dict[Sizes, Captured] = {}
        self.known: list[Sizes] = []
        self.choosing = threading.Lock()
        self.pool, self.copies = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.under_way: deque[torch.cuda.Event] = deque()  # steps that the device may not have done yet

    def prepare(self, batch: Batch) -> Prepared:
        """On the host, in any thread: padded to one of the fixed sizes, laid out for the attention kernel, in pinned memory."""
        sizes = rows, positions, documents, queries, _ = self._sizes(batch)
        padded = pad(batch, rows, positions, queries, documents, states=False)
        at = Varlen.of(padded)
        parts = (padded.token, padded.position, padded.document, padded.row, padded.left, padded.greedy, at.slot, at.query_ends, at.key_ends)
        return Prepared(padded.ids, sizes, _pinned(torch.cat([p.long() for p in parts])), _pinned(batch.aux), _pinned(batch.last))

    def _sizes(self, batch: Batch) -> Sizes:
        """The smallest known size that wastes little on this batch, else a new one: few sizes, however the lengths vary."""
        own = (len(batch.token), len(batch), len(batch.ids), batch.queries, int(batch.position.max()) + 1)
        unit = max(16, self.batch_tokens // SHARES)
        positions = _up(own[1] + 1, unit)
        queries = _up(own[3] + positions - own[1], unit)
        rows = _up(own[0] + queries - own[3], 2 * unit)
        longest = 1 << (max(own[4], rows - own[0]) - 1).bit_length()
        new = (rows, positions, _up(own[2] + 1, 8), queries, longest)
        with self.choosing:
            fitting = [known for known in self.known if fits(own, known) and all(k <= SLACK * n for k, n in zip(known[:2], new, strict=False))]
            if not fitting:
                self.known.append(new)
            return min(fitting, default=new)

    def upload(self, prepared: Prepared) -> Prepared:
        """On the device by the time that the current stream gets to it; meanwhile the step before goes on."""
        if len(self.under_way) == UNDER_WAY:
            self.under_way.popleft().synchronize()
        with torch.cuda.stream(self.copies):
            moved = [t.to(self.head.device, non_blocking=True) for t in (prepared.whole, prepared.aux, prepared.last)]
        torch.cuda.current_stream().wait_stream(self.copies)
        for t in moved:
            t.record_stream(torch.cuda.current_stream())  # so that its memory is not given to the next upload too early
        return Prepared(prepared.ids, prepared.sizes, *moved)

    def __call__(self, prepared: Prepared, lr: float) -> tuple[Outcome, Tensor]:
        """One optimizer step. The results live on the device, until a batch of the same size comes.

        A gradient that is not finite changes no weight; the returned norm tells.
        """
        given = self.upload(prepared)
        self.lr.fill_(lr)
        found = self.captured.get(given.sizes)
        if found is None:  # the first of its size runs as it is: kernels are chosen and compiled, moments made
            found = self.captured[given.sizes] = Captured(Inputs(given))
            results = self._step(found.inputs.batch())
        else:
            found.inputs.fill(given)
            results = self._replay(found)
        self.under_way.append(torch.cuda.current_stream().record_event())
        return results

    def _replay(self, found: Captured) -> tuple[Outcome, Tensor]:
        if found.graph is None:
            found.graph = torch.cuda.CUDAGraph()
            # thread_local: threads that read ahead go on allocating and copying meanwhile
            with torch.cuda.graph(found.graph, pool=self.pool, capture_error_mode="thread_local"):
                found.results = self._step(found.inputs.batch())
        found.graph.replay()
        results: tuple[Outcome, Tensor] = found.results
        return results

    def _step(self, batch: Batch) -> tuple[Outcome, Tensor]:
        """Gradients live within the step only: what they fill was activations before."""
        products.refresh(self.layers)
        outcome = objective(self.draft, batch, self.head, self.steps, self.decay, self.distance)
        assert outcome.loss is not None  # on a GPU it is a number, if only 0
        outcome.loss.backward()
        products.collect(self.layers)
        return replace(outcome, loss=outcome.loss.detach()), self._descend([products.gradient(p) for p in self.parameters])

    def _descend(self, gradients: list[Tensor]) -> Tensor:
        """The optimizer's step; returns the norm of all gradients together."""
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        # the fused kernel divides by grad_scale and skips the step at found_inf: clipping without another pass, no wait for the norm
        vars(self.optimizer).update(grad_scale=(norm / self.grad_clip).clamp(min=1.0), found_inf=(~norm.isfinite()).float())
        self.optimizer.param_groups[0]["lr"] = self.lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def fits(own: Sizes, known: Sizes) -> bool:
    """Whether a batch of these sizes can be padded to the known ones (see batches.pad)."""
    rows, positions, documents, queries, _ = (k - o for k, o in zip(known, own, strict=True))
    return rows >= queries >= positions >= 1 and documents >= 1 and known[4] >= max(own[4], rows)


def _pinned(t: Tensor) -> Tensor:
    return t if t.is_pinned() else t.pin_memory()


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
