"""Capture, the client's side: read what the plugin wrote for one request, and believe none of it unchecked.

Legend: T tokens of the request, A captured layers, H target hidden size, r_k the residual stream that enters layer k.
A dump is one or several files `<rid>.<start>.safetensors` (one for each prefill chunk) that follow one another.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from eagle3lib.errors import Eagle3Error

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RID = re.compile(r"([0-9a-f]{8,64})-([A-Za-z0-9_-]{1,120})")
AGAIN = re.compile(r"-retry\d+$")  # what the client adds to the id when it repeats a request
WAIT_S = 60.0  # for a file after the server's reply; the writers lag behind by a few batches at most
POLL_S = 0.002
LOOK_EVERY = 200  # polls


def dump_rid(nonce: str, name: str) -> str:
    """The request id that makes the plugin of server run `nonce` dump this request. name: letters, digits, - and _."""
    rid = f"{nonce}-{name}"
    if not RID.fullmatch(rid):
        raise Eagle3Error(f"request name {name!r}: 1 to 120 letters, digits, '-' or '_' are allowed; the name becomes part of a file name.")
    return rid


def read_dump(dump_dir: Path, rid: str, input_ids: list[int], handshake: dict[str, Any], *, timeout_s: float | None = None,
              look: Callable[[], None] = lambda: None) -> torch.Tensor:
    """Hidden states of request `rid`: [T, A+1, H] in the engine's dtype; stream 0..A-1 = r_k for k in layers, stream A = last.

    handshake: what the writing rank said of itself ("nonce", "layers", "hidden_size", "dtype"). Waits up to timeout_s (WAIT_S) for
    files that the server is still writing, and calls `look` meanwhile (it may raise). Raises Eagle3Error that names the
    request when a row is missing or twice there, belongs to other tokens, another run or other layers, or is not finite
    or constant.
    """
    return load_dump(dump_dir, rid, input_ids, handshake, timeout_s=timeout_s, look=look)[0]


def load_dump(dump_dir: Path, rid: str, input_ids: list[int], handshake: dict[str, Any], *, timeout_s: float | None = None,
              look: Callable[[], None] = lambda: None) -> tuple[torch.Tensor, torch.Tensor]:
    """As read_dump; also the norm of every row, float32 [T, A+1], which the checks need anyway. The states of a dump in one
    file are that file, mapped: nothing is copied."""
    if not RID.fullmatch(rid):
        raise Eagle3Error(f"dump of request {rid!r}: this is no request id of ours, so no dump belongs to it.")
    chunks: list[torch.Tensor] = []
    rows, deadline = 0, time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
    while rows < len(input_ids):
        path = _await_chunk(Path(dump_dir), rid, rows, len(input_ids), deadline, look)
        hidden, ids, meta = _load(path, rid)
        _require_shape(path.name, rid, rows, hidden, ids, meta, handshake)
        _require_tokens(rid, rows, ids.tolist(), input_ids)
        chunks.append(hidden)
        rows += len(ids)
    hidden_TAH = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return hidden_TAH, _living_norms(rid, hidden_TAH, handshake["layers"])


def delete_dump(dump_dir: Path, rid: str) -> None:
    """Delete all files of one request. Tensors already read stay valid."""
    delete_dumps(dump_dir, [rid])


def delete_dumps(dump_dir: Path, rids: Sequence[str]) -> None:
    """Delete all files of these requests and of their repetitions, with one look at the folder."""
    ours = {rid for rid in rids if RID.fullmatch(rid)}
    with os.scandir(dump_dir) as entries:
        names = [entry.name for entry in entries]
    for name in names:
        if (stem := name.split(".")[0]) in ours or AGAIN.sub("", stem) in ours:
            (Path(dump_dir) / name).unlink(missing_ok=True)


def read_handshakes(dump_dir: Path) -> list[dict]:
    """What each writing rank said about itself; Eagle3Error when one of them refused to capture."""
    handshakes = [json.loads(path.read_text()) for path in sorted(Path(dump_dir).glob("handshake-*.json"))]
    for handshake in handshakes:
        if "error" in handshake:
            raise Eagle3Error(f"capture refused by the plugin inside the server: {handshake['error']}")
    return handshakes


def _await_chunk(dump_dir: Path, rid: str, start: int, total: int, deadline: float, look: Callable[[], None]) -> Path:
    """The file whose rows begin at `start`, once it is there. A mark of failure or the deadline ends the wait."""
    path, failed = (dump_dir / f"{rid}.{start}.{end}" for end in ("safetensors", "failed"))
    for turn in itertools.count():
        if path.exists():
            return path
        if failed.exists():
            why = failed.read_text() or "disk full?"
            raise Eagle3Error(f"dump of request {rid}: the server could not write the rows from {start}: {why}. "
                              f"Make room in {dump_dir} or lower concurrency.")
        if time.monotonic() > deadline:
            there = sorted(p.name.removeprefix(f"{rid}.") for p in dump_dir.glob(f"{rid}.*"))
            raise Eagle3Error(f"dump of request {rid}: rows {start} to {total - 1} of {total} are missing in {dump_dir} "
                              f"(files of this request: {there or 'none'}). Was a prefix taken from the cache, or the capture off?")
        if turn % LOOK_EVERY == LOOK_EVERY - 1:
            look()
        time.sleep(POLL_S)
    raise AssertionError("an endless loop has ended")


def _load(path: Path, rid: str) -> tuple[torch.Tensor, torch.Tensor, dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("hidden"), file.get_tensor("input_ids"), file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise Eagle3Error(f"dump of request {rid}: {path} cannot be read ({error}). Extract this row again.") from None


def _require(holds: bool, rid: str, found: str, wanted: str) -> None:
    if not holds:
        raise Eagle3Error(f"dump of request {rid}: {found}; {wanted}. Nothing of it was kept.")


def _require_shape(name: str, rid: str, start: int, hidden: torch.Tensor, ids: torch.Tensor, meta: dict[str, str],
                   handshake: dict[str, Any]) -> None:
    """The file is of this run, request, place and layers; one row of the right shape and dtype for each token, at least one."""
    layers = handshake["layers"]
    wanted = {"nonce": handshake["nonce"], "rid": rid, "start": str(start), "layers": ",".join(map(str, layers))}
    _require(meta == wanted, rid, f"{name} says {meta}", f"expected {wanted}")
    shape = (len(ids), len(layers) + 1, handshake["hidden_size"])
    _require(tuple(hidden.shape) == shape and len(ids) > 0 and hidden.dtype == DTYPES[handshake["dtype"]], rid,
             f"{name} holds {list(hidden.shape)} {hidden.dtype} for {len(ids)} tokens", f"expected {list(shape)} {handshake['dtype']}")


def _require_tokens(rid: str, start: int, found: list[int], sent: list[int]) -> None:
    wanted = list(sent[start : start + len(found)])
    if found == wanted:
        return
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(wanted))
    tokens = [ids[at] if at < len(ids) else "no token" for ids in (found, wanted)]
    _require(False, rid, f"row {start + at} belongs to {tokens[0]}", f"{tokens[1]} was sent there: the states are another request's")


def _living_norms(rid: str, hidden_TAH: torch.Tensor, layers: list[int]) -> torch.Tensor:
    """float32 [T, A+1]; every row of every stream must be finite and not constant (all zeros is constant)."""
    norm_TA = torch.linalg.vector_norm(hidden_TAH, dim=-1, dtype=torch.float32)
    infinite_TA = ~norm_TA.isfinite()  # bf16 squares overflow from 1e19 on, and such a state is as sick as an infinite one
    first_TA, middle = hidden_TAH[..., 0], hidden_TAH.shape[-1] // 2
    constant_TA = (first_TA == hidden_TAH[..., -1]) & (first_TA == hidden_TAH[..., middle])  # seldom by chance: then look at the whole row
    for row, stream in constant_TA.nonzero().tolist():
        constant_TA[row, stream] = bool((hidden_TAH[row, stream] == hidden_TAH[row, stream, 0]).all())
    for what, bad_TA in (("NaN or infinite values", infinite_TA), ("one single value throughout", constant_TA)):
        if bad_TA.any():
            row, stream = bad_TA.nonzero()[0].tolist()
            name = f"r_{layers[stream]}" if stream < len(layers) else "the last hidden state"
            _require(False, rid, f"{name} at row {row} has {what}", f"{int(bad_TA.sum())} rows are like that")
    return norm_TA
