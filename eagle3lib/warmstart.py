"""Warm start: an EAGLE-3 draft folder, ours or anybody's, as a draft to train on.

The folder must pass draftcheck without an error, fit the target, and read the streams that the store holds. Its draft
vocabulary, sizes, rope and options are taken over: they belong to its weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle3lib import draftcheck, layouts, runs, targets
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.vocab import DraftVocab, of_draft


def read(folder: Path, target: Path) -> Draft:
    """The draft of a folder in SGLang's or vLLM's layout, in float32, with the embeddings that it would be served with.

    Prints what draftcheck warns of. Raises Eagle3Error that names every tensor and field that is wrong.
    """
    for problem in draftcheck.require(folder, target):
        print(f"{folder}: {problem}", flush=True)
    config = draftcheck.read_config(folder)
    tensors = draftcheck.load_tensors(folder)
    d2t, t2d = _vocabulary(config, tensors)
    cfg = config_of(config, targets.text_config(target).num_hidden_layers, own=draftcheck.EMBED in tensors)
    draft = Draft(cfg, d2t, t2d)
    if not cfg.own_embeddings:
        tensors.pop(draftcheck.EMBED, None)  # SGLang would not look at them either
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(targets.head_weights(target)[1])
    draft.load({name: t for name, t in tensors.items() if name not in ("d2t", "t2d")})
    return draft


def folder(name: str) -> Path | None:
    """The draft folder of that name; None for an empty name. Eagle3Error when there is none."""
    if not name:
        return None
    path = (runs.repo_root() / Path(name).expanduser()).resolve()
    if not path.is_dir():
        raise Eagle3Error(f"start_from {name}: no such folder. Give a draft folder (config.json, *.safetensors), or leave it empty")
    return path


def vocabulary(path: Path, target: Path, counts: Sequence[int] | np.ndarray) -> DraftVocab:
    """The draft vocabulary of a folder, and what it covers of the supervised tokens counted in `counts` [V]."""
    draft = read(path, target)
    return of_draft(draft.d2t, draft.t2d, counts)


def require_streams(draft: Draft, folder: Path, layers: Sequence[int]) -> None:
    """Raise unless the draft reads the residual streams `layers` that a store holds."""
    if list(draft.cfg.aux_layers) != list(layers):
        raise Eagle3Error(f"draft {folder} reads the residual streams {list(draft.cfg.aux_layers)}, the store holds {list(layers)}. Extract with "
                          "the layers of the draft, or start without it.")


def config_of(config: dict[str, Any], target_layers: int, own: bool = False) -> DraftConfig:
    """Sizes of a checked draft folder. Missing fields get what SGLang takes; `own`: its file holds embeddings."""
    llama = LlamaConfig(**config)
    rope = dict(llama.rope_parameters or {})
    theta = float(str(rope.pop("rope_theta", None) or 10000.0))
    layout, width = layouts.of(config), config["hidden_size"]
    ids = layouts.ids_of(config)
    streams = [i + layout.shift for i in ids] if ids else targets.capture_layers(target_layers)
    target_width = config.get("target_hidden_size") or width
    return DraftConfig(
        hidden_size=width, intermediate_size=config["intermediate_size"], num_heads=config["num_attention_heads"],
        num_kv_heads=llama.num_key_value_heads or config["num_attention_heads"],
        head_dim=config.get("head_dim") or width // config["num_attention_heads"], vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"], target_hidden_size=target_width, aux_layers=tuple(streams),
        rms_norm_eps=llama.rms_norm_eps, rope_theta=theta, rope_scaling=None if rope.get("rope_type", "default") == "default" else rope,
        max_position_embeddings=llama.max_position_embeddings, num_layers=config["num_hidden_layers"],
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")), norm_output=bool(config.get("norm_output")),
        train_embeddings=own and (layout is layouts.VLLM or width != target_width),
    )  # fmt: skip


def _vocabulary(config: dict[str, Any], tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """d2t and t2d; a file without d2t has the full vocabulary (draftcheck has looked), one without t2d follows from d2t."""
    d2t = tensors.get("d2t", torch.zeros(config["draft_vocab_size"], dtype=torch.int64))
    t2d = torch.zeros(config["vocab_size"], dtype=torch.bool)
    t2d[d2t + torch.arange(len(d2t))] = True
    return d2t, t2d
