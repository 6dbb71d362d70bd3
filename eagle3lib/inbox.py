"""Dumps on their way from shared memory into the store: read, checked and hashed many at a time, copied once.

Short prompts are many, so what can be done for a group of dumps in one call is: they are read side by side into one buffer,
which the thread keeps. Legend: R rows of all dumps of a group, N dumps, S streams, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from eagle3lib import capture, fp8
from eagle3lib.arrivals import Norms
from eagle3lib.errors import Eagle3Error
from eagle3lib.manifest import as_captured
from eagle3lib.shards import FP8
from eagle3lib.store import sample_id

REFUSED = "the engine refused it"  # how the reason of such a row begins


class Inbox:
    """One a thread. `receive` hands what checks out to `store(row, parts)` and tells what is wrong with the others."""

    def __init__(self, manifest: dict[str, Any], norms: Norms):
        self.manifest, self.norms = manifest, norms
        self.row_bytes = as_captured(manifest).hidden_bytes
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def receive(self, engine: Any, replies: Sequence[Any], rows: Sequence[dict[str, Any]],
                store: Callable[[dict[str, Any], dict[str, Any]], None]) -> dict[int, str]:
        """Number of the row -> why its dump is not kept."""
        whole, bad, start = [], {}, 0
        buffer = self._room(sum(len(row["input_ids"]) for row in rows))
        for n, (reply, row) in enumerate(zip(replies, rows, strict=True)):
            try:
                if reply.finish_reason == "refused":
                    raise Eagle3Error(f"{REFUSED} ({reply.error}).")
                ids = np.array(row["input_ids"], np.int64)
                capture.read_into(buffer[start * self.row_bytes : (start + len(ids)) * self.row_bytes], engine.dump_dir, reply.rid, ids,
                                  engine.handshake, look=engine.require_alive)
            except Eagle3Error as error:
                bad[n] = str(error)
                continue
            whole.append((n, start, ids))
            start += len(ids)
        if whole:
            self._keep(whole, start, rows, bad, store)
        return bad

    def _room(self, tokens: int) -> np.ndarray:
        if len(self._buffer) < tokens * self.row_bytes:
            self._buffer = torch.empty(tokens * self.row_bytes, dtype=torch.uint8)
        return self._buffer.numpy()

    def _keep(self, whole: list[tuple[int, int, np.ndarray]], total: int, rows: Sequence[dict[str, Any]], bad: dict[int, str],
              store: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
        """Look at the values of all dumps together; store those that are well."""
        hidden_RSH = self._buffer[: total * self.row_bytes].view(capture.DTYPES[self.manifest["dtype"]]).view(
            total, self.manifest["streams"], self.manifest["hidden_size"])
        starts_N = np.array([start for _, start, _ in whole])
        norms_RS = capture.row_norms(hidden_RSH)
        sick = capture.sick_rows(hidden_RSH, norms_RS, starts_N, self.manifest["layers"])
        healthy_N = [k for k in range(len(whole)) if k not in sick]
        spans = [range(start, start + len(ids)) for _, start, ids in whole]
        if healthy_N:
            kept_R = np.concatenate([np.arange(spans[k].start, spans[k].stop) for k in healthy_N]) if sick else slice(None)
            firsts = np.cumsum([0, *(len(spans[k]) for k in healthy_N[:-1])])
            sick |= {healthy_N[j]: why for j, why in self.norms.judge(norms_RS[kept_R], firsts).items()}
        for k, (n, start, ids) in enumerate(whole):
            if k in sick:
                bad[n] = sick[k]
            else:
                store(rows[n], self._parts(rows[n], ids, hidden_RSH[start : start + len(ids)]))

    def _parts(self, row: dict[str, Any], ids: np.ndarray, hidden_TSH: torch.Tensor) -> dict[str, Any]:
        """The sample's bytes as its shard will hold them."""
        parts: dict[str, Any] = {}
        if self.manifest["store_dtype"] == FP8:
            hidden_TSH, scale_TS = fp8.encode(hidden_TSH, row["sample_id"])
            parts["scale"] = capture.byte_view(scale_TS.contiguous())
        mask = np.array(row["loss_mask"], np.uint8)
        if (name := sample_id(ids, mask)) != row["sample_id"]:
            raise Eagle3Error(f"row {row['sample_id']}: its token ids and mask hash to {name}. Was prepared/ changed by hand? Prepare again.")
        return {"hidden": capture.byte_view(hidden_TSH), **parts, "input_ids": ids.astype(np.int32).view(np.uint8), "loss_mask": mask}
