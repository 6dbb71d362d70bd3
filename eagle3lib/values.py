"""What the hidden states of a whole store look like, in one pass that keeps only counts and a sample of norms.

Legend: T tokens of a sample, S streams, H hidden size.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np
import torch

from eagle3lib import capture
from eagle3lib.progress import tqdm
from eagle3lib.store import Sample, Store

SHOWN, LONGEST = 256, 2048  # samples, and positions of each, of which norms and cosines are kept
FAINT = 1e-3  # of the sample's median norm: a row below is as good as zero


@dataclass
class Portrait:
    """Counts over all rows of all streams; norms and cosines of some samples."""

    names: list[str]  # of the streams
    rows: int = 0
    sick: dict[str, int] = field(default_factory=lambda: {"finite": 0, "rows that vary": 0, "no row is near zero": 0, "no row repeats": 0})
    norms: dict[str, list[float]] = field(default_factory=dict)  # stream -> median norm by position
    cosines: dict[str, list[float]] = field(default_factory=dict)  # "r_2 and r_15" -> cosine of some tokens


def look(store: Store) -> Portrait:
    """Read every sample, as the trainer will."""
    names = [f"r_{k}" for k in store.manifest["layers"]] + ["last"]
    portrait, shown = Portrait(names), set(np.linspace(0, max(0, len(store) - 1), min(SHOWN, len(store))).astype(int).tolist())
    kept: list[np.ndarray] = []
    cosines: list[np.ndarray] = []
    for i, sample in tqdm(enumerate(read_ahead(store)), desc="verify values", total=len(store), mininterval=1):
        norms_TS = _count(sample.hidden, portrait)
        if i in shown:
            kept.append(norms_TS[:LONGEST])
            hidden_TSH = sample.hidden[:LONGEST].float()
            cosines.append(torch.cosine_similarity(hidden_TSH[:, :-1], hidden_TSH[:, 1:], dim=-1).numpy())
    portrait.norms = _profile(kept, names)
    pairs = [f"{a} and {b}" for a, b in zip(names, names[1:], strict=False)]
    portrait.cosines = {pair: np.concatenate(cosines)[:, s].tolist() for s, pair in enumerate(pairs)} if cosines else {}
    return portrait


def read_ahead(store: Store) -> Iterator[Sample]:
    """All samples in order; the next few are being read and proved meanwhile."""
    workers = min(4, os.cpu_count() or 1)
    with ThreadPoolExecutor(workers) as pool:
        queue: deque[Future[Sample]] = deque()
        for i in range(len(store)):
            queue.append(pool.submit(store.read, i))
            if len(queue) > 2 * workers:
                yield queue.popleft().result()
        while queue:
            yield queue.popleft().result()


def _count(hidden_TSH: torch.Tensor, portrait: Portrait) -> np.ndarray:
    """Add this sample's sick rows; returns its norms [T, S]."""
    norms_TS = capture.row_norms(hidden_TSH)
    constant_TS = (hidden_TSH[..., 0] == hidden_TSH[..., -1]).numpy()
    for t, s in np.argwhere(constant_TS):
        constant_TS[t, s] = bool((hidden_TSH[t, s] == hidden_TSH[t, s, 0]).all())
    portrait.rows += norms_TS.size
    portrait.sick["finite"] += int((~np.isfinite(norms_TS)).sum())
    portrait.sick["rows that vary"] += int(constant_TS.sum())
    portrait.sick["no row is near zero"] += int((norms_TS < FAINT * np.median(norms_TS, axis=0)).sum())
    portrait.sick["no row repeats"] += sum(_repeats(hidden_TSH[:, s], norms_TS[:, s]) for s in range(norms_TS.shape[1]))
    return norms_TS


def _repeats(hidden_TH: torch.Tensor, norms_T: np.ndarray) -> int:
    """Rows that equal an earlier row of the sample. Equal rows have equal norms, so only those are compared."""
    order = np.argsort(norms_T, kind="stable")
    same = np.flatnonzero(norms_T[order][1:] == norms_T[order][:-1])
    return sum(bool(torch.equal(hidden_TH[order[i]], hidden_TH[order[i + 1]])) for i in same)


def _profile(norms: list[np.ndarray], names: list[str]) -> dict[str, list[float]]:
    longest = int(np.median([len(n) for n in norms])) if norms else 0
    padded = np.full((len(norms), longest, len(names)), np.nan)
    for row, norm in zip(padded, norms, strict=True):
        row[: len(norm)] = norm[:longest]
    known = np.ma.masked_invalid(padded)
    return {name: np.ma.median(known[:, :, s], axis=0).filled(np.nan).tolist() for s, name in enumerate(names)}
