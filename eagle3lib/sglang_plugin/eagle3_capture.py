"""SGLang plugin: writes the hidden states of prefilled prompts to files. The only code here that knows SGLang's insides.

It runs inside the server, possibly without the rest of this project, and imports none of it. SGLang finds it by its entry
point (a folder on PYTHONPATH is enough) and calls `register` in every process. From the environment, SGLANG_HS_...
    DUMP_DIR      folder of the dumps; unset: this plugin changes nothing
    NONCE         name of this server run; only request ids that start with "<nonce>-" are dumped
    LAYERS        "2,15,27": streams r_k to capture, k = the layer that the residual stream enters
    HIDDEN_SIZE   H, to be found in the model
    HIGH_WATER    bytes in the folder above which the next batch waits for the client; 0: never
Writes, each under another name first and then renamed:
    handshake-<rank>.json        what was asked and what the model says, or {"error": ...}; demanded by the client
    <rid>.<start>.safetensors    rows start.. of a request: input_ids int64 [n], hidden [n, A+1, H] in the model's dtype:
                                 r_k in the order asked, then the last hidden state after the final norm
    <rid>.<start>.failed         these rows could not be written, and why
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import os
import queue
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import safetensors.torch
import torch

logger = logging.getLogger("hs_dump")

RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner.init_aux_hidden_state_capture"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
LOGITS_PARAMETERS = ["self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"]
BATCH_FIELDS = ("forward_mode", "rids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu")
# What the server must be for a dump to be whole and right: argument -> the only value that will do.
REQUIRED_ARGS = {
    "disable_radix_cache": True,  # a prefix taken from the cache is never computed, so it has no rows to dump
    "disable_cuda_graph": True,  # a replayed graph runs no Python, so nothing would be written
    "enable_mixed_chunk": False,  # decode rows would sit among the prompt rows
    "speculative_algorithm": None,  # speculation takes the aux hidden states for itself
    "enable_dp_attention": False, "dp_size": 1, "attn_cp_size": 1, "enable_two_batch_overlap": False,  # each would hold other rows, padded
    "pp_size": 1,  # the captured layers would live in several processes
}
WRITERS, BATCHES_IN_FLIGHT = 2, 4  # threads that write; copies of whole batches that may wait for them before the forward pass waits too
PATIENCE_S = 30.0  # above the high-water mark, without a file fetched; then we go on, as the replies that free it may depend on us


class Refused(Exception):
    """The capture cannot be right here; the message goes into the handshake."""


def register() -> None:
    """Entry point, called by SGLang in the launcher and in every scheduler. It only logs what raises here: no handshake, no capture."""
    folder = os.environ.get("SGLANG_HS_DUMP_DIR")
    if not folder:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    capture = Capture(Path(folder))
    HookRegistry.register(RUNNER, capture.after_init, HookType.AFTER)
    HookRegistry.register(LOGITS, capture.around_logits, HookType.AROUND)


class Capture:
    def __init__(self, folder: Path):
        self.folder = folder
        self.nonce = os.environ.get("SGLANG_HS_NONCE", "")
        self.ours = re.compile(re.escape(self.nonce) + r"-[A-Za-z0-9_-]{1,120}")
        self.active, self.layers = False, list[int]()
        self.pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="hs_dump")
        self.high_water = int(os.environ.get("SGLANG_HS_HIGH_WATER") or 0)
        self.buffers: queue.SimpleQueue = queue.SimpleQueue()  # a ring: pinned memory for a batch each, made when first needed
        for _ in range(BATCHES_IN_FLIGHT):
            self.buffers.put(None)
        self.stream = None  # CUDA: copies run beside the forward pass

    def after_init(self, _result: object, runner: object) -> None:
        """The handshake: once in every scheduler process, when the model is loaded."""
        rank = getattr(runner, "tp_rank", 0)
        try:
            hello = self._prepare(runner)
        except Exception as error:
            logger.exception("HS_DUMP rank %s refused: %s", rank, error)
            hello = {"nonce": self.nonce, "error": f"{type(error).__name__}: {error}"}
        self.active = rank == 0 and "error" not in hello  # every tensor-parallel rank holds the same full rows: one of them writes
        if self.active:
            logger.info("HS_DUMP rank %s writes: layers %s (residual stream entering the layer), hidden size %s, dtype %s, nonce %s",
                        rank, hello["layers"], hello["hidden_size"], hello["dtype"], self.nonce)
        if self.active or "error" in hello:
            partial = self.folder / f".handshake-{rank}.part"
            partial.write_text(json.dumps(hello))
            os.rename(partial, self.folder / f"handshake-{rank}.json")

    def _prepare(self, runner: object) -> dict:
        """Switch the capture on, read back what the model will capture, and describe it. Raises Refused."""
        import sglang

        require_known_internals()
        require_arguments(runner.server_args)
        if not re.fullmatch(r"[0-9a-f]{8,64}", self.nonce):
            raise Refused(f"SGLANG_HS_NONCE is {self.nonce!r}, not 8 to 64 hex digits")
        asked = [int(k) for k in os.environ.get("SGLANG_HS_LAYERS", "").split(",")]
        self.layers = set_layers(runner.model, asked)
        self.hidden_size, wanted = runner.model_config.hidden_size, os.environ.get("SGLANG_HS_HIDDEN_SIZE")
        if str(self.hidden_size) != wanted:
            raise Refused(f"the model's hidden size is {self.hidden_size}, SGLANG_HS_HIDDEN_SIZE is {wanted}")
        about = {"nonce": self.nonce, "pid": os.getpid(), "rank": runner.tp_rank, "tp_size": runner.tp_size, "python": sys.executable,
                 "sglang": sglang.__version__, "torch": torch.__version__}
        return {**about, "layers": self.layers, "hidden_size": self.hidden_size, "dtype": str(runner.dtype).removeprefix("torch."),
                "plugin_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}

    def around_logits(self, original, processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None, *args, **kwargs):
        if self.active:
            self._take(input_ids, hidden_states, logits_metadata, aux_hidden_states)
        return original(processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs)

    def _take(self, input_ids, hidden_NH, batch, aux) -> None:
        """Copy the rows of our requests out of this batch and hand them to the writers."""
        mode = batch.forward_mode
        prefill = mode.is_extend() and not mode.is_target_verify() and getattr(batch, "rids", None)
        spans = self._spans(batch) if prefill else []
        if not spans:
            return
        self._await_room()
        buffer = self.buffers.get()
        try:
            rows, ids, buffer, arrived = self._copy(buffer, input_ids, hidden_NH, aux, sum(batch.extend_seq_lens_cpu))
        except Exception as error:
            self.buffers.put(buffer)
            self._fail(spans, error)
        else:
            self.pool.submit(self._write_batch, spans, rows, ids, buffer, arrived)

    def _await_room(self) -> None:
        """Back-pressure: what lies in the folder is the client's to fetch; a request waits, and is never lost or overwritten."""
        least, since, used = float("inf"), time.monotonic(), self.high_water + 1
        while used > self.high_water > 0 and time.monotonic() - since < PATIENCE_S:
            with contextlib.suppress(FileNotFoundError):  # fetched and deleted while we look
                used = sum(entry.stat().st_size for entry in os.scandir(self.folder))
            if used < least:
                least, since = used, time.monotonic()
            time.sleep(0.005 * (used > self.high_water))

    def _spans(self, batch) -> list[tuple[str, int, int, int]]:
        """(rid, first position in the prompt, first row in the batch, rows) of each request of ours; any padding is behind the last."""
        spans, row = [], 0
        for rid, start, count in zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True):
            if self.ours.fullmatch(str(rid)):
                spans.append((rid, int(start), row, int(count)))
            row += count
        return spans

    def _copy(self, buffer, input_ids, hidden_NH, aux, total: int):
        """(hidden [total, A+1, H], ids [total]) on the host, the ring's buffer, and an event that says when they have arrived."""
        if aux is None or len(aux) != len(self.layers):
            raise Refused(f"the model handed over {0 if aux is None else len(aux)} aux hidden states, {len(self.layers)} were asked for")
        for part in (*aux, hidden_NH):
            if part.shape[0] < total or part.shape[1] != self.hidden_size:
                raise Refused(f"hidden states of shape {tuple(part.shape)}, expected at least [{total}, {self.hidden_size}]")
        rows = torch.stack([part[:total] for part in (*aux, hidden_NH)], dim=1)  # copies: the server reuses its own at once
        ids = input_ids[:total].to(torch.int64, copy=True)
        return self._to_host(rows, ids, buffer) if rows.device.type == "cuda" else (rows, ids, buffer, None)

    def _to_host(self, rows, ids, buffer):
        """Start the copy into pinned memory on a stream of its own; the forward pass goes on meanwhile."""
        if buffer is None or buffer.numel() < rows.nbytes:
            buffer = torch.empty(rows.nbytes, dtype=torch.uint8, pin_memory=True)
        self.stream = self.stream or torch.cuda.Stream()
        self.stream.wait_stream(torch.cuda.current_stream())  # until the two are computed
        with torch.cuda.stream(self.stream):
            rows_host = buffer[: rows.nbytes].view(rows.dtype).view(rows.shape).copy_(rows, non_blocking=True)
            ids_host = torch.empty(ids.shape, dtype=ids.dtype, pin_memory=True).copy_(ids, non_blocking=True)
            arrived = torch.cuda.Event(blocking=True)
            arrived.record()
        rows.record_stream(self.stream)  # their memory is not given away before the copy is done
        ids.record_stream(self.stream)
        return rows_host, ids_host, buffer, arrived

    def _write_batch(self, spans, rows, ids, buffer, arrived) -> None:
        for span in spans:
            try:
                if arrived is not None:
                    arrived.synchronize()
                self._write(span, rows, ids)
            except Exception as error:
                self._fail([span], error)
        self.buffers.put(buffer)

    def _write(self, span, rows, ids) -> None:
        rid, start, first, count = span
        final, last = self.folder / f"{rid}.{start}.safetensors", first + count
        about = {"nonce": self.nonce, "rid": rid, "start": str(start), "layers": ",".join(map(str, self.layers))}
        safetensors.torch.save_file({"hidden": rows[first:last], "input_ids": ids[first:last]}, final.with_suffix(".part"), about)
        os.rename(final.with_suffix(".part"), final)

    def _fail(self, spans, error: Exception) -> None:
        """Leave marks that the client finds in place of the rows. An empty file still fits on a full disk."""
        for rid, start, _first, _count in spans:
            logger.error("HS_DUMP failed for %s from row %s: %s: %s", rid, start, type(error).__name__, error)
            with contextlib.suppress(OSError):
                mark = self.folder / f"{rid}.{start}.failed"
                mark.with_suffix(".part").unlink(missing_ok=True)
                mark.write_text(f"{type(error).__name__}: {error}")


def require_known_internals() -> None:
    """Refuse an SGLang whose hooked function or batch is not the one this code was written for, or a hook that did not take."""
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    found = list(inspect.signature(LogitsProcessor.forward).parameters)
    if found[: len(LOGITS_PARAMETERS)] != LOGITS_PARAMETERS:
        raise Refused(f"LogitsProcessor.forward takes {found}, this plugin knows {LOGITS_PARAMETERS}")
    if missing := [name for name in BATCH_FIELDS if name not in ForwardBatch.__dataclass_fields__]:
        raise Refused(f"ForwardBatch has no {', '.join(missing)}")
    if not hasattr(LogitsProcessor.forward, "__wrapped__"):
        raise Refused("the hook on LogitsProcessor.forward was not applied")


def require_arguments(args: object) -> None:
    for name, wanted in REQUIRED_ARGS.items():
        if (found := getattr(args, name, f"unknown (there is no argument {name} in this SGLang)")) != wanted:
            raise Refused(f"{name} is {found!r}; capture works with {wanted!r} only")
    prefill = getattr(getattr(args, "cuda_graph_config", None), "prefill", None)  # outranks disable_cuda_graph
    if prefill is not None and prefill.backend != "disabled":
        raise Refused(f"cuda_graph_config.prefill.backend is {prefill.backend}; capture works with 'disabled' only")


def set_layers(model: object, asked: list[int]) -> list[int]:
    """Make the model capture r_k for k in asked; return what it says it captures. Raises Refused when that differs.

    Most models take ids of layer *outputs* and add 1; deepseek_v2 only when the first id is 1, so the second try hands over k itself.
    """
    if asked != sorted(set(asked)):
        raise Refused(f"layers {asked} must ascend: models hand over the streams in the order of their layers")
    if not hasattr(model, "set_eagle3_layers_to_capture"):
        raise Refused(f"{type(model).__name__} has no set_eagle3_layers_to_capture: SGLang cannot capture from this model")
    for ids in ([k - 1 for k in asked], list(asked)):
        model.set_eagle3_layers_to_capture(ids)
        found = [list(m.layers_to_capture) for m in model.modules() if getattr(m, "layers_to_capture", None)]
        if found == [asked]:
            return asked
    raise Refused(f"asked for the residual streams that enter layers {asked}, the model would capture {found}")
