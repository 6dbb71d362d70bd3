"""Capture, the client's side: read what the plugin wrote for one request, and believe none of it unchecked.

Legend: T tokens of the request, A captured layers, H target hidden size, r_k the residual stream that enters layer k.
A dump is one or several files `<rid>.<start>.safetensors` (one for each prefill chunk) that follow one another.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eagle3lib import shards
from eagle3lib.errors import Eagle3Error

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
RID = re.compile(r"([0-9a-f]{8,64})-([A-Za-z0-9_-]{1,120})")
AGAIN = re.compile(r"-retry\d+$")  # what the client adds to the id when it repeats a request
WAIT_S = 60.0  # for a file after the server's reply; the writers lag behind by a few batches at most
POLL_S = 0.002
LOOK_EVERY = 200  # polls
SLICE = 2**17  # values of which norms are taken at a time


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
    hidden_TSH = torch.empty(len(input_ids), len(handshake["layers"]) + 1, handshake["hidden_size"], dtype=DTYPES[handshake["dtype"]])
    read_into(byte_view(hidden_TSH), dump_dir, rid, np.asarray(input_ids, np.int64), handshake, timeout_s=timeout_s, look=look)
    for _sample, why in sick_rows(hidden_TSH, row_norms(hidden_TSH), np.zeros(1, np.int64), handshake["layers"]).items():
        raise Eagle3Error(f"dump of request {rid}: {why}")
    return hidden_TSH


def byte_view(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory: uint8 [bytes]."""
    return tensor.view(torch.uint8).view(-1).numpy()


def read_into(out: np.ndarray, dump_dir: Path, rid: str, ids_T: np.ndarray, handshake: dict[str, Any], *, timeout_s: float | None = None,
              look: Callable[[], None] = lambda: None) -> None:
    """Read the dump of request `rid` into the bytes `out`, copied once. Everything of read_dump but the look at the values."""
    if not RID.fullmatch(rid):
        raise Eagle3Error(f"dump of request {rid!r}: this is no request id of ours, so no dump belongs to it.")
    rows, deadline = 0, time.monotonic() + (WAIT_S if timeout_s is None else timeout_s)
    each = len(out) // len(ids_T)
    while rows < len(ids_T):
        descriptor, name = _await_chunk(dump_dir, rid, rows, len(ids_T), deadline, look)
        try:
            rows += _read_chunk(descriptor, name, rid, rows, ids_T, out[rows * each :], handshake)
        finally:
            os.close(descriptor)


def _read_chunk(descriptor: int, name: str, rid: str, start: int, ids_T: np.ndarray, out: np.ndarray, handshake: dict[str, Any]) -> int:
    """One file's rows into `out`; returns how many. safetensors' own reader would map, copy and wrap: three times as slow for short prompts."""
    try:
        header, data = _read_header(descriptor)
        hidden, ids, meta = header.pop("hidden"), header.pop("input_ids"), header.pop("__metadata__", {})
        count = ids["shape"][0]
        _require_shape(name, rid, start, hidden, count, meta, handshake)
        found = np.empty(count, np.int64)
        begin, end = ids["data_offsets"]
        if ids["dtype"] != "I64" or end - begin != found.nbytes:
            raise ValueError(f"token ids of type {ids['dtype']} in {end - begin} bytes")
        shards.read_all(descriptor, found, data + begin)
        _require_tokens(rid, start, found, ids_T)
        begin, end = hidden["data_offsets"]
        shards.read_all(descriptor, out[: end - begin], data + begin)
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError, MemoryError, OverflowError, RecursionError) as error:
        raise Eagle3Error(f"dump of request {rid}: {name} cannot be read ({error}). Extract this row again.") from None
    return int(count)


def _read_header(descriptor: int) -> tuple[dict[str, Any], int]:
    """(header, where the data begin) of a safetensors file; ValueError when the file is not as long as its header says."""
    head = os.pread(descriptor, 2048, 0)
    length, size = int.from_bytes(head[:8], "little"), os.fstat(descriptor).st_size
    if not 0 < length < 2**20:
        raise ValueError(f"a header of {length} bytes")
    if length > len(head) - 8:
        head += os.pread(descriptor, length + 8 - len(head), len(head))
    header = json.loads(head[8 : 8 + length])
    ends = [part["data_offsets"][1] for name, part in header.items() if name != "__metadata__"]
    if 8 + length + max(ends) != size:
        raise ValueError(f"{size} bytes, {8 + length + max(ends)} were announced")
    return header, 8 + length


def delete_dump(dump_dir: Path, rid: str) -> None:
    """Delete all files of one request. Tensors already read stay valid."""
    delete_dumps(dump_dir, [rid])


def delete_dumps(dump_dir: Path, rids: Sequence[str]) -> None:
    """Delete all files of these requests and of their repetitions, with one look at the folder. It may be gone with its server."""
    ours = {rid for rid in rids if RID.fullmatch(rid)}
    try:
        with os.scandir(dump_dir) as entries:
            names = [entry.name for entry in entries]
    except FileNotFoundError:
        return
    for name in names:
        if (stem := name.split(".")[0]) in ours or AGAIN.sub("", stem) in ours:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{dump_dir}/{name}")


def read_handshakes(dump_dir: Path) -> list[dict]:
    """What each writing rank said about itself; Eagle3Error when one of them refused to capture, ValueError when it is no JSON object."""
    handshakes = [json.loads(path.read_text()) for path in sorted(Path(dump_dir).glob("handshake-*.json"))]
    for handshake in handshakes:
        if not isinstance(handshake, dict):
            raise ValueError(f"a {type(handshake).__name__} in place of an object")
        if "error" in handshake:
            raise Eagle3Error(f"capture refused by the plugin inside the server: {handshake['error']}")
    return handshakes


def _await_chunk(dump_dir: Path, rid: str, start: int, total: int, deadline: float, look: Callable[[], None]) -> tuple[int, str]:
    """(descriptor, name) of the file whose rows begin at `start`, once it is there. A mark of failure or the deadline ends the wait."""
    name = f"{rid}.{start}.safetensors"
    for turn in itertools.count():
        try:
            return os.open(f"{dump_dir}/{name}", os.O_RDONLY), name
        except FileNotFoundError:
            pass
        if (failed := Path(f"{dump_dir}/{rid}.{start}.failed")).exists():
            why = failed.read_text() or "disk full?"
            raise Eagle3Error(f"dump of request {rid}: the server could not write the rows from {start}: {why}. "
                              f"Make room in {dump_dir} or lower tokens_in_flight.")
        if time.monotonic() > deadline:
            there = sorted(p.name.removeprefix(f"{rid}.") for p in Path(dump_dir).glob(f"{rid}.*"))
            raise Eagle3Error(f"dump of request {rid}: rows {start} to {total - 1} of {total} are missing in {dump_dir} "
                              f"(files of this request: {there or 'none'}). Was a prefix taken from the cache, or the capture off?")
        if turn % LOOK_EVERY == LOOK_EVERY - 1:
            look()
        time.sleep(POLL_S)
    raise AssertionError("an endless loop has ended")


def _require(holds: bool, rid: str, found: str, wanted: str) -> None:
    if not holds:
        raise Eagle3Error(f"dump of request {rid}: {found}; {wanted}. Nothing of it was kept.")


def _require_shape(name: str, rid: str, start: int, hidden: dict[str, Any], count: int, meta: dict[str, str], handshake: dict[str, Any]) -> None:
    """The file is of this run, request, place and layers; one row of the right shape and dtype for each token, at least one."""
    layers = handshake["layers"]
    wanted = {"nonce": handshake["nonce"], "rid": rid, "start": str(start), "layers": ",".join(map(str, layers))}
    _require(meta == wanted, rid, f"{name} says {meta}", f"expected {wanted}")
    shape, dtype = [count, len(layers) + 1, handshake["hidden_size"]], handshake["dtype"]
    code, width = shards.SAFETENSORS[dtype]
    begin, end = hidden["data_offsets"]
    right = hidden["shape"] == shape and count > 0 and hidden["dtype"] == code and end - begin == math.prod(shape) * width
    _require(right, rid, f"{name} holds {hidden['shape']} {hidden['dtype']} for {count} tokens", f"expected {shape} {dtype} ({code})")


def _require_tokens(rid: str, start: int, found: np.ndarray, sent: np.ndarray) -> None:
    wanted = sent[start : start + len(found)]
    if np.array_equal(found, wanted):
        return
    at = next((i for i, (a, b) in enumerate(zip(found, wanted, strict=False)) if a != b), len(wanted))
    tokens = [ids[at] if at < len(ids) else "no token" for ids in (found, wanted)]
    _require(False, rid, f"row {start + at} belongs to {tokens[0]}", f"{tokens[1]} was sent there: the states are another request's")


# the values, of many dumps at once -----------------------------------------------------------------------------------


def row_norms(hidden_RSH: torch.Tensor) -> np.ndarray:
    """float32 [R, S]. Not finite where a row is not."""
    rows, streams, hidden = hidden_RSH.shape
    step = max(1, SLICE // (streams * hidden))  # what stays in the cache goes through five times as fast
    scratch, norms_RS = torch.empty(step, streams, hidden), torch.empty(rows, streams)
    for start in range(0, rows, step):
        part = scratch[: min(step, rows - start)].copy_(hidden_RSH[start : start + step])
        torch.linalg.vector_norm(part, dim=-1, out=norms_RS[start : start + step])
    return norms_RS.numpy()


def sick_rows(hidden_RSH: torch.Tensor, norms_RS: np.ndarray, starts_N: np.ndarray, layers: Sequence[int]) -> dict[int, str]:
    """Number of the dump -> what is wrong with its first sick row: not finite, or constant (all zeros is constant).

    starts_N: the row at which each dump begins. bf16 squares overflow from 1e19 on: such a state counts as infinite."""
    infinite_RS = ~np.isfinite(norms_RS)
    first_RS, middle = hidden_RSH[..., 0], hidden_RSH.shape[-1] // 2
    constant_RS = ((first_RS == hidden_RSH[..., -1]) & (first_RS == hidden_RSH[..., middle])).numpy()  # seldom by chance: then the whole row
    for row, stream in np.argwhere(constant_RS):
        constant_RS[row, stream] = bool((hidden_RSH[row, stream] == hidden_RSH[row, stream, 0]).all())
    found: dict[int, str] = {}
    for what, bad_RS in (("NaN or infinite values", infinite_RS), ("one single value throughout", constant_RS)):
        for row, stream in np.argwhere(bad_RS):
            n = int(np.searchsorted(starts_N, row, side="right")) - 1
            name = f"r_{layers[stream]}" if stream < len(layers) else "the last hidden state"
            found.setdefault(n, f"{name} at row {row - starts_N[n]} has {what}. Nothing of it was kept.")
    return found
