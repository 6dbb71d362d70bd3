"""The EAGLE-3 draft: one Llama-style layer (or more) between the target's hidden states and a reduced vocabulary.

Shapes: B sequences, N rows, A captured layers, H draft hidden size, Ht target hidden size, V target vocabulary,
D draft vocabulary, Q query heads, G key/value heads, C head size, S keys.

Row i holds what is known once the target has written token i+1: g_i = fuse(aux_i) and embed(x_{i+1}). The layer
turns it into `out_i`; logits(out_i) is the guess for token i+2. To draft further, the layer is fed its own `out`
(before the final norm) in place of g and the guessed token in place of x, one position later:

    out, past = draft.layer(draft.embed(x[:, 1:]), draft.fuse(aux[:, :-1]), positions)       # prefill, rows 0..n-1
    token = draft.to_target(draft.logits(out[:, -1:]).argmax(-1))                            # first guess
    for k in 1..: out, past_k = draft.layer(draft.embed(token), out[:, -1:], positions[:, -1:] + k, past_k)

`past` is never changed in place: a chain extends its own copy, and the rows of guesses are forgotten by simply
going back to the `past` of the true rows. Parameter names are those of the file SGLang loads
(`models/llama_eagle3.py`); the embedding belongs to the target, is frozen and is not exported, unless the draft trains its own
or is of another width than the target.

Options with SGLang's meaning: `fc_norm` norms each captured stream before `fc`; `norm_output` hands the normed output to the
next step (else the output before the final norm); layers behind the first read the stream alone, through their `hidden_norm`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eagle3lib.errors import Eagle3Error
from eagle3lib.flash import Rotate

KeyValue = tuple[Tensor, Tensor]  # keys and values, each [B, G, S, C], keys already rotated


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft. `aux_layers` are residual indices k (r_k enters layer k), not engine ids."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: dict[str, Any] | None = None
    max_position_embeddings: int = 2048
    num_layers: int = 1
    fc_norm: bool = False  # EAGLE-3.1: an RMSNorm for each captured stream before `fc`
    norm_output: bool = False  # EAGLE-3.1: the next step is fed the output behind the final norm
    train_embeddings: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "aux_layers", tuple(self.aux_layers))
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "num_layers"):
            if getattr(self, name) < 1:
                raise Eagle3Error(f"draft {name} is {getattr(self, name)}, must be at least 1")
        if self.head_dim % 2:
            raise Eagle3Error(f"draft head_dim is {self.head_dim}: the rotary embedding pairs its halves, so it must be even")
        if self.hidden_size == len(self.aux_layers) * self.target_hidden_size:
            raise Eagle3Error(
                f"draft hidden size {self.hidden_size} is the width of the {len(self.aux_layers)} captured streams together: SGLang tells "
                "its own output from captured states by their width and would skip `fc`. Choose another hidden size."
            )
        if self.num_heads % self.num_kv_heads:
            raise Eagle3Error(
                f"draft heads: {self.num_heads} query heads are no multiple of {self.num_kv_heads} key/value heads"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise Eagle3Error(
                f"draft vocabulary: {self.draft_vocab_size} tokens, must be between 1 and the target's "
                f"{self.vocab_size}"
            )

    @property
    def own_embeddings(self) -> bool:
        """The draft has embeddings of its own, which belong in its file; else it reads the target's."""
        return self.train_embeddings or self.hidden_size != self.target_hidden_size

    @classmethod
    def from_target(cls, config: Any, draft_vocab_size: int, aux_layers: list[int], **sizes: Any) -> DraftConfig:
        """Sizes of one of the target's own layers; `sizes` replaces any of them (needed for non-Llama targets).

        `config` is the target's text config from transformers. Rope base and scaling are read once, here, from
        `rope_parameters` (where transformers 5 keeps both), and used by training, export and serving alike.
        """
        rope = dict(getattr(config, "rope_parameters", None) or {})
        theta = float(rope.pop("rope_theta", None) or getattr(config, "rope_theta", None) or 10000.0)
        heads = config.num_attention_heads
        found: dict[str, Any] = {
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_heads": heads,
            "num_kv_heads": getattr(config, "num_key_value_heads", None) or heads,
            "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
            "vocab_size": config.vocab_size,
            "target_hidden_size": config.hidden_size,
            "rms_norm_eps": config.rms_norm_eps,
            "rope_theta": theta,
            "rope_scaling": None if rope.get("rope_type", "default") == "default" else rope,
            "max_position_embeddings": config.max_position_embeddings,
        }
        return cls(draft_vocab_size=draft_vocab_size, aux_layers=tuple(aux_layers), **{**found, **sizes})

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layers": list(self.aux_layers)}

    def llama(self) -> LlamaConfig:
        """The same sizes as a transformers config: source of the rotary frequencies and of the exported file."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_attention_heads=self.num_heads,
            num_key_value_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            num_hidden_layers=self.num_layers,
            vocab_size=self.vocab_size,
            rms_norm_eps=self.rms_norm_eps,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={"rope_type": "default", **(self.rope_scaling or {}), "rope_theta": self.rope_theta},
            tie_word_embeddings=False,
        )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Llama's rotary embedding of x [..., heads, C] by cos, sin [..., C]: halves are paired, not neighbours."""
    if x.is_cuda and x.dtype == torch.bfloat16 and x.dim() == 3:
        out: Tensor = Rotate.apply(x, cos.float(), sin.float())
        return out
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos.unsqueeze(-2) + turned * sin.unsqueeze(-2)).to(x.dtype)


class Attention(nn.Module):
    """Projections of the draft's attention; in the first layer queries, keys and values read the 2H concatenation."""

    def __init__(self, cfg: DraftConfig, wide: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q_proj = nn.Linear(wide, cfg.num_heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(wide, cfg.num_kv_heads * cfg.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, cfg.num_kv_heads * cfg.head_dim, bias=False)
        self.o_proj = nn.Linear(cfg.num_heads * cfg.head_dim, cfg.hidden_size, bias=False)

    def queries(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """x [..., 2H] -> rotated queries [..., Q, C]."""
        return rotate(self.q_proj(x).unflatten(-1, (self.num_heads, self.head_dim)), cos, sin)

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> KeyValue:
        """x [..., 2H] -> rotated keys and values, each [..., G, C]."""
        shape = (self.num_kv_heads, self.head_dim)
        return rotate(self.k_proj(x).unflatten(-1, shape), cos, sin), self.v_proj(x).unflatten(-1, shape)


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, cfg: DraftConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.up_proj = nn.Linear(cfg.hidden_size, cfg.intermediate_size, bias=False)
        self.down_proj = nn.Linear(cfg.intermediate_size, cfg.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """A decoder layer: the first reads concat(norm(embed), norm(hidden)), the others norm(hidden); `hidden` is the residual."""

    def __init__(self, cfg: DraftConfig, first: bool = True) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps) if first else None
        self.hidden_norm = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.self_attn = Attention(cfg, 2 * cfg.hidden_size if first else cfg.hidden_size)
        self.mlp = Mlp(cfg)

    def mix(self, embeds: Tensor, hidden: Tensor) -> Tensor:
        """Two [..., H] -> the attention's input [..., 2H] ([..., H] behind the first layer)."""
        if self.input_layernorm is None:
            return self.hidden_norm(hidden)
        return torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual [..., H] and attention result [..., Q*C] -> the layer's output [..., H]."""
        hidden = hidden + self.self_attn.o_proj(attended)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class Draft(nn.Module):
    """See the module's docstring for how rows, tokens and positions line up."""

    d2t: Tensor
    t2d: Tensor
    feature_scale: Tensor

    def __init__(self, cfg: DraftConfig, d2t: Tensor, t2d: Tensor) -> None:
        """`d2t` int64 [D]: offset from draft id to target id (target id = j + d2t[j]); `t2d` bool [V]."""
        super().__init__()
        check_vocab(cfg, d2t, t2d)
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.embed_tokens.requires_grad_(cfg.train_embeddings)
        wide = len(cfg.aux_layers) * cfg.target_hidden_size
        self.fc = nn.Linear(wide, cfg.hidden_size, bias=False)
        self.register_buffer("feature_scale", torch.ones(wide), persistent=False)
        streams = len(cfg.aux_layers)
        self.fc_norm = nn.ModuleList(nn.RMSNorm(cfg.target_hidden_size, eps=cfg.rms_norm_eps) for _ in range(streams if cfg.fc_norm else 0))
        self.midlayer = Layer(cfg)
        self.layers = nn.ModuleDict({str(n): Layer(cfg, first=False) for n in range(1, cfg.num_layers)})
        self.norm = nn.RMSNorm(cfg.hidden_size, eps=cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.draft_vocab_size, bias=False)
        self.register_buffer("d2t", d2t.clone())
        self.register_buffer("t2d", t2d.clone())
        rotary = LlamaRotaryEmbedding(cfg.llama())
        self.inv_freq = rotary.inv_freq.float()  # no buffer: .to(bfloat16) must not round it
        self.rope_scale = float(rotary.attention_scaling)

    @property
    def stack(self) -> list[Layer]:
        """The decoder layers in order."""
        return [self.midlayer, *self.layers.values()]  # type: ignore[list-item]

    @property
    def target_ids(self) -> Tensor:
        """int64 [D]: the target id of every draft id."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, draft_ids: Tensor) -> Tensor:
        """Draft ids of any shape -> target ids."""
        return draft_ids + self.d2t[draft_ids]

    def embed(self, ids: Tensor) -> Tensor:
        """Target token ids [...] -> [..., H]."""
        return self.embed_tokens(ids)

    def fuse(self, aux: Tensor) -> Tensor:
        """Captured states, concatenated in the order of `aux_layers`, [..., A*Ht] -> g [..., H]."""
        aux = aux / self.feature_scale
        if len(self.fc_norm):
            parts = aux.split(self.cfg.target_hidden_size, dim=-1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return self.fc(aux)

    def hand_on(self, hidden: Tensor) -> Tensor:
        """The last layer's stream [..., H] -> `out` [..., H]: what the next step is fed, and what `logits` wants."""
        return self.norm(hidden) if self.cfg.norm_output else hidden

    def normed(self, out: Tensor) -> Tensor:
        """`out` [..., H] -> what the head reads [..., H]."""
        return out if self.cfg.norm_output else self.norm(out)

    def logits(self, out: Tensor) -> Tensor:
        """`out` [..., H] -> logits over the draft vocabulary [..., D]."""
        return self.lm_head(self.normed(out))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [...] -> cos, sin [..., C], always computed in float32 (as engines do)."""
        self.inv_freq = self.inv_freq.to(positions.device)
        angles = positions.unsqueeze(-1).float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        dtype = self.fc.weight.dtype
        return (angles.cos() * self.rope_scale).to(dtype), (angles.sin() * self.rope_scale).to(dtype)

    def layer(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, past: KeyValue | None = None, mask: Tensor | None = None
    ) -> tuple[Tensor, KeyValue]:
        """Serve rows one after the other, as an engine does: embeds, hidden [B, N, H], positions [B, N].

        Returns out [B, N, H] and `past` with the N new rows appended (a new pair; the given one stays as it was; several layers'
        keys lie behind each other in the second dimension). Each row sees everything in `past` and the new rows up to itself;
        `mask` bool [B, N, S + N] narrows that.
        """
        rope, stack = self.rope(positions), self.stack
        olds = [None] * len(stack) if past is None else zip(*(t.chunk(len(stack), dim=1) for t in past), strict=True)
        kept: list[KeyValue] = []
        for layer, old in zip(stack, olds, strict=True):
            x = layer.mix(embeds, hidden)
            q = layer.self_attn.queries(x, *rope).transpose(1, 2)
            k, v = (t.transpose(1, 2) for t in layer.self_attn.keys_values(x, *rope))
            if old is not None:
                k, v = torch.cat((old[0], k), dim=2), torch.cat((old[1], v), dim=2)
            n, s = q.shape[2], k.shape[2]
            seen = torch.ones(n, s, dtype=torch.bool, device=q.device).tril(s - n)
            seen = seen if mask is None else (seen & mask).unsqueeze(1)
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
            hidden = layer.finish(hidden, attended.transpose(1, 2).flatten(2))
            kept.append((k, v))
        keys, values = (torch.cat(t, dim=1) if len(kept) > 1 else t[0] for t in zip(*kept, strict=True))
        return self.hand_on(hidden), (keys, values)

    @torch.no_grad()
    def scale_features(self, scale: Tensor) -> None:
        """Divide the captured states by `scale` [A*Ht] before `fc`, which keeps its weights: they now mean scaled states.

        Training only: raw streams are large and unequal, and one learning rate suits no such weights. `exported` and
        `load` take the scale out again and in again; it must hold powers of two, so that no weight changes by a bit.
        """
        if len(self.fc_norm):
            raise Eagle3Error("fc_norm brings every stream to unit size itself; scaling before it would only shift its epsilon")
        if not torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5)):
            raise Eagle3Error("the scale of the features must hold powers of two; others would round the exported weights")
        self.feature_scale.copy_(scale)

    def exported(self) -> dict[str, Tensor]:
        """What belongs in a draft file: every trained tensor for unscaled states, d2t, t2d; not the target's embedding."""
        own = self.cfg.own_embeddings
        tensors = {name: t for name, t in self.state_dict().items() if own or not name.startswith("embed_tokens.")}
        return {**tensors, "fc.weight": tensors["fc.weight"] / self.feature_scale}

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take over tensors named as by `exported`; all of them, in these shapes (the caller has looked)."""
        for name, tensor in self.state_dict().items():
            if name in tensors:
                tensor.copy_(tensors[name])
        self.fc.weight.mul_(self.feature_scale)


def check_vocab(cfg: DraftConfig, d2t: Tensor, t2d: Tensor) -> None:
    """Raise unless `d2t` holds offsets of ascending target ids and `t2d` marks exactly those ids."""
    if d2t.shape != (cfg.draft_vocab_size,) or t2d.shape != (cfg.vocab_size,):
        raise Eagle3Error(
            f"draft vocabulary: d2t {list(d2t.shape)} and t2d {list(t2d.shape)}, expected "
            f"[{cfg.draft_vocab_size}] and [{cfg.vocab_size}]"
        )
    ids = d2t + torch.arange(len(d2t), device=d2t.device)
    if d2t.dtype != torch.int64 or not torch.equal(ids, t2d.nonzero().flatten()):
        raise Eagle3Error("draft vocabulary: d2t are not the offsets (target id - draft id) of the ids marked in t2d")
