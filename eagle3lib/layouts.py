"""Layouts: one draft, two engines. What each calls the tensors, the captured layers, and what it cannot serve.

    sglang   midlayer.*, layers.1.hidden_norm, eagle_config.eagle_aux_hidden_state_layer_ids = layer outputs (k - 1)
    vllm     layers.0.*, layers.1.input_layernorm, top-level eagle_aux_hidden_state_layer_ids = layer inputs (k)

Read in SGLang 0.5.14 (`models/llama_eagle3.py`, `models/llama.py: set_embed`) and vLLM of early 2026 (`models/llama_eagle3.py`,
`gpu_model_runner: _get_eagle3_aux_layers_from_config`). k is our residual index: r_k enters layer k.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from eagle3lib.draft import DraftConfig
from eagle3lib.errors import ParamError

AUX_IDS = "eagle_aux_hidden_state_layer_ids"
DEEP_NORM = re.compile(r"^layers\.([1-9]\d*)\.(hidden_norm|input_layernorm)\.")


class Layout(NamedTuple):
    name: str
    shift: int  # the engine's id of r_k is k - shift
    first: str  # name of the first layer
    deep_norm: str  # the norm that a layer behind the first reads the stream through
    meaning: str


SGLANG = Layout("sglang", 1, "midlayer.", "hidden_norm",
                "ids name layer outputs: SGLang adds 1 to get the residual streams r_k that enter layer k, listed in residual_streams")
VLLM = Layout("vllm", 0, "layers.0.", "input_layernorm",
              "ids name layer inputs: vLLM's id k is the residual stream r_k that enters layer k, as in residual_streams")
LAYOUTS = {layout.name: layout for layout in (SGLANG, VLLM)}


def get(name: str) -> Layout:
    if name not in LAYOUTS:
        raise ParamError(f"unknown layout {name!r} of a draft folder; one of {', '.join(LAYOUTS)}")
    return LAYOUTS[name]


def of(config: Mapping[str, Any]) -> Layout:
    """The layout that a config.json is written in: vLLM reads the layer ids at its top level, SGLang in eagle_config."""
    return VLLM if AUX_IDS in config else SGLANG


def ids_of(config: Mapping[str, Any]) -> Any:
    """The engine's ids of the captured layers as the config gives them; None when it does not."""
    eagle = config.get("eagle_config")
    return config[AUX_IDS] if AUX_IDS in config else eagle.get(AUX_IDS) if isinstance(eagle, dict) else None


def file_name(name: str, layout: Layout) -> str:
    """Our name of a tensor -> the engine's."""
    name = DEEP_NORM.sub(rf"layers.\1.{layout.deep_norm}.", name)
    return layout.first + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def our_name(name: str, layout: Layout = SGLANG) -> str:
    """The engine's name, or another spelling that it takes -> ours: a leading `model.`, `layers.0.` for `midlayer.`, old fc norms."""
    name = name.removeprefix("model.")
    for n, place in enumerate(("low", "mid", "high")):
        name = name.replace(f"aux_norm_{place}", f"fc_norm.{n}")
    if (found := DEEP_NORM.match(name)) and found[2] == layout.deep_norm:
        name = DEEP_NORM.sub(r"layers.\1.hidden_norm.", name)
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def refusal(cfg: DraftConfig, layout: Layout) -> str:
    """Why the engine cannot serve such a draft as it was trained; empty when it can."""
    if layout is SGLANG and cfg.train_embeddings and cfg.hidden_size == cfg.target_hidden_size:
        return ("it has trained embeddings and the target's width: SGLang 0.5.14 puts the target's embeddings in their place. Train with "
                "train_embeddings: false, or with another draft_hidden_size, whose embeddings SGLang takes from the file; vLLM serves it as it is")
    if layout is VLLM and len(cfg.aux_layers) != 3:
        return f"it reads {len(cfg.aux_layers)} captured streams: vLLM's EAGLE-3 model is built for 3"
    return ""
