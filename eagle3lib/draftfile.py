"""A draft folder, read knowing only its file and its config: the witness that an export holds what was trained.

It shares no code with the trainer's draft: another rotary embedding (complex numbers), no cache, no batch. Format:
EAGLE-3 (arXiv 2503.01840) as SGLang 0.5.14 and vLLM read it (`models/llama_eagle3.py` of either): which of the two, the config says.

Legend: T rows, H draft hidden size, A captured layers, D draft vocabulary, V target vocabulary, C head size, K steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

ARCHITECTURE = "LlamaForCausalLMEagle3"
WEIGHTS = "model.safetensors"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class DraftFile:
    """Everything in float32. `embed_VH` is the target's embedding, for a draft whose file does not hold its own."""

    def __init__(self, folder: Path, embed_VH: Tensor):
        self.config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        self.tensors = load_file(Path(folder) / WEIGHTS)
        self.read: set[str] = set()
        vllm = "eagle_aux_hidden_state_layer_ids" in self.config  # SGLang's ids lie inside eagle_config
        self.first, self.deep_norm = ("layers.0", "input_layernorm") if vllm else ("midlayer", "hidden_norm")
        self.embed_VH = self.weight("embed_tokens.weight") if "embed_tokens.weight" in self.tensors else embed_VH.float()
        self.frequencies, self.scale = rope_frequencies(LlamaConfig(**self.config))

    def weight(self, name: str) -> Tensor:
        self.read.add(name)
        tensor = self.tensors[name]
        return tensor.float() if tensor.is_floating_point() else tensor

    @property
    def unread(self) -> list[str]:
        """Tensors of the file that no forward has asked for."""
        return sorted(self.tensors.keys() - self.read)

    @torch.no_grad()
    def chain(self, aux_TA: Tensor, tokens: list[int], steps: int) -> tuple[Tensor, list[int]]:
        """Draft behind true rows (aux [T, A*H], and the token after each): logits [K, D] and the K target ids they choose."""
        rows, hidden, logits, guesses = list(tokens), F.linear(self.features(aux_TA.float()), self.weight("fc.weight")), list[Tensor](), list[int]()
        ids = self.weight("d2t") + torch.arange(self.config["draft_vocab_size"])
        if not torch.equal(ids, self.weight("t2d").nonzero().flatten()):
            raise ValueError("d2t and t2d name different tokens")
        for _ in range(steps):
            stream = self.stack(torch.tensor(rows), hidden)
            normed = self.norm(stream, "norm")
            out = normed if self.config.get("norm_output") else stream
            logits.append(self.linear(normed[-1], "lm_head"))
            guesses.append(int(ids[logits[-1].argmax()]))
            rows, hidden = [*rows, guesses[-1]], torch.cat([hidden, out[-1:]])
        return torch.stack(logits), guesses

    def features(self, aux_TA: Tensor) -> Tensor:
        if not self.config.get("fc_norm"):
            return aux_TA
        return torch.cat([self.norm(part, f"fc_norm.{n}") for n, part in enumerate(aux_TA.split(self.config["target_hidden_size"], dim=-1))], dim=-1)

    def stack(self, tokens: Tensor, hidden: Tensor) -> Tensor:
        """Rows 0..T-1 in causal order: tokens [T], hidden [T, H] -> the last layer's stream [T, H], before the final norm."""
        embeds = self.norm(self.embed_VH[tokens], f"{self.first}.input_layernorm")
        hidden = self.layer(torch.cat([embeds, self.norm(hidden, f"{self.first}.hidden_norm")], dim=-1), hidden, self.first)
        for n in range(1, self.config["num_hidden_layers"]):
            hidden = self.layer(self.norm(hidden, f"layers.{n}.{self.deep_norm}"), hidden, f"layers.{n}")
        return hidden

    def layer(self, x: Tensor, hidden: Tensor, place: str) -> Tensor:
        """The attention's input x [T, H or 2H] and the residual [T, H] -> the layer's output [T, H]."""
        heads, groups, size = (self.config[n] for n in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q, k, v = (self.linear(x, f"{place}.self_attn.{p}_proj").unflatten(-1, (-1, size)).transpose(0, 1) for p in "qkv")
        q, k = self.turn(q), self.turn(k)
        k, v = (t.repeat_interleave(heads // groups, dim=0) for t in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
        hidden = hidden + self.linear((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), f"{place}.self_attn.o_proj")
        x = self.norm(hidden, f"{place}.post_attention_layernorm")
        gated = F.silu(self.linear(x, f"{place}.mlp.gate_proj")) * self.linear(x, f"{place}.mlp.up_proj")
        return hidden + self.linear(gated, f"{place}.mlp.down_proj")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.weight(f"{name}.weight"))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weight(f"{name}.weight")

    def turn(self, x: Tensor) -> Tensor:
        """[heads, T, C], row i by the angles i * frequency: the pair (x_j, x_{j+C/2}) is one complex number."""
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        z = torch.complex(*x.chunk(2, dim=-1)) * torch.polar(torch.full_like(angles, self.scale), angles)
        return torch.cat([z.real, z.imag], dim=-1)


def rope_frequencies(config: LlamaConfig) -> tuple[Tensor, float]:
    """Rotary frequencies [C/2] and the factor on the rotated values, from `rope_theta` and `rope_scaling` of the config."""
    rope, size = dict(config.rope_parameters or {}), int(config.head_dim or 0)
    kind = str(rope["rope_type"])
    if kind == "default":
        return torch.tensor(float(str(rope["rope_theta"])), dtype=torch.float64).pow(-torch.arange(0, size, 2) / size).float(), 1.0
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    return frequencies, float(scale)
