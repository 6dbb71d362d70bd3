"""A training step on a GPU: padded to few sizes, captured once a size as a CUDA graph, replayed without waiting for the host.

Legend: N rows, M supervised positions, B documents, K TTT steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.batches import TENSORS, Batch, pad
from eagle3lib.draft import Draft
from eagle3lib.flash import Varlen
from eagle3lib.loss import Outcome, objective

SHARES = 32  # sizes are rounded up to this part of a batch's tokens: at most so many graphs, at most so much wasted work


@dataclass
class Captured:
    """A size of batches: its place on the device and, from the second of its kind on, the graph and where its results appear."""

    inputs: Batch
    graph: Any = None
    results: Any = None


@dataclass
class Uploaded:
    batch: Batch  # on the device once `arrived`
    pinned: Batch  # kept until then
    arrived: Any


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

    def upload(self, batch: Batch) -> Uploaded:
        """Pad a batch on the host to one of the fixed sizes and start its way to the device; any thread may do so."""
        pinned = self.prepare(batch).map(lambda t: t.pin_memory())
        with torch.cuda.stream(self.copies):
            moved = pinned.to(self.head.device)
            arrived = torch.cuda.Event()
            arrived.record()
        return Uploaded(moved, pinned, arrived)

    def prepare(self, batch: Batch) -> Batch:
        """Padded and laid out for the attention kernel."""
        unit = max(16, self.batch_tokens // SHARES)
        positions = _up(len(batch) + 1, unit)
        queries = _up(batch.queries + positions - len(batch), unit)
        rows = _up(len(batch.token) + queries - batch.queries, 2 * unit)
        padded = pad(batch, rows, positions, queries, _up(len(batch.ids) + 1, 8))
        padded.places = Varlen.of(padded)
        padded.places.longest = 1 << (padded.places.longest - 1).bit_length()
        return padded

    def __call__(self, uploaded: Uploaded, lr: float) -> tuple[Outcome, Tensor]:
        """One optimizer step. The results live on the device, until a batch of the same size comes.

        A gradient that is not finite changes no weight; the returned norm tells.
        """
        self.lr.fill_(lr)
        torch.cuda.current_stream().wait_event(uploaded.arrived)
        batch = uploaded.batch.map(_used_here)
        key = sizes(batch)
        found = self.captured.get(key)
        if found is None:  # the first of its size runs as it is: kernels are chosen and compiled, moments made
            self.captured[key] = Captured(batch)
            return self._step(self.captured[key].inputs)
        copy(batch, found.inputs)
        if found.graph is None:
            found.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(found.graph, pool=self.pool, capture_error_mode="thread_local"):  # another thread reads ahead meanwhile
                found.results = self._step(found.inputs)
        found.graph.replay()
        return found.results

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


def copy(source: Batch, to: Batch) -> None:
    """Overwrite a batch on the device with one of the same sizes."""
    for name in TENSORS:
        getattr(to, name).copy_(getattr(source, name), non_blocking=True)
    assert source.places and to.places
    for name in ("slot", "query_ends", "key_ends"):
        getattr(to.places, name).copy_(getattr(source.places, name), non_blocking=True)


def _up(count: int, unit: int) -> int:
    return -(-count // unit) * unit
