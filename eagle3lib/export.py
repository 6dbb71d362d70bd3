"""Export: write a draft as the folder that SGLang or vLLM loads, and show that the folder holds what was trained.

Tensor names and config fields are those that the engines read (see layouts). SGLang's loader drops
tensors it does not know without a word and leaves missing ones at random values, so nothing here is taken on trust:
`round_trip` compares logits, `draftcheck` looks at every tensor and field.

Legend: T rows, A captured layers, H target hidden size, D draft vocabulary, K draft steps.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from eagle3lib import layouts
from eagle3lib.acceptance import DEFINITIONS
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.draftfile import ARCHITECTURE, DTYPES, WEIGHTS, DraftFile
from eagle3lib.errors import Eagle3Error
from eagle3lib.layouts import SGLANG, Layout
from eagle3lib.manifest import flat

NO_IMAGES: Mapping[str, bytes] = {}


def export(draft: Draft, folder: Path, *, dtype: str = "bfloat16", card: str = "", layout: str = "sglang",
           images: Mapping[str, bytes] = NO_IMAGES) -> Path:
    """Write `folder` (model.safetensors, config.json, README.md) atomically; an older export there is replaced.

    `layout`: "sglang" or "vllm". `dtype` is what the file holds and the engine loads: weights are rounded to it, d2t and t2d are
    not. `card` is the text of README.md, `images` the PNG files that it shows by name. Raises Eagle3Error when `dtype` or
    `layout` is unknown, the engine cannot serve this draft as trained, or the folder holds something that is no draft.
    """
    if dtype not in DTYPES:
        raise Eagle3Error(f"export: unknown dtype {dtype!r}; one of {', '.join(DTYPES)}")
    if why := layouts.refusal(draft.cfg, layouts.get(layout)):
        raise Eagle3Error(f"export: this draft is not written for {layout}: {why}.")
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").is_file():
        raise Eagle3Error(f"export: {folder} exists and is no draft folder (no config.json); move it away or choose another folder")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as temporary:
            _write(draft, Path(temporary) / "new", dtype, card, layouts.get(layout), images)
            if folder.exists():
                os.replace(folder, Path(temporary) / "old")
            os.replace(Path(temporary) / "new", folder)
    except (OSError, SafetensorError) as error:
        free = shutil.disk_usage(folder.parent).free if folder.parent.exists() else 0
        raise Eagle3Error(f"export {folder}: cannot write ({error}); {free / 1e9:.2f} GB are free there. Make room, export again") from None
    return folder


def _write(draft: Draft, folder: Path, dtype: str, card: str, layout: Layout, images: Mapping[str, bytes]) -> None:
    folder.mkdir()
    save_file(rounded(draft, dtype, layout), folder / WEIGHTS, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(engine_config(draft.cfg, dtype, layout), indent=2) + "\n", encoding="utf-8")
    shown = "".join(f"\n![{Path(name).stem}]({name})\n" for name in images)
    (folder / "README.md").write_text((card or "# EAGLE-3 draft\n") + shown, encoding="utf-8")
    for name, data in images.items():
        (folder / Path(name).name).write_bytes(data)


def rounded(draft: Draft, dtype: str, layout: Layout = SGLANG) -> dict[str, Tensor]:
    """The tensors of the file: floating-point ones in `dtype`, d2t int64, t2d bool."""
    return {layouts.file_name(name, layout): (t.to(DTYPES[dtype]) if t.is_floating_point() else t).cpu().contiguous()
            for name, t in draft.exported().items()}


def engine_config(cfg: DraftConfig, dtype: str, layout: Layout = SGLANG) -> dict[str, Any]:
    """config.json of the draft: every field that the engine reads, explicit, with the captured layers in the engine's meaning.

    What eagle_config holds beyond the engine's own fields is for draftcheck: a second word on what no tensor shows.
    """
    ids = [k - layout.shift for k in cfg.aux_layers]
    about = {"use_aux_hidden_state": True, "residual_streams": list(cfg.aux_layers), "norm_output": cfg.norm_output, "meaning": layout.meaning}
    own = {"eagle_config": {layouts.AUX_IDS: ids, **about}} if layout is SGLANG else {
        layouts.AUX_IDS: ids, "eagle_config": about, "norm_before_residual": False}
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": cfg.hidden_size,
        "target_hidden_size": cfg.target_hidden_size,
        "intermediate_size": cfg.intermediate_size,
        "num_hidden_layers": cfg.num_layers,
        "num_attention_heads": cfg.num_heads,
        "num_key_value_heads": cfg.num_kv_heads,
        "head_dim": cfg.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": cfg.rms_norm_eps,
        "vocab_size": cfg.vocab_size,
        "draft_vocab_size": cfg.draft_vocab_size,
        "max_position_embeddings": cfg.max_position_embeddings,
        "rope_theta": cfg.rope_theta,
        "rope_scaling": cfg.rope_scaling,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "fc_norm": cfg.fc_norm,
        "norm_output": cfg.norm_output,
        "torch_dtype": dtype,
        **own,
    }


def from_run(run: Path, folder: Path, *, layout: str = "sglang", dtype: str = "bfloat16", steps: int = 3) -> Path:
    """Export the best draft of a run, with a card that holds what the run measured. `steps`: draft steps that the card serves with."""
    from eagle3lib import checkpoint, curves, runs

    draft, about = checkpoint.load(run / "checkpoint"), checkpoint.about(run / "checkpoint")
    measured = {n: v for n, v in runs.read_metrics(run).items() if n.startswith(("evaluate.acceptance", "train.acceptance"))}
    store = run / "store" / "store.json"
    fingerprint = runs.read_json(store)["fingerprint"] if store.is_file() else {"store": about["store"]}
    card = model_card(draft, Path(about["target"]).name, measured, fingerprint, steps, layout)
    return export(draft, folder, dtype=dtype, card=card, layout=layout, images=curves.png(run))


# Comparing with the trainer's draft ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundTrip:
    """The exported folder beside the trainer's draft, on the same rows, both in float32 arithmetic."""

    difference: float  # largest |logit difference| against the trainer's draft with its weights rounded as in the file
    scale: float  # largest |logit|, to judge the difference by
    rounding: float  # largest |logit difference| that rounding the weights makes
    agreement: float  # share of the K guesses that rounding leaves as they were
    unread: list[str]  # tensors of the file that the reader has no use for


@torch.no_grad()
def round_trip(draft: Draft, folder: Path, aux_TA: Tensor, tokens: list[int], steps: int) -> RoundTrip:
    """Reload `folder` independently and draft K steps behind true rows: aux [T, A*H] and the token after each.

    The trainer's side runs `Draft.layer` with its cache, once with the weights as exported and once as trained, along
    the same guesses.
    """
    file = DraftFile(folder, draft.embed_tokens.weight.cpu())
    read, guesses = file.chain(aux_TA, tokens, steps)
    rounded_KD = cached_logits(as_exported(draft, file.config["torch_dtype"]), aux_TA, tokens, guesses)
    trained_KD = cached_logits(as_exported(draft, "float32"), aux_TA, tokens, guesses)
    agreement = (rounded_KD.argmax(-1) == trained_KD.argmax(-1)).float().mean()
    return RoundTrip(float((read - rounded_KD).abs().max()), float(read.abs().max()), float((rounded_KD - trained_KD).abs().max()),
                     float(agreement), file.unread)


def as_exported(draft: Draft, dtype: str) -> Draft:
    """A float32 copy of the draft on the CPU whose weights went through the file's dtype."""
    copy = Draft(draft.cfg, draft.d2t.cpu(), draft.t2d.cpu()).float().eval()
    weights = {name: t.to(DTYPES[dtype]).float() if t.is_floating_point() else t for name, t in draft.exported().items()}
    copy.load_state_dict({"embed_tokens.weight": draft.embed_tokens.weight.float(), **weights})
    return copy


def cached_logits(draft: Draft, aux_TA: Tensor, tokens: list[int], guesses: list[int]) -> Tensor:
    """The trainer's logits [K, D] along the chain `guesses`."""
    positions = torch.arange(len(tokens))[None]
    out, past = draft.layer(draft.embed(torch.tensor([tokens])), draft.fuse(aux_TA.float())[None], positions)
    logits = [draft.logits(out[0, -1])]
    for k, guess in enumerate(guesses[:-1], start=1):
        out, past = draft.layer(draft.embed(torch.tensor([[guess]])), out[:, -1:], positions[:, -1:] + k, past)
        logits.append(draft.logits(out[0, -1]))
    return torch.stack(logits)


# Model card ----------------------------------------------------------------------------------------------------------


SERVE = {
    "sglang": """    python -m sglang.launch_server --model-path TARGET --speculative-algorithm EAGLE3 --speculative-draft-model-path THIS_FOLDER \\
      --speculative-num-steps {steps} --speculative-eagle-topk 1 --speculative-num-draft-tokens {tokens} --dtype bfloat16""",
    "vllm": """    vllm serve TARGET --speculative-config '{{"method": "eagle3", "model": "THIS_FOLDER", "num_speculative_tokens": {steps}}}'""",
}


def model_card(draft: Draft, target: str, metrics: Mapping[str, Any], fingerprint: Mapping[str, Any], steps: int,
               layout: str = "sglang") -> str:
    """README.md of the folder: what it is, how to serve it, what was measured and on what."""
    cfg, trained = draft.cfg, sum(p.numel() for p in draft.parameters() if p.requires_grad)
    marks = "\n".join(f"- {name}: `{value}`" for name, value in flat(fingerprint).items())
    rows = "\n".join(f"| {name} | {value} |" for name, value in metrics.items())
    return f"""# EAGLE-3 draft for {target}

{_layers(cfg.num_layers)}, {trained / 1e6:.1f} M parameters, draft vocabulary {cfg.draft_vocab_size:,} of {cfg.vocab_size:,} tokens. It reads the
target's residual streams {list(cfg.aux_layers)} (r_k enters layer k; `config.json` says in which engine's ids) and serves only the
target it was trained for.

## Serve

{SERVE[layout].format(steps=steps, tokens=steps + 1)}
## Measured

| figure | value |
| --- | --- |
{rows}

{DEFINITIONS}
## Trained on hidden states of

{marks}
"""


def _layers(count: int) -> str:
    return "One decoder layer" if count == 1 else f"{count} decoder layers"
