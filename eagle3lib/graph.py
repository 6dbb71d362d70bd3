"""A training step on a GPU: padded to few sizes, captured once a size as a CUDA graph, replayed without waiting for the host.

Legend: N rows, M supervised positions, B documents, K TTT steps.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.batches import TENSORS, Batch, pad
from eagle3lib.draft import Draft
from eagle3lib.flash import Varlen
from eagle3lib.loss import Outcome, objective

UNDER_WAY = 2  # steps that the host may be ahead: enough to hide it, and no more batches on the device
SHARES = 32  # sizes are rounded up to this part of a batch's tokens: at most so many graphs, at most so much wasted work


@dataclass
class Captured:
    """A size of batches: its place on the device and, from the second of its kind on, the graph and where its results appear."""

    inputs: Batch
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
        self.captured: dict[tuple[int, ...], Captured] = {}
        self.pool, self.copies = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
        self.under_way: deque[torch.cuda.Event] = deque()  # steps that the device may not have done yet

    def prepare(self, batch: Batch) -> Batch:
        """On the host, in any thread: padded to one of the fixed sizes (states aside), laid out for the attention kernel, pinned."""
        unit = max(16, self.batch_tokens // SHARES)
        positions = _up(len(batch) + 1, unit)
        queries = _up(batch.queries + positions - len(batch), unit)
        rows = _up(len(batch.token) + queries - batch.queries, 2 * unit)
        padded = pad(batch, rows, positions, queries, _up(len(batch.ids) + 1, 8), states=False)
        padded.places = Varlen.of(padded)
        padded.places.longest = 1 << (padded.places.longest - 1).bit_length()
        return padded.map(lambda t: t if t.is_pinned() else t.pin_memory())

    def upload(self, prepared: Batch) -> Batch:
        """On the device by the time that the current stream gets to it; meanwhile the step before goes on."""
        if len(self.under_way) == UNDER_WAY:
            self.under_way.popleft().synchronize()
        with torch.cuda.stream(self.copies):
            moved = prepared.to(self.head.device)
        torch.cuda.current_stream().wait_stream(self.copies)
        return moved.map(_used_here)

    def __call__(self, prepared: Batch, lr: float) -> tuple[Outcome, Tensor]:
        """One optimizer step. The results live on the device, until a batch of the same size comes.

        A gradient that is not finite changes no weight; the returned norm tells.
        """
        batch = self.upload(prepared)
        self.lr.fill_(lr)
        found = self.captured.get(sizes(batch))
        if found is None:  # the first of its size runs as it is: kernels are chosen and compiled, moments made
            found = self.captured[sizes(batch)] = Captured(filled(batch))
            results = self._step(found.inputs)
        else:
            fill(batch, found.inputs)
            results = self._replay(found)
        self.under_way.append(torch.cuda.current_stream().record_event())
        return results

    def _replay(self, found: Captured) -> tuple[Outcome, Tensor]:
        if found.graph is None:
            found.graph = torch.cuda.CUDAGraph()
            # thread_local: threads that read ahead go on allocating and copying meanwhile
            with torch.cuda.graph(found.graph, pool=self.pool, capture_error_mode="thread_local"):
                found.results = self._step(found.inputs)
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
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm([products.gradient(p) for p in self.parameters])))
        # the fused kernel divides by grad_scale and skips the step at found_inf: clipping without another pass, no wait for the norm
        vars(self.optimizer).update(grad_scale=(norm / self.grad_clip).clamp(min=1.0), found_inf=(~norm.isfinite()).float())
        self.optimizer.param_groups[0]["lr"] = self.lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return replace(outcome, loss=outcome.loss.detach()), norm


def sizes(batch: Batch) -> tuple[int, ...]:
    """All that a captured graph has baked in."""
    assert batch.places
    return len(batch.token), len(batch), len(batch.ids), batch.places.slots, batch.places.longest


def _used_here(t: Tensor) -> Tensor:
    t.record_stream(torch.cuda.current_stream())  # so that its memory is not given to the next upload too early
    return t


def filled(batch: Batch) -> Batch:
    """With room for states at every place of the padded batch, and zeros behind those that it has."""
    room = {"aux": len(batch.token), "last": len(batch)}
    whole = replace(batch, **{name: getattr(batch, name).new_empty(rows, getattr(batch, name).shape[1]) for name, rows in room.items()})
    fill(batch, whole)
    return whole


def fill(source: Batch, to: Batch) -> None:
    """Overwrite a batch on the device with one of the same sizes, whose states may be shorter."""
    for name in TENSORS:
        given, place = getattr(source, name), getattr(to, name)
        place[: len(given)].copy_(given)
        place[len(given) :].zero_()
    assert source.places and to.places
    for name in ("slot", "query_ends", "key_ends"):
        getattr(to.places, name).copy_(getattr(source.places, name))


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
