"""The plugin, sabotaged: a copy of this file stands in the plugin's place. The fault of the moment is read from a file.

It wraps the real plugin (named by EAGLE3_TEST_PLUGIN), so what is not sabotaged is the real thing. Without a fault it changes nothing.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import torch

_spec = importlib.util.spec_from_file_location("real_capture", os.environ["EAGLE3_TEST_PLUGIN"])
real = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(real)
STATES: dict[str, torch.Tensor] = {}  # what the model's own layers were given in this forward pass


def fault() -> str:
    path = Path(os.environ["EAGLE3_TEST_FAULT"])
    return path.read_text() if path.exists() else ""


def note(name: str):
    """A forward pre-hook that keeps hidden state + residual, the stream that enters the module."""
    def hook(_module, args):
        tensors = [a for a in args if isinstance(a, torch.Tensor) and a.is_floating_point()]
        STATES[name] = sum(t.clone() for t in tensors)
    return hook


class Sabotaged(real.Capture):
    def after_init(self, result, runner):
        super().after_init(result, runner)
        model = self.model = runner.model.model
        self.asked = list(self.layers)
        model.layers[-1].register_forward_pre_hook(note("r_L-1"))
        model.norm.register_forward_pre_hook(note("r_L"))

    def around_logits(self, original, *args, **kwargs):
        result = super().around_logits(original, *args, **kwargs)
        shift = 1 if fault() == "layers off by one" else 0  # for the next forward pass: the model itself captures other layers
        self.model.layers_to_capture = [k + shift for k in self.asked]
        return result

    def _spans(self, batch):
        spans = super()._spans(batch)
        if fault() == "last chunk lost":
            spans = [span for span in spans if span[1] == 0]
        if fault() == "first rows lost":
            spans = [(rid, start + 4, row + 4, count - 4) for rid, start, row, count in spans]
        return [] if fault() == "too late" else spans

    def _copy(self, buffer, input_ids, hidden_NH, aux, total):
        which = fault()
        if which == "one layer early":
            hidden_NH = self.model.norm(STATES["r_L-1"])
        if which == "norm never":
            hidden_NH = STATES["r_L"]
        if which == "norm twice":
            hidden_NH = self.model.norm(hidden_NH.clone())
        if which == "streams swapped":
            aux = aux[::-1]
        rows, ids, *rest = super()._copy(buffer, input_ids, hidden_NH, aux, total)
        return (*alter(rows, ids, which), *rest)

    def _write_batch(self, spans, rows, ids, *rest):
        if fault() == "rows swapped in a batch" and len(spans) > 1:
            a, b = spans[-2:]
            n = min(a[3], b[3])
            rows[[*range(a[2], a[2] + n), *range(b[2], b[2] + n)]] = rows[[*range(b[2], b[2] + n), *range(a[2], a[2] + n)]]
        super()._write_batch(spans, rows, ids, *rest)

    def _write(self, span, rows, ids):
        rid, start, first, count = span
        which, path = fault(), self.folder / f"{rid}.{start}.safetensors"
        if which == "disk full":
            raise OSError(28, "No space left on device")
        if which == "padded rows":
            rows, ids = (torch.cat([t[first : first + count], t[first : first + 3]]) for t in (rows, ids))
            span = (rid, start, 0, count + 3)
        if which == "stale dump":
            self.nonce, mine = "fedcba9876543210", self.nonce
            super()._write(span, rows, ids)
            self.nonce = mine
            return
        super()._write(span, rows, ids)
        if which == "two writers of one file":
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def alter(rows, ids, which):
    """rows [tokens, A+1, H], ids [tokens] of the whole batch, with one thing wrong."""
    if which == "rows shifted":
        rows = rows.roll(1, 0)
    if which == "one wrong row":
        rows[min(5, len(rows) - 1), -1] = rows[min(4, len(rows) - 1), -1]
    if which == "tokens of another request":
        ids = ids.flip(0)
    if which == "zeros":
        rows[:, 1] = 0
    if which == "NaN":
        rows[min(3, len(rows) - 1), -1, 7] = float("nan")
    return rows.half() if which == "cast to float16" else rows, ids


real.Capture = Sabotaged
if os.environ.get("EAGLE3_TEST_FAULT_AT_START") == "newer SGLang":
    real.BATCH_FIELDS = (*real.BATCH_FIELDS, "extend_everything")
if os.environ.get("EAGLE3_TEST_FAULT_AT_START") == "prefix cache on":
    real.REQUIRED_ARGS.pop("disable_radix_cache")


def register():
    if os.environ.get("EAGLE3_TEST_FAULT_AT_START") == "plugin raises":
        raise ImportError("cannot import name 'x' from 'sglang'")
    real.register()
