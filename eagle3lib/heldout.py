"""Acceptance while training: the draft on held-out rows, teacher-forced and joint, as a whole and by length.

Legend: K TTT steps, M supervised rows of a batch, P samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from eagle3lib import acceptance
from eagle3lib.acceptance import Acceptance
from eagle3lib.batches import Batch, Reader
from eagle3lib.draft import Draft
from eagle3lib.loss import joint_hits, simulate
from eagle3lib.parallel import Group

EDGES = (64, 128, 256, 512, 1024, 2048, 4096)  # lower bounds of the length buckets [tokens]


@dataclass(frozen=True)
class Heldout:
    total: Acceptance
    by_context: dict[str, Acceptance]  # tokens known before the round
    by_reply: dict[str, Acceptance]  # tokens of the reply that the row belongs to

    @property
    def buckets(self) -> dict[str, dict[str, dict[str, float]]]:
        """{"context" | "reply": {"64-127": {"length", "low", "high", "rows"}}}: a small record for metrics.jsonl."""
        return {name: {bucket: {"length": a.length, "low": a.low, "high": a.high, "rows": a.rounds} for bucket, a in found.items()}
                for name, found in (("context", self.by_context), ("reply", self.by_reply))}


def measure(draft: Draft, reader: Reader, parts: Sequence[list[int]], steps: int, device: str, group: Group) -> Heldout | None:
    """Simulated acceptance on the batches `parts` of the reader's samples, dealt out over the processes; None without a row.

    A target token outside the draft vocabulary is a miss. The same in every process.
    """
    found: list[Any] = []
    for samples in parts[group.rank :: group.size]:
        batch = reader.batch(samples)
        if len(batch):
            found += _rows(batch, draft, steps, device)
    rows = [row for part in group.gather(found) for row in part]
    if not rows:
        return None
    ids = sorted({r[0] for r in rows})
    total = _figure(rows, ids)
    return Heldout(total, _buckets(rows, ids, 1), _buckets(rows, ids, 2))


def _rows(batch: Batch, draft: Draft, steps: int, device: str) -> list[tuple[str, int, int, list[int], list[int]]]:
    """(sample, context bucket, reply bucket, joint hits [K], tries [K]), summed over the rows that share the first three."""
    hits, known = (t.cpu() for t in simulate(draft, batch.to(device), steps))
    joint, tried = joint_hits(hits, known).long(), known.long()
    document = batch.document[batch.row]
    context = torch.bucketize(batch.position[batch.row] + 2, torch.tensor(EDGES), right=True)  # row i: token i+1 is known
    reply = torch.bucketize(reply_lengths(batch), torch.tensor(EDGES), right=True)
    keys, place = torch.stack([document, context, reply], dim=1).unique(dim=0, return_inverse=True)
    empty = torch.zeros(len(keys), steps, dtype=torch.int64)
    sums = empty.index_add(0, place, joint).tolist(), empty.index_add(0, place, tried).tolist()
    return [(batch.ids[d], c, r, *both) for (d, c, r), *both in zip(keys.tolist(), *sums, strict=True)]


def reply_lengths(batch: Batch) -> torch.Tensor:
    """int64 [M]: tokens of the reply that each supervised row belongs to, as far as it is supervised."""
    starts = torch.ones(len(batch), dtype=torch.bool)  # `left` counts down by one within a reply
    starts[1:] = (batch.left[1:] != batch.left[:-1] - 1) | (batch.row[1:] != batch.row[:-1] + 1)
    reply = starts.cumsum(0) - 1
    return (batch.left[starts] + 1)[reply]


def _buckets(rows: list[Any], ids: list[str], key: int) -> dict[str, Acceptance]:
    bounds = [0, *EDGES]
    names = [f"{low}-{high - 1}" for low, high in zip(bounds, EDGES, strict=False)] + [f"{EDGES[-1]}+"]
    return {names[b]: _figure([r for r in rows if r[key] == b], ids) for b in sorted({r[key] for r in rows})}


def _figure(rows: list[Any], ids: list[str]) -> Acceptance:
    """Samples are in one fixed order, so that the bootstrap draws the same whatever the number of processes."""
    steps = len(rows[0][3])
    counts: dict[str, np.ndarray] = {}
    for sample, _, _, hits, tried in rows:
        counts[sample] = counts.get(sample, np.zeros((2, steps), dtype=np.int64)) + np.array([hits, tried])
    stacked = np.stack([counts[i] for i in ids if i in counts])
    return acceptance.from_counts(stacked[:, 0], stacked[:, 1])
