"""The target in float32 by transformers, whatever its size: what a dump is compared with.

A target that fits into memory is loaded whole. Of a larger one the weights stay on the disk, and each module's are read when
it computes; and only the first layers are run, as far as the first captured stream and its neighbour need them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

from eagle3lib import targets
from eagle3lib.errors import Eagle3Error

SHARE = 0.5  # of the free memory that weights may take


@contextmanager
def load(target: Path, first_layer: int, free: int | None = None) -> Iterator[tuple[torch.nn.Module, int]]:
    """(model, its layers). All layers when float32 weights fit into half of the free memory; else the first ones, read as they are
    needed, so that r_k is had for k up to first_layer + 1. free: bytes, for tests."""
    room = int((psutil.virtual_memory().available if free is None else free) * SHARE)
    depth = targets.text_config(target).num_hidden_layers
    if whole_bytes(target) <= room:
        yield targets.load_model(target), depth
        return
    few = min(depth, first_layer + 2)  # the stream behind the last layer run has passed the final norm, so one more
    print(f"parity: {whole_bytes(target) / 1e9:,.1f} GB of weights in float32, {room / 1e9:,.1f} GB of memory for them: "
          f"the first {few} of {depth} layers, read from the disk as they are needed")
    with tempfile.TemporaryDirectory() as scratch:
        yield _offloaded(target, few, room, scratch), few


def whole_bytes(target: Path) -> int:
    """Of the weights in float32; files of two bytes a value are taken for granted."""
    from safetensors import safe_open

    total = 0
    for file in target.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (it is no dictionary)
                count = 1
                for length in tensors.get_slice(name).get_shape():
                    count *= length
                total += 4 * count
    return total


def _offloaded(target: Path, layers: int, room: int, scratch: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    config.get_text_config().num_hidden_layers = layers
    chatter = logging.get_verbosity()
    logging.set_verbosity_error()  # it would list every weight of the layers that are left out
    try:
        model = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=torch.float32, trust_remote_code=False, device_map="auto",
                                                     max_memory={"cpu": max(room, 1)}, offload_folder=scratch)
    except (ValueError, OSError, ImportError, NotImplementedError) as error:
        raise Eagle3Error(f"parity: transformers cannot load {target} piece by piece ({str(error).splitlines()[0][:300]}). Run 03_verify on a "
                          "machine with more memory, or set parity_rows to 0: the engine's own log-probabilities then stand alone.") from None
    finally:
        logging.set_verbosity(chatter)
    if torch.device("meta") == model.get_input_embeddings().weight.device:
        raise Eagle3Error(f"parity: {room / 1e9:.2f} GB of memory do not hold even the embeddings of {target}. Run 03_verify on a machine with more.")
    return model.eval().requires_grad_(False)
