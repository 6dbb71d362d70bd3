"""Where training starts: a draft that already speaks the target's language.

The head's rows and the final norm are the target's own, so the draft's first guesses live in the right space. The
captured streams are brought to unit size: raw ones differ by orders of magnitude (SmolLM2: a median root-mean-square of
3, 6 and 23; token 0 a thousand), and one learning rate then overshoots for `fc` while it suits the rest. The branches
of the layer start small, so that the residual path carries the signal at first; and that signal is mostly the deepest
captured stream, which is the nearest to what the head reads (SmolLM2, 49,000 supervised tokens, two epochs: mean simulated
acceptance on MT-Bench, HumanEval and GSM8K 1.22, against 1.19 from a random mixture of the three).

A draft of another width than the target's sees the stream through the directions in which the head's rows differ most
(their principal axes), so that its first logits are the best that its width allows. Not measured against other starts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle3lib import checkpoint, layouts, targets, warmstart
from eagle3lib.batches import Samples
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.store import Store, compare

BRANCH = 0.1  # factor on the projections that write into the residual stream
DEEPEST, NOISE = 0.6, 0.3  # weight of the deepest stream, passed through as it is, and of a random mixture of all streams
SAMPLES = 64  # samples of the store that the scale of the features is read from
FINAL_NORM = ("model.norm.weight", "language_model.model.norm.weight", "model.language_model.norm.weight")


def require_target(store: Store, target: Path) -> None:
    """Raise when the store's fingerprint names another target than this folder."""
    known = store.manifest["fingerprint"].get("target")
    if isinstance(known, dict) and (lines := compare(known, targets.fingerprint(target))):
        raise Eagle3Error(f"store {store.path} was extracted with another target than {target}: {'; '.join(lines)}. Extract with this target.")


def start(
    store: Store, target: Path, d2t: Tensor, t2d: Tensor, seed: int, shape: Mapping[str, Any], start_from: Path | None, samples: np.ndarray
) -> tuple[Draft, dict[str, Any]]:
    """The draft to be trained, and what a state must remember of where it came from."""
    chosen = {name: value for name, value in shape.items() if value}
    cfg = config_of(store, target, t2d, len(d2t), chosen)
    if start_from is None and (why := layouts.refusal(cfg, layouts.SGLANG)):
        print(f"warning: this draft will not be exported for SGLang: {why}", flush=True)
    if start_from is None:
        return new_draft(cfg, d2t, t2d, target, store, samples.tolist(), seed), {}
    draft = warmstart.read(start_from, target)
    warmstart.require_streams(draft, start_from, store.manifest["layers"])
    if not torch.equal(draft.d2t, d2t):
        raise Eagle3Error(f"draft {start_from} has another draft vocabulary ({len(draft.d2t)} tokens) than the one given ({len(d2t)}); take its own")
    if wrong := [f"{n} is {v}, the draft's is {getattr(draft.cfg, n)}" for n, v in chosen.items() if getattr(draft.cfg, n) != v]:
        raise ParamError(f"start_from {start_from}: {'; '.join(wrong)}. A draft keeps its sizes; leave these parameters at their defaults")
    if not draft.cfg.fc_norm:
        scale = feature_scale(store, samples.tolist()[: SAMPLES]).repeat_interleave(draft.cfg.target_hidden_size)
        exported = {name: t.clone() for name, t in draft.exported().items()}
        draft.scale_features(scale)
        draft.load(exported)
    return draft, {"start_from": [checkpoint.checksum(file) for file in sorted(start_from.glob("*.safetensors"))]}


def config_of(store: Store, target: Path, t2d: Tensor, drafted: int, shape: Mapping[str, Any]) -> DraftConfig:
    """Sizes of the draft; Eagle3Error when store, vocabulary and target do not belong together."""
    config = targets.text_config(target)
    width = store.manifest["hidden_size"]
    if (width, len(t2d)) != (config.hidden_size, config.vocab_size):
        raise Eagle3Error(
            f"store {store.path} holds states of width {width} and the draft vocabulary is cut from {len(t2d)} tokens; target {target} "
            f"has width {config.hidden_size} and {config.vocab_size} tokens. Extract with this target."
        )
    return DraftConfig.from_target(config, drafted, store.manifest["layers"], **shape)


def new_draft(cfg: DraftConfig, d2t: Tensor, t2d: Tensor, target: Path, store: Samples, samples: Sequence[int], seed: int) -> Draft:
    """A draft ready to be trained. `target`: the model folder; `samples`: those of `store` that it may learn from."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        draft = Draft(cfg, d2t, t2d)
    _from_target(draft, target)
    if not cfg.fc_norm:
        draft.scale_features(feature_scale(store, samples[:SAMPLES]).repeat_interleave(cfg.target_hidden_size))
    return draft


@torch.no_grad()
def _from_target(draft: Draft, target: Path) -> None:
    head_VH, embed_VH = (t.float() for t in targets.head_weights(target))
    norm_H = targets.find_tensor(target, FINAL_NORM)
    norm_H = torch.ones(head_VH.shape[1]) if norm_H is None else norm_H.float()
    axes_Hh = torch.eye(len(norm_H))  # draft stream = target stream @ axes
    if draft.cfg.hidden_size != len(norm_H):
        head_VH, norm_H = head_VH * norm_H, torch.ones(draft.cfg.hidden_size)  # the norm's weights belong to the target's axes
        axes_Hh = principal_axes(head_VH, draft.cfg.hidden_size)
        head_VH, embed_VH = head_VH @ axes_Hh, embed_VH @ principal_axes(embed_VH, draft.cfg.hidden_size)
    draft.embed_tokens.weight.copy_(embed_VH)
    draft.lm_head.weight.copy_(head_VH[draft.target_ids])
    draft.norm.weight.copy_(norm_H)
    draft.fc.weight.mul_(3**0.5 * NOISE)  # torch's start shrinks inputs of unit size by the root
    draft.fc.weight[:, -len(axes_Hh) :] += DEEPEST * axes_Hh.T
    for layer in draft.stack:
        layer.self_attn.o_proj.weight.mul_(BRANCH)
        layer.mlp.down_proj.weight.mul_(BRANCH)


def principal_axes(rows_VH: Tensor, width: int) -> Tensor:
    """[H, width]: orthonormal directions in which the rows differ most; zeros behind the H-th when `width` is larger."""
    _, axes_HH = torch.linalg.eigh(rows_VH.T @ rows_VH)
    best = axes_HH.flip(1)[:, :width]
    return torch.nn.functional.pad(best, (0, width - best.shape[1]))


def feature_scale(store: Samples, samples: Sequence[int]) -> Tensor:
    """The power of two nearest to the median root-mean-square of each captured stream over tokens, float32 [A]."""
    tokens = torch.cat([store.read(int(i)).hidden[:, :-1].float() for i in samples])
    size = tokens.pow(2).mean(-1).sqrt().nanmedian(0).values.nan_to_num(1.0, 1.0).clamp(min=1e-6)
    return torch.exp2(size.log2().round())
