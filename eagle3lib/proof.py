"""Proof: is a reply the target's own greedy one? And what does the draft, teacher-forced along it, predict of every round?

Legend: M rows of a reply (one less than its tokens), K draft steps, A captured layers, H hidden size, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle3lib.acceptance import Round
from eagle3lib.batches import document, pack
from eagle3lib.draft import Draft
from eagle3lib.loss import simulate
from eagle3lib.store import Sample, sample_id
from eagle3lib.verifier import states

NEAR_TIE = 1e-3  # nats; logits closer than this may swap between two float32 kernels


@dataclass(frozen=True)
class Mismatch:
    """The first reply token that is not the target's own. `margin`: by how many nats the target prefers its own."""

    position: int  # within the reply
    found: int
    expected: int
    margin: float

    @property
    def near_tie(self) -> bool:
        return self.margin < NEAR_TIE

    def __str__(self) -> str:
        kind = "a numerical near-tie" if self.near_tie else "no near-tie: a real difference"
        return f"reply token {self.position} is {self.found}, the target alone says {self.expected}, by {self.margin:.2g} nats ({kind})"


@dataclass(frozen=True)
class Proof:
    """What one cacheless forward over prompt + reply shows. `sample.hidden` is [T, A+1, H] in the target's dtype."""

    sample: Sample
    mismatch: Mismatch | None
    smallest_margin: float  # nats between the target's first and second choice, over the reply


@torch.inference_mode()
def prove(target: torch.nn.Module, prompt: list[int], reply: list[int], layers: Sequence[int]) -> Proof:
    """Is `reply` the target's own greedy answer? One forward over everything, without cache, drafts, batch or mask.

    If each token is the argmax behind all tokens before it, the reply is the greedy one, by induction. The forward's
    hidden states come along as a sample, so teacher-forced figures cost nothing more.
    """
    ids = torch.tensor(prompt + reply)
    device = next(target.parameters()).device
    logits, aux, last = (t[0].cpu() for t in states(target, ids[None].to(device), layers, keep=len(reply) + 1))
    top = logits[:-1].topk(2, dim=-1)
    wrong = (top.indices[:, 0] != torch.tensor(reply)).nonzero().flatten().tolist()
    mismatch = None
    if wrong:
        i = wrong[0]
        mismatch = Mismatch(i, reply[i], int(top.indices[i, 0]), float(top.values[i, 0] - logits[i, reply[i]]))
    mask = torch.arange(len(ids)) >= len(prompt)
    hidden = torch.cat([aux.unflatten(-1, (len(layers), -1)), last[:, None]], dim=1)
    return Proof(Sample(sample_id(ids, mask), ids, mask, hidden), mismatch, float((top.values[:, 0] - top.values[:, 1]).min()))


@torch.inference_mode()
def teacher_forced(draft: Draft, sample: Sample, steps: int) -> tuple[Tensor, Tensor]:
    """(hits, known), bool [M, K], over the rows of a proven reply; M is one less than its tokens (see loss.simulate)."""
    batch = pack([document(sample)])
    if not len(batch):
        return torch.zeros(0, steps, dtype=torch.bool), torch.zeros(0, steps, dtype=torch.bool)
    batch.greedy = sample.input_ids[batch.row + 2]  # proven: the next token is the target's own choice
    hits, known = simulate(draft, batch.to(draft.fc.weight.device), steps)
    return hits.cpu(), known.cpu()


def replay(hits: Tensor, known: Tensor, context: int, finish: str) -> list[Round]:
    """The rounds that teacher-forced hits [M, K] predict: start at the first row, jump by what is accepted plus one.

    `context`: tokens known before the first round (prompt + 1). Must equal the measured rounds: the draft then saw the
    same states, and every proposal and rejection fell as training counts them.
    """
    accepted_M = (hits & known).cumprod(1).sum(1).tolist()
    rounds, m = [], 0
    while m < len(accepted_M):
        left = len(accepted_M) - m
        ends = finish if accepted_M[m] >= left else "eos" if finish == "eos" and accepted_M[m] + 1 == left else ""
        rounds.append(Round(context + m, min(accepted_M[m], left - 1), ends))
        m += accepted_M[m] + 1
    return rounds
