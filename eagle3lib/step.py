"""One optimizer step on a batch, on a CPU or a GPU, alone or with other processes. The only place that calls the objective in training.

Data parallel: every process divides by the rows of all, gradients are summed, and whoever has no rows joins with zeros. On a GPU they
appear all at once, behind the backward pass (see products), so they are summed there and not one by one as DDP's hooks would.

Legend: K TTT steps, D draft vocabulary, H target hidden size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from eagle3lib import products
from eagle3lib.batches import Batch
from eagle3lib.draft import Draft
from eagle3lib.graph import GraphStep, Inputs, Prepared
from eagle3lib.loss import Outcome, objective
from eagle3lib.parallel import Group
from eagle3lib.recipe import Recipe

Taken = tuple[Outcome | None, Tensor]  # what this process's rows gave (None without any), and the norm of the gradients of all


class CpuStep:
    """Everything in float32 (see precision), one product after the other."""

    def __init__(self, draft: Draft, head: Tensor, optimizer: torch.optim.AdamW, recipe: Recipe, group: Group) -> None:
        self.draft, self.head, self.optimizer, self.recipe, self.group = draft, head, optimizer, recipe, group
        self.parameters = [p for p in draft.parameters() if p.requires_grad]

    def send(self, batch: Batch) -> Batch:
        return batch

    def settle(self) -> None:
        """Before the draft is used outside of training."""

    def take(self, sent: Batch | None, rows: Tensor, lr: float) -> Taken:
        """`rows` int64 [K]: what the loss of each TTT step is divided by, over all processes."""
        self.optimizer.zero_grad(set_to_none=True)
        outcome = None if sent is None else objective(self.draft, sent, self.head, self.recipe.ttt_steps, self.recipe.step_decay,
                                                      self.recipe.loss, None if self.group.size == 1 else rows)
        if outcome is not None and outcome.loss is not None:
            outcome.loss.backward()
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        self.group.add_up([products.gradient(p) for p in self.parameters])
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.recipe.grad_clip)
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()
        return outcome, norm


class GpuStep(GraphStep):
    """GraphStep; with other processes the same step without a graph, as its length then hangs on the slowest anyway."""

    def __init__(self, draft: Draft, head: Tensor, optimizer: torch.optim.AdamW, recipe: Recipe, group: Group, tokens: int) -> None:
        super().__init__(draft, head, optimizer, steps=recipe.ttt_steps, decay=recipe.step_decay, distance=recipe.loss,
                         grad_clip=recipe.grad_clip, batch_tokens=tokens)
        self.group = group

    def send(self, batch: Batch) -> Prepared:
        return self.prepare(batch)

    def settle(self) -> None:
        products.refresh(self.layers)  # the weights have moved since the last step began

    def take(self, sent: Prepared | None, rows: Tensor, lr: float) -> Taken:
        if self.group.size > 1:
            return self._shared(sent, rows.to(self.head.device, non_blocking=True), lr)
        assert sent is not None
        return self(sent, lr)

    def _shared(self, sent: Prepared | None, rows: Tensor, lr: float) -> Taken:
        self.lr.fill_(lr)
        products.refresh(self.layers)
        outcome: Outcome | None = None
        if sent is not None:
            outcome = objective(self.draft, Inputs(self.upload(sent)).batch(), self.head, self.steps, self.decay, self.distance, rows)
            assert outcome.loss is not None
            outcome.loss.backward()
            products.collect(self.layers)
            outcome = replace(outcome, loss=outcome.loss.detach())
        gradients = [products.gradient(p) if sent is not None else products.gradient(p).zero_() for p in self.parameters]
        self.group.add_up(gradients)
        return outcome, self._descend(gradients)


def make(draft: Draft, head: Tensor, optimizer: torch.optim.AdamW, recipe: Recipe, group: Group, tokens: int) -> Any:
    """The step for where the draft is. `tokens`: of a batch of this process, as a rule."""
    return GpuStep(draft, head, optimizer, recipe, group, tokens) if head.is_cuda else CpuStep(draft, head, optimizer, recipe, group)
