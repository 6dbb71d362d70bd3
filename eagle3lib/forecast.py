"""What a run will do and need, told before it starts: the text of `--dry-run`. Writes nothing and loads no model.

Needs of a stage that ran before are those that were seen. Otherwise they follow from sizes: disk is an upper bound (every
row at its longest); memory is what the interpreters take plus weights and optimizer state, right within a third or so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eagle3lib import places, redact, runs
from eagle3lib.console import duration, size
from eagle3lib.experiment import Experiment, Order, Plan, read_run

KERNEL, SERVER = 1.2e9, 3.0e9  # bytes that a kernel and an SGLang without a model hold; seen with torch 2.14.1 on a CPU
TRAINED, STATE = 16, 12  # bytes a trained parameter in memory (weight, gradient, two moments) and in a saved state
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
STATES = 2  # training states that are kept


def describe(order: Order) -> str:
    """Stages to run or skip and why, every parameter with its origin, disk and memory."""
    experiment, where, plan = order.checked()
    lines = [f"run folder: {runs.show_path(where) if where else 'a new one in ' + runs.show_path(order.runs_dir)}", "", "stages:"]
    noted = read_run(where).get("stages", {}) if where else {}
    needs = forecast(experiment, where, plan, noted)
    for stage in experiment.notebooks:
        lines.append(f"  {stage:<10}{_decision(plan.reasons.get(stage))}{needs[stage].text if plan.reasons.get(stage) else ''}")
    lines += [f"  warning: {text}" for text in plan.warnings]
    lines += ["", "parameters:"]
    width = max(map(len, experiment.settings)) + 2
    lines += [f"  {name:<{width}}{s.value!s:<28} {s.origin}" for name, s in experiment.settings.items()]
    lines += ["", *_totals([needs[stage] for stage, reason in plan.reasons.items() if reason], order.runs_dir)]
    return redact.hide("\n".join(lines))


def _decision(reason: str | None) -> str:
    return "not asked for" if reason is None else f"run ({reason})" if reason else "skip (unchanged)"


def _totals(needs: list[Need], base: Path) -> list[str]:
    """What all stages together need, beside what there is; short of it is said in words."""
    disk, memory = sum(n.disk or 0 for n in needs), max((n.memory or 0 for n in needs), default=0)
    free = psutil.disk_usage(str(next(p for p in (base, *base.absolute().parents) if p.exists()))).free
    there = psutil.virtual_memory().available
    unknown = " and what cannot be told yet" if any(n.disk is None for n in needs) else ""
    return [
        f"disk needed: {size(disk)} at most{unknown}; disk free: {size(free)}{'  NOT ENOUGH' if disk > free else ''}",
        f"memory needed: about {size(memory)}; memory available: {size(there)}{'  NOT ENOUGH' if memory > there else ''}",
    ]


@dataclass(frozen=True)
class Need:
    """What a stage needs; None where it cannot be told."""

    disk: float | None  # bytes written
    memory: float | None  # bytes held at once
    seconds: float | None = None  # only from an earlier run

    @property
    def text(self) -> str:
        if self.seconds is not None:
            return f"; last time {duration(self.seconds)}, {size(self.memory or 0)} memory, {size(self.disk or 0)} on disk"
        disk = "disk not known yet" if self.disk is None else f"at most {size(self.disk)} on disk"
        memory = "memory not known yet" if self.memory is None else f"about {size(self.memory)} memory"
        return f"; {memory}, {disk}"


def forecast(experiment: Experiment, where: Path | None, plan: Plan, noted: Mapping[str, Any]) -> dict[str, Need]:
    """Stage -> what it will need. An earlier execution counts only when its parameters were these."""
    model = Sizes.of(str(_value(experiment, "target", "")))
    tokens = _tokens(experiment, where, plan)
    return {stage: _seen(stage, plan, noted) or _need(stage, experiment, model, tokens) for stage in experiment.notebooks}


def _seen(stage: str, plan: Plan, noted: Mapping[str, Any]) -> Need | None:
    note = noted.get(stage, {})
    same = all(note.get("key", {}).get(part) == plan.keys[stage][part] for part in ("params", "inputs"))
    return Need(note.get("bytes"), note.get("peak_memory"), note["seconds"]) if same and note.get("status") == "ok" else None


def _tokens(experiment: Experiment, where: Path | None, plan: Plan) -> int | None:
    """Tokens of all rows: as prepared when that stands, else every prompt at its longest; None when the number of prompts is open."""
    if where and not plan.reasons.get("prepare") and (prepared := runs.read_metrics(where).get("prepare.tokens")):
        return int(prepared)
    return _value(experiment, "max_prompts", 0) * _value(experiment, "max_tokens", 0) or None


def _value(experiment: Experiment, name: str, otherwise: Any) -> Any:
    return experiment.settings[name].value if name in experiment.settings else otherwise


@dataclass(frozen=True)
class Sizes:
    """Of a target, read from its folder."""

    hidden: int
    inner: int
    vocab: int
    heads: int  # query heads x head size
    kv: int  # key heads x head size
    parameters: float

    @classmethod
    def of(cls, target: str) -> Sizes | None:
        """None when the folder is not on this machine (yet) or says nothing that is known here."""
        folder = runs.repo_root() / ".cache/targets/SmolLM2-135M-Instruct" if target == "smollm2" else places.located(target)
        try:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            config = config.get("text_config", config)
            width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            held = BYTES[config.get("dtype") or config.get("torch_dtype") or "float32"]
            return cls(
                hidden=config["hidden_size"],
                inner=config["intermediate_size"],
                vocab=config["vocab_size"],
                heads=width * config["num_attention_heads"],
                kv=width * config.get("num_key_value_heads", config["num_attention_heads"]),
                parameters=sum(p.stat().st_size for p in folder.glob("*.safetensors")) / held,
            )
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None

    def draft(self, words: int) -> int:
        """Trained parameters of a draft with so many words: fc, one layer whose attention reads 2H, lm_head."""
        attention = 2 * self.hidden * (self.heads + 2 * self.kv) + self.heads * self.hidden
        return 3 * self.hidden**2 + attention + 3 * self.hidden * self.inner + words * self.hidden


def _need(stage: str, experiment: Experiment, model: Sizes | None, tokens: int | None) -> Need:
    if model is None:
        return Need(None, None)
    dtype = BYTES.get(str(_value(experiment, "engine_dtype", "bfloat16")), 2)
    words = _value(experiment, "draft_vocab", 0)
    draft, tables = model.draft(words), 2 * model.vocab * model.hidden * 4  # the target's embeddings and head in float32
    batch = _value(experiment, "batch_tokens", 0) * _value(experiment, "ttt_steps", 1)
    server = KERNEL + SERVER + 3 * model.parameters * dtype
    match stage:
        case "prepare":
            return Need(None if tokens is None else 16 * tokens, server)
        case "extract":
            return Need(None if tokens is None else tokens * (4 * model.hidden * dtype + 5), server)
        case "verify":
            return Need(1e5, KERNEL + 4 * model.parameters)
        case "train":
            held = 2 * KERNEL + TRAINED * draft + tables + 4 * batch * (4 * words + 12 * model.hidden + 6 * model.inner)
            return Need((STATE * STATES + 4) * draft, held)
        case _:
            return Need(4 * draft, KERNEL + 4 * model.parameters + 8 * draft + tables)
