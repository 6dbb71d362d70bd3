"""Draft check: will an engine load this EAGLE-3 folder as it was meant? Names every tensor and field that is wrong.

Rules follow what SGLang 0.5.14 reads (`models/llama_eagle3.py`), or vLLM for a folder in its layout (see layouts): unknown tensors
are dropped in silence (vLLM refuses them), missing ones stay random, missing config fields get a default. An error breaks or
silently worsens drafting; a warning is a default that the engine fills in, or something that is only right if it was meant.

Legend: H draft hidden size, D draft vocabulary, V target vocabulary, L target layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from eagle3lib import layouts, ropefields
from eagle3lib.draftfile import ARCHITECTURE, DTYPES
from eagle3lib.errors import Eagle3Error
from eagle3lib.layouts import AUX_IDS, VLLM, our_name


class Problem(NamedTuple):
    where: str  # the tensor, config field or file
    text: str
    fatal: bool = True

    def __str__(self) -> str:
        return f"{'error' if self.fatal else 'warning'}: {self.where}: {self.text}"


def check_draft(folder: Path, target: Path | None = None) -> list[Problem]:
    """Everything wrong with a draft folder, errors first; with `target`, also whether the two fit together.

    Raises Eagle3Error when `folder` (or `target`) is no folder with a readable config.json.
    """
    config = read_config(Path(folder))
    problems, tensors = list(config_problems(config)), dict[str, Tensor]()
    if not any(p.fatal for p in problems if p.where in SIZES):
        tensors, named = _load(Path(folder), layouts.of(config))
        problems += [*named, *tensor_problems(tensors, config), *vocabulary_problems(tensors, config)]
    if target is not None:
        problems += target_problems(config, _text(read_config(Path(target)), Path(target)), own=EMBED in tensors)
    return sorted(dict.fromkeys(problems), key=lambda p: not p.fatal)


def require(folder: Path, target: Path | None = None) -> list[Problem]:
    """The warnings about a folder; Eagle3Error that lists the errors, if there are any."""
    problems = check_draft(folder, target)
    if errors := [p for p in problems if p.fatal]:
        first = f"draft {folder} has {len(errors)} error(s): {errors[0].where}: {errors[0].text}"
        raise Eagle3Error("\n".join([first, *map(str, errors[1:])]))
    return problems


def read_config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        raise Eagle3Error(f"{folder}: no readable config.json in it; give the folder of a draft (or target) model") from None
    except (ValueError, RecursionError) as error:
        raise Eagle3Error(f"{folder}/config.json is no JSON: {error}") from None
    if isinstance(config, dict) and "speculators_model_type" in config:
        raise Eagle3Error(f"{folder}: a draft in the layout of the speculators package, which is not read here; convert it to the layout "
                          f'of {ARCHITECTURE} (model_type "llama", fields at the top level)')
    if not isinstance(config, dict):
        raise Eagle3Error(f"{folder}/config.json holds a {type(config).__name__}, not fields")
    return config


def _text(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    inner = config.get("text_config") or config
    if not isinstance(inner, dict):
        raise Eagle3Error(f"{folder}/config.json: text_config is a {type(inner).__name__}, not fields")
    return inner


# Config --------------------------------------------------------------------------------------------------------------

WITNESSES = ("residual_streams", "norm_output", "meaning")  # not the engine's: what our exports say for whoever checks them
EMBED = "embed_tokens.weight"
Rule = tuple[Callable[[Any], bool], str]


def _count(value: Any) -> TypeGuard[int]:
    return type(value) is int and value > 0


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


_COUNT: Rule = (_count, "a positive integer")
SIZES: dict[str, Rule] = {name: _COUNT for name in (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "target_hidden_size",
    "vocab_size", "draft_vocab_size")}
FIELDS: dict[str, Rule] = {
    "architectures": (lambda v: v == [ARCHITECTURE], f'["{ARCHITECTURE}"]'),
    "model_type": (lambda v: v == "llama", '"llama"'),
    **SIZES,
    "num_hidden_layers": (_count, "a positive integer (1, as a rule)"),
    "hidden_act": (lambda v: v == "silu", '"silu"'),
    "rms_norm_eps": (_number(1e-12, 1e-2), "a number between 1e-12 and 0.01"),
    "max_position_embeddings": _COUNT,
    "rope_theta": (_number(1, 1e12), "a number of at least 1"),
    "rope_scaling": (ropefields.readable, ropefields.WANTED),
    "attention_bias": (lambda v: v is False, "false: the draft's projections have no bias"),
    "tie_word_embeddings": (lambda v: v is False, "false: true makes SGLang ignore lm_head.weight"),
    "fc_norm": (lambda v: type(v) is bool, "true or false: EAGLE-3.1's norms before fc"),
    "norm_output": (lambda v: type(v) is bool, "true or false: is the next step fed the normed output?"),
    "torch_dtype": (lambda v: v in list(DTYPES), f"one of {', '.join(DTYPES)}"),
    "eagle_config": (lambda v: isinstance(v, dict), "a table with eagle_aux_hidden_state_layer_ids"),
}
# What the engine does when a field is missing. A field without an entry here is an error when it is missing.
DEFAULTS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "num_key_value_heads": lambda c: f"num_attention_heads ({c.get('num_attention_heads')})",
    "head_dim": lambda c: "hidden_size / num_attention_heads",
    "target_hidden_size": lambda c: f"hidden_size ({c.get('hidden_size')})",
    "hidden_act": lambda c: '"silu"',
    "rms_norm_eps": lambda c: "1e-6, which may not be what it was trained with",
    "max_position_embeddings": lambda c: "2048",
    "rope_theta": lambda c: "10000, which may not be what it was trained with",
    "rope_scaling": lambda c: "none",
    "attention_bias": lambda c: "false",
    "tie_word_embeddings": lambda c: "false",
    "fc_norm": lambda c: "false",
    "norm_output": lambda c: "false",
    "torch_dtype": lambda c: "float16 or bfloat16 of its own choice",
    "eagle_config": lambda c: "the residual streams 2, L//2 and L-3",
}


def config_problems(config: Mapping[str, Any]) -> Iterator[Problem]:
    """Fields that are missing or do not have a value that the engine reads as meant."""
    given = {**config, **ropefields.fields(config)}
    if "dtype" in config:  # the newer name of torch_dtype
        given.setdefault("torch_dtype", config["dtype"])
    for name, (holds, wanted) in FIELDS.items():
        if name not in given:
            default = DEFAULTS.get(name)
            yield Problem(name, f"missing; the engine takes {default(given)}" if default else f"missing; must be {wanted}", default is None)
        elif not holds(given[name]):
            yield Problem(name, f"is {given[name]!r}, must be {wanted}")
    heads: Any = given.get("num_attention_heads")
    groups: Any = given.get("num_key_value_heads", heads)
    if _count(heads) and _count(groups) and heads % groups:
        yield Problem("num_key_value_heads", f"is {groups}, does not divide num_attention_heads {heads}")
    ids = layouts.ids_of(config)
    if ids is not None and not _layer_ids(ids):  # at the top level or in eagle_config
        yield Problem(AUX_IDS, f"is {ids!r}, must be ascending layer numbers")
    if isinstance(given.get("eagle_config"), dict):
        yield from eagle_problems(given["eagle_config"], ids, layouts.of(config))
        said = given["eagle_config"].get("norm_output", given.get("norm_output"))
        if said != given.get("norm_output", False):
            yield Problem("norm_output", f"is {given.get('norm_output')}, but eagle_config says that it was trained with {said}")
    yield from width_problems(given)
    yield from (Problem(where, text) for where, text in ropefields.contradictions(config))
    if layouts.of(config) is VLLM and config.get("norm_before_residual"):
        yield Problem("norm_before_residual", "is true: the residual would be the normed stream, which our reader and SGLang do not know")
    if config.get("use_aux_norm") and config.get("fc_norm") is False:
        yield Problem("fc_norm", "is false and use_aux_norm is true: they are two names for one thing, and SGLang takes either", False)


def width_problems(given: Mapping[str, Any]) -> Iterator[Problem]:
    """SGLang tells captured states from the draft's own output by their width alone."""
    ids, width, target = layouts.ids_of(given), given.get("hidden_size"), given.get("target_hidden_size") or given.get("hidden_size")
    streams = len(ids) if _layer_ids(ids) else 3
    if _count(width) and _count(target) and width == streams * target:
        yield Problem("hidden_size", f"is {width}, the width of {streams} captured streams of {target}: SGLang would skip fc")


def eagle_problems(eagle: Mapping[str, Any], ids: Any, layout: layouts.Layout) -> Iterator[Problem]:
    """The captured layers: SGLang's ids name layer outputs, one less than the residual stream they stand for; vLLM's name the stream."""
    if ids is None:
        yield Problem(AUX_IDS, f"missing in eagle_config; the engine takes {DEFAULTS['eagle_config'](eagle)}", False)
    if eagle.get("use_aux_hidden_state") is not True:
        yield Problem("use_aux_hidden_state", f"is {eagle.get('use_aux_hidden_state')!r} in eagle_config, must be true")
    streams = eagle.get("residual_streams")
    if streams is not None and _layer_ids(ids) and streams != [i + layout.shift for i in ids]:
        yield Problem("residual_streams", f"says {streams}, but {AUX_IDS} {ids} mean {[i + layout.shift for i in ids]}")
    if any(name in eagle for name in WITNESSES):
        for name in (n for n in WITNESSES if n not in eagle):
            yield Problem(name, f"missing in eagle_config: our exports hold {', '.join(WITNESSES)}", False)


def _layer_ids(ids: Any) -> TypeGuard[list[int]]:
    return isinstance(ids, list) and len(ids) > 0 and all(type(i) is int and i >= 0 for i in ids) and ids == sorted(set(ids))


# Tensors -------------------------------------------------------------------------------------------------------------

Dim = tuple[str, int]  # the config's words for a size, and the size


def layout(config: Mapping[str, Any], most: int) -> dict[str, tuple[Dim, ...]]:
    """Every tensor that the engine needs, under our names, with its sizes and where they come from; of at most `most` layers."""
    h, i, d, v = ((n, config[n]) for n in ("hidden_size", "intermediate_size", "draft_vocab_size", "vocab_size"))
    heads = config["num_attention_heads"]
    size, groups = config.get("head_dim") or h[1] // heads, config.get("num_key_value_heads") or heads
    q, kv = ("num_attention_heads x head_dim", heads * size), ("num_key_value_heads x head_dim", groups * size)
    wide, target = ("2 x hidden_size", 2 * h[1]), ("target_hidden_size", config.get("target_hidden_size") or h[1])
    ids = layouts.ids_of(config)
    aux = len(ids) if _layer_ids(ids) else 3
    shapes: dict[str, tuple[Dim, ...]] = {"midlayer.input_layernorm.weight": (h,)}
    for n in range(min(config["num_hidden_layers"], most) if _count(config.get("num_hidden_layers")) else 1):
        place, read = (f"layers.{n}", h) if n else ("midlayer", wide)  # layers behind the first do not read the embedding
        shapes |= {f"{place}.{norm}.weight": (h,) for norm in ("hidden_norm", "post_attention_layernorm")}
        attention = {"q": (q, read), "k": (kv, read), "v": (kv, read), "o": (h, q)}
        shapes |= {f"{place}.self_attn.{part}_proj.weight": dims for part, dims in attention.items()}
        shapes |= {f"{place}.mlp.{part}_proj.weight": dims for part, dims in {"gate": (i, h), "up": (i, h), "down": (h, i)}.items()}
    shapes |= {"fc.weight": (h, (f"{aux} aux layers x target_hidden_size", aux * target[1])), "norm.weight": (h,), "lm_head.weight": (d, h)}
    if config.get("fc_norm") or config.get("use_aux_norm"):  # EAGLE-3.1
        shapes |= {f"fc_norm.{n}.weight": (target,) for n in range(aux)}
    if target[1] != h[1]:  # the target's embeddings do not fit
        shapes |= {EMBED: (v, h)}
    return {**shapes, "d2t": (d,), "t2d": (v,)}


def load_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a draft folder under our names; the folder has been checked."""
    return _load(folder, layouts.of(read_config(folder)))[0]


def _load(folder: Path, layout: layouts.Layout) -> tuple[dict[str, Tensor], list[Problem]]:
    """All tensors of the folder's safetensors files under our names, and what was wrong with the files."""
    tensors: dict[str, Tensor] = {}
    problems: list[Problem] = []
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        pickled = ", ".join(sorted(p.name for p in folder.glob("*.bin")))
        problems.append(Problem("model.safetensors", f"missing{f' ({pickled} is pickled and not read: convert it)' if pickled else ''}"))
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if our_name(name, layout) in tensors:
                        problems.append(Problem(name, "is there twice under different names or in different files"))
                    tensors[our_name(name, layout)] = opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            problems.append(Problem(file.name, f"cannot be read: {error}"))
    return tensors, problems


def tensor_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[Problem]:
    """Missing, unknown and misshapen tensors; values that no training leaves behind."""
    deep, given = len({n.split(".")[1] for n in tensors if n.startswith("layers.")}), config.get("num_hidden_layers", 1)
    wanted = layout(config, 1 + deep)  # layers that are missing whole are one problem
    for name in wanted.keys() - tensors.keys() - {"t2d", "d2t"}:
        yield Problem(name, "missing; the engine leaves it at random values")
    if given != 1 + deep:
        yield Problem("num_hidden_layers", f"is {given}, the file holds {1 + deep} layer{'s' if deep else ''}")
    if "fc_norm.0.weight" in wanted and not any(n.startswith("fc_norm.") for n in tensors):
        yield Problem("fc_norm", "is true, the file holds no fc_norm tensor")
    for name in sorted(tensors.keys() - wanted.keys()):
        if name == EMBED and layouts.of(config) is VLLM:
            continue  # vLLM takes them
        if name == EMBED:
            yield Problem(name, "not used: SGLang takes the target's embedding for a draft of the target's width", False)
        else:
            yield Problem(name, "unknown; the engine drops it without a word")
    for name, dims in wanted.items():
        if name in tensors and tuple(tensors[name].shape) != tuple(size for _, size in dims):
            words = ", ".join(f"{words} = {size}" for words, size in dims)
            yield Problem(name, f"has shape {list(tensors[name].shape)}, the config says [{words}]")
        elif name in tensors and name not in ("d2t", "t2d"):
            yield from value_problems(name, tensors[name], config.get("torch_dtype", config.get("dtype")))


def value_problems(name: str, tensor: Tensor, dtype: Any) -> Iterator[Problem]:
    if tensor.dtype not in DTYPES.values():
        yield Problem(name, f"is {tensor.dtype}, must be one of {', '.join(DTYPES)}")
        return
    if dtype in list(DTYPES) and tensor.dtype != DTYPES[dtype]:
        yield Problem(name, f"is {str(tensor.dtype).removeprefix('torch.')}, config says torch_dtype {dtype}; the engine converts", False)
    if not tensor.isfinite().all():
        yield Problem(name, f"{int((~tensor.isfinite()).sum()):,} of {prod(tensor.shape):,} values are NaN or infinite")
    elif (tensor == tensor.flatten()[0]).all():
        value = float(tensor.flatten()[0])
        # In a short training a norm may move by less than bfloat16 can show, so ones alone prove nothing.
        untouched = tensor.dim() == 1 and value == 1.0
        yield Problem(name, f"every value is {value:g}, as before any training: was it trained and saved?", not untouched)


def vocabulary_problems(tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> Iterator[Problem]:
    """d2t holds offsets (target id = draft id + d2t), ascending; t2d marks the same ids."""
    d2t, t2d, vocab = tensors.get("d2t"), tensors.get("t2d"), config["vocab_size"]
    marked = t2d.nonzero().flatten() if t2d is not None and t2d.shape == (vocab,) and t2d.dtype == torch.bool else None
    if t2d is None:
        yield Problem("t2d", "missing; SGLang does without, trainers and other engines do not", False)
    elif t2d.dtype != torch.bool:
        yield Problem("t2d", f"is {t2d.dtype}, must be bool")
    if d2t is None:
        whole = config["draft_vocab_size"] == vocab
        yield Problem("d2t", f"missing; {'fine for a full vocabulary' if whole else 'draft ids would pass as target ids'}", not whole)
        return
    if d2t.shape != (config["draft_vocab_size"],):
        return  # already said
    if d2t.dtype != torch.int64:
        yield Problem("d2t", f"is {d2t.dtype}, must be int64")
        return
    if marked is not None and torch.equal(d2t, marked) and not torch.equal(marked, torch.arange(len(d2t))):
        yield Problem("d2t", "holds target ids; it must hold offsets, target id - draft id")
        return
    ids = d2t + torch.arange(len(d2t))
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab:
        yield Problem("d2t", f"leads to target ids {low}..{high}, the vocabulary is 0..{vocab - 1} (offset = target id - draft id)")
    elif (ids.diff() <= 0).any():
        at = int((ids.diff() <= 0).nonzero()[0])
        yield Problem("d2t", f"target ids do not ascend: draft ids {at} and {at + 1} stand for {int(ids[at])} and {int(ids[at + 1])}")
    elif marked is not None and not torch.equal(ids, marked):
        yield Problem("t2d", f"marks {len(marked):,} tokens, not the {len(ids):,} that d2t leads to")


# Draft and target ----------------------------------------------------------------------------------------------------


def target_problems(config: Mapping[str, Any], target: Mapping[str, Any], own: bool = False) -> Iterator[Problem]:
    """Does the draft fit the target that it is to serve? `target`: its text config; `own`: the file holds embeddings."""
    def differs(field: str, other: str, *, fatal: bool, why: str) -> Iterator[Problem]:
        mine, theirs = given.get(field), full.get(other)
        if mine is not None and theirs is not None and mine != theirs:
            yield Problem(field, f"is {mine}, the target's {other} is {theirs}: {why}", fatal)

    given, full = {**config, **ropefields.fields(config)}, {**target, **ropefields.fields(target)}
    given.setdefault("target_hidden_size", given.get("hidden_size"))
    yield from differs("vocab_size", "vocab_size", fatal=True, why="a draft for another tokenizer")
    yield from differs("target_hidden_size", "hidden_size", fatal=True, why="a draft for another target")
    if not own:
        yield from differs("hidden_size", "hidden_size", fatal=True, why="the draft uses the target's embedding")
    yield from differs("rope_theta", "rope_theta", fatal=False, why="right only if the draft was trained so")
    yield from differs("rms_norm_eps", "rms_norm_eps", fatal=False, why="right only if the draft was trained so")
    mine, theirs = ropefields.scaling(given), ropefields.scaling(full)
    if mine != theirs:
        yield Problem("rope_scaling", f"is {mine}, the target's is {theirs}: right only if the draft was trained so", False)
    yield from differs("max_position_embeddings", "max_position_embeddings", fatal=False, why="the engine takes the target's for both")
    yield from layer_problems(layouts.ids_of(config), target.get("num_hidden_layers"), layouts.of(config))


def layer_problems(ids: Any, layers: Any, layout: layouts.Layout) -> Iterator[Problem]:
    """The captured layers beside those of EAGLE-3 for a target of so many layers."""
    if not (_count(layers) and _layer_ids(ids)):
        return
    usual, last = [k - layout.shift for k in (2, layers // 2, layers - 3)], layers - 1 - layout.shift
    if max(ids) > last:
        yield Problem(AUX_IDS, f"is {ids}, but the target's last usable layer {'input' if layout is VLLM else 'output'} is {last}")
    elif layout is not VLLM and ids == [i + 1 for i in usual]:
        yield Problem(AUX_IDS, f"is {ids}: these name layer inputs (vLLM's meaning), SGLang would add 1; write {usual}")
    elif layout is VLLM and ids == [i - 1 for i in usual]:
        yield Problem(AUX_IDS, f"is {ids}: these name layer outputs (SGLang's meaning), vLLM takes layer inputs; write {usual}")
    elif ids != usual:
        yield Problem(AUX_IDS, f"is {ids}, usual for {layers} layers is {usual}; right only if it was trained so", False)


def report(folder: Path, target: Path | None = None) -> int:
    """Print every problem and a verdict; 0 when there is no error, else 1 (the command `check-draft`)."""
    problems = check_draft(folder, target)
    for problem in problems:
        print(problem)
    errors = sum(p.fatal for p in problems)
    print(f"{folder}: {errors} errors, {len(problems) - errors} warnings" + ("" if target else " (no --target given: fit not checked)"))
    return 1 if errors else 0
