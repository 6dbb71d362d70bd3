"""SGLang plugin: writes the hidden states of prefilled prompts to files. The only code here that knows SGLang's insides.

It runs inside the server, possibly in an environment without the rest of this project, so it imports none of it.
SGLang finds it by its entry point (a folder on PYTHONPATH is enough) and calls `register` in every process.

    SGLANG_HS_DUMP_DIR      folder of the dumps; unset: this plugin changes nothing
    SGLANG_HS_NONCE         name of this server run; only request ids that start with "<nonce>-" are dumped
    SGLANG_HS_LAYERS        "2,15,27": streams r_k to capture, k = the layer that the residual stream enters
    SGLANG_HS_HIDDEN_SIZE   H, to be found in the model

Writes, each under another name first and then renamed:
    handshake-<rank>.json         what was asked and what the model says, or {"error": ...}; demanded by the client
    <rid>.<start>.safetensors     rows start.. of one request: hidden [n, A+1, H] in the model's dtype, input_ids int64 [n];
                                  stream 0..A-1 = r_k in the order asked, stream A = last hidden state after the final norm
    <rid>.<start>.failed          these rows could not be written, and why

SGLang only logs a plugin that raises and serves on without it: no handshake, no capture.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import logging
import os
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

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
    "enable_two_batch_overlap": False,
    "enable_dp_attention": False,  # each rank would hold other rows, padded
    "dp_size": 1,
    "pp_size": 1,  # the captured layers would live in several processes
    "attn_cp_size": 1,
}
WRITERS = 2  # threads that write
BATCHES_IN_FLIGHT = 4  # copies of whole batches that may wait for the writers; then the forward pass waits too


class Refused(Exception):
    """The capture cannot be right here; the message goes into the handshake."""


def register() -> None:
    """Entry point, called by SGLang in the launcher and in every scheduler process."""
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
        self.active = False
        self.layers: list[int] = []
        self.pool = ThreadPoolExecutor(WRITERS, thread_name_prefix="hs_dump")
        self.slots = threading.BoundedSemaphore(BATCHES_IN_FLIGHT)

    # ---- handshake, once in every scheduler process, when the model is loaded ----

    def after_init(self, _result: object, runner: object) -> None:
        rank = getattr(runner, "tp_rank", 0)
        try:
            hello = self._prepare(runner)
        except Exception as error:
            logger.exception("HS_DUMP rank %s refused: %s", rank, error)
            self._write_json(f"handshake-{rank}.json", {"nonce": self.nonce, "error": f"{type(error).__name__}: {error}"})
            return
        if rank != 0:  # every tensor-parallel rank holds the same full rows: one of them writes
            return
        self.active = True
        self._write_json(f"handshake-{rank}.json", hello)
        logger.info("HS_DUMP rank %s writes: layers %s (residual stream entering the layer), hidden size %s, dtype %s, nonce %s",
                    rank, hello["layers"], hello["hidden_size"], hello["dtype"], self.nonce)

    def _prepare(self, runner: object) -> dict:
        """Switch the capture on, read back what the model will capture, and describe it. Raises Refused."""
        import sglang
        import torch

        require_known_internals()
        require_arguments(runner.server_args)
        if not re.fullmatch(r"[0-9a-f]{8,64}", self.nonce):
            raise Refused(f"SGLANG_HS_NONCE is {self.nonce!r}, not 8 to 64 hex digits")
        asked = [int(k) for k in os.environ.get("SGLANG_HS_LAYERS", "").split(",")]
        self.layers = set_layers(runner.model, asked)
        self.hidden_size, wanted = runner.model_config.hidden_size, os.environ.get("SGLANG_HS_HIDDEN_SIZE")
        if str(self.hidden_size) != wanted:
            raise Refused(f"the model's hidden size is {self.hidden_size}, SGLANG_HS_HIDDEN_SIZE is {wanted}")
        return {"nonce": self.nonce, "pid": os.getpid(), "rank": runner.tp_rank, "tp_size": runner.tp_size, "layers": self.layers,
                "hidden_size": self.hidden_size, "dtype": str(runner.dtype).removeprefix("torch."), "sglang": sglang.__version__,
                "torch": torch.__version__, "python": sys.executable,
                "plugin_sha256": hashlib.sha256(Path(__file__).read_bytes()).hexdigest()}

    # ---- capture, in every forward pass ----

    def around_logits(self, original, processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states=None,
                      *args, **kwargs):
        if self.active:
            self._take(input_ids, hidden_states, logits_metadata, aux_hidden_states)
        return original(processor, input_ids, hidden_states, lm_head, logits_metadata, aux_hidden_states, *args, **kwargs)

    def _take(self, input_ids, hidden_NH, batch, aux) -> None:
        """Copy the rows of our requests out of this batch and hand them to the writers."""
        mode = batch.forward_mode
        if not mode.is_extend() or mode.is_target_verify() or not getattr(batch, "rids", None):
            return
        spans = self._spans(batch)
        if not spans:
            return
        try:
            rows, ids, ready = self._copy(input_ids, hidden_NH, aux, sum(batch.extend_seq_lens_cpu))
        except Exception as error:
            for rid, start, _first, _count in spans:
                self._fail(rid, start, error)
            return
        self.slots.acquire()
        self.pool.submit(self._write_batch, spans, rows, ids, ready)

    def _spans(self, batch) -> list[tuple[str, int, int, int]]:
        """(rid, first position in the prompt, first row in the batch, rows) of each request of ours. The batch is the
        concatenation of its requests; padding, if any, comes behind the last one."""
        spans, row = [], 0
        for rid, start, count in zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu, strict=True):
            if self.ours.fullmatch(str(rid)):
                spans.append((rid, int(start), row, int(count)))
            row += count
        return spans

    def _copy(self, input_ids, hidden_NH, aux, total: int):
        """(hidden [total, A+1, H], ids [total]) on the host, and a function that waits until they have arrived."""
        import torch

        if aux is None or len(aux) != len(self.layers):
            raise Refused(f"the model handed over {0 if aux is None else len(aux)} aux hidden states, {len(self.layers)} were asked for")
        for part in (*aux, hidden_NH):
            if part.shape[0] < total or part.shape[1] != self.hidden_size:
                raise Refused(f"hidden states of shape {tuple(part.shape)}, expected at least [{total}, {self.hidden_size}]")
        rows = torch.stack([part[:total] for part in (*aux, hidden_NH)], dim=1)
        ids = input_ids[:total].to(torch.int64, copy=True)  # the server reuses this buffer for the next batch
        if rows.device.type != "cuda":
            return rows, ids, lambda: None
        on_host = [torch.empty(t.shape, dtype=t.dtype, pin_memory=True).copy_(t, non_blocking=True) for t in (rows, ids)]
        arrived = torch.cuda.Event()
        arrived.record()
        return *on_host, arrived.synchronize

    def _write_batch(self, spans, rows, ids, ready) -> None:
        try:
            ready()
            for rid, start, first, count in spans:
                self._write(rid, start, rows[first : first + count], ids[first : first + count])
        except Exception as error:
            for rid, start, _first, _count in spans:
                self._fail(rid, start, error)
        finally:
            self.slots.release()

    def _write(self, rid: str, start: int, rows, ids) -> None:
        from safetensors.torch import save_file

        final = self.folder / f"{rid}.{start}.safetensors"
        partial = self.folder / f".{final.name}.part"
        try:
            save_file({"hidden": rows, "input_ids": ids}, partial,
                      {"nonce": self.nonce, "rid": rid, "start": str(start), "layers": ",".join(map(str, self.layers))})
            os.rename(partial, final)
        except Exception as error:
            partial.unlink(missing_ok=True)
            self._fail(rid, start, error)

    def _fail(self, rid: str, start: int, error: Exception) -> None:
        """Leave a mark that the client finds in place of the rows. An empty file still fits on a full disk."""
        logger.error("HS_DUMP failed for %s from row %s: %s: %s", rid, start, type(error).__name__, error)
        mark = self.folder / f"{rid}.{start}.failed"
        try:
            mark.touch()
            mark.write_text(f"{type(error).__name__}: {error}")
        except OSError:
            logger.exception("HS_DUMP cannot even write %s", mark)

    def _write_json(self, name: str, content: dict) -> None:
        partial = self.folder / f".{name}.part"
        partial.write_text(json.dumps(content))
        os.rename(partial, self.folder / name)


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
        if not hasattr(args, name):
            raise Refused(f"this SGLang has no argument {name}, so it cannot be known to be {wanted}")
        if getattr(args, name) != wanted:
            raise Refused(f"{name} is {getattr(args, name)!r}; capture works with {wanted!r} only")


def set_layers(model: object, asked: list[int]) -> list[int]:
    """Make the model capture r_k for k in asked; return what it says it captures. Raises Refused when that differs.

    Most models take ids of layer *outputs* and add 1. deepseek_v2 adds 1 only when the first id is 1, so the second
    try hands over the indices as they are. What counts is what the model says afterwards.
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
