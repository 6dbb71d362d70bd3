"""Drafts and training states on disk: safetensors, checksums, and never a half-written file that looks whole.

    checkpoint/draft.safetensors        the best draft so far; its sizes and origin are JSON in the file's own header
    training/step-00000040/             everything needed to go on to the bit
        draft.safetensors  optimizer.pt  state.json     state.json comes last and holds the checksums of the others

One file, or one folder that is renamed when complete, is one unit: a crash leaves the old one. What a torn disk leaves
behind all the same is told by checksum and passed over in favour of the one before.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eagle3lib import runs, targets
from eagle3lib.draft import Draft, DraftConfig
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import fsync

DRAFT, OPTIMIZER, STATE = "draft.safetensors", "optimizer.pt", "state.json"


# Drafts ----------------------------------------------------------------------------------------------------------------


def save(folder: Path, draft: Draft, about: dict[str, Any]) -> Path:
    """Write `<folder>/draft.safetensors`, replacing an older one in one step. `about`: JSON-able facts to keep with it."""
    header = {"config": json.dumps(draft.cfg.to_dict()), "about": json.dumps(about)}
    tensors = {name: t.detach().cpu().contiguous() for name, t in draft.exported().items()}
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{DRAFT}.tmp"
    try:
        save_file(tensors, temporary, metadata=header)
        fsync(temporary)
        os.replace(temporary, folder / DRAFT)
        fsync(folder)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        raise _disk_error(folder, error) from error
    return folder / DRAFT


def load(folder: Path, target: Path | None = None, *, embeddings: Tensor | None = None) -> Draft:
    """The draft of a folder, in float32 and eval mode.

    Its embedding is the target's: `embeddings` [V, H], or those of the folder `target`, or of the target it was trained
    for; a draft with embeddings of its own brings them along.
    Raises Eagle3Error when the file is missing, damaged, or belongs to a target of another size.
    """
    header = _header(folder)
    draft = empty(DraftConfig(**header["config"]), folder)
    if embeddings is None and not draft.cfg.own_embeddings:
        embeddings = targets.head_weights(Path(target or header["about"]["target"]))[1]
    _fill(draft, folder, embeddings)
    return draft.eval()


def about(folder: Path) -> dict[str, Any]:
    """The facts that were saved with a draft."""
    return _header(folder)["about"]


def empty(cfg: DraftConfig, folder: Path) -> Draft:
    """A draft of these sizes with the draft vocabulary of the file in `folder`; its weights are yet to be read."""
    with safe_open(folder / DRAFT, framework="pt") as file:
        return Draft(cfg, file.get_tensor("d2t"), file.get_tensor("t2d"))


def _header(folder: Path) -> dict[str, Any]:
    if not (folder / DRAFT).is_file():
        raise Eagle3Error(f"draft {folder}: no {DRAFT} there. Run 04_train first (or name the right run).")
    try:
        with safe_open(folder / DRAFT, framework="pt") as file:
            return {name: json.loads(text) for name, text in file.metadata().items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise Eagle3Error(f"draft {folder}/{DRAFT} is damaged ({error}). Train again.") from None


def _fill(draft: Draft, folder: Path, embeddings: Tensor | None) -> None:
    """Copy every tensor of the file into `draft`; a missing, unknown or misshapen one is an error, never skipped."""
    if draft.cfg.own_embeddings:
        embeddings = None
    if embeddings is not None and embeddings.shape != draft.embed_tokens.weight.shape:
        raise Eagle3Error(
            f"draft {folder}: trained for embeddings {list(draft.embed_tokens.weight.shape)}, the target has {list(embeddings.shape)}. "
            "Use the target that the draft was trained for."
        )
    with safe_open(folder / DRAFT, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    wanted = draft.exported()
    wrong = {n for n in wanted.keys() | tensors.keys() if n not in wanted or n not in tensors or wanted[n].shape != tensors[n].shape}
    if wrong:
        raise Eagle3Error(f"draft {folder}: tensors missing, unknown or of another shape: {', '.join(sorted(wrong))}. Train again.")
    draft.load(tensors)
    if embeddings is not None:
        with torch.no_grad():
            draft.embed_tokens.weight.copy_(embeddings)


# Training states -------------------------------------------------------------------------------------------------------


KEEP = 2  # states; while one is written there are that many and one more


def require_room(folder: Path, draft: Draft) -> None:
    """Eagle3Error when the disk cannot hold what a run keeps at most: KEEP + 1 states and two drafts. Said before the first step."""
    trained = sum(p.numel() * p.element_size() for p in draft.parameters() if p.requires_grad)
    there = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    needed = (KEEP + 1) * 3 * trained + 2 * trained - there
    free = shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free
    if needed > free:
        raise Eagle3Error(f"training keeps up to {needed / 1e9:.2f} GB of states in {folder}, {free / 1e9:.2f} GB are free there. Make room first.")


def save_state(folder: Path, draft: Draft, optimizer: torch.optim.Optimizer, state: dict[str, Any], *, keep: int = KEEP) -> Path:
    """Write `<folder>/step-<state["step"]>` and remove all but the newest `keep` states."""
    final = folder / f"step-{state['step']:08d}"
    temporary = folder / f".{final.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    save(temporary, draft, {})
    try:
        torch.save(optimizer.state_dict(), temporary / OPTIMIZER)
        fsync(temporary / OPTIMIZER)
        sums = {name: checksum(temporary / name) for name in (DRAFT, OPTIMIZER)}
        runs.write_json(temporary / STATE, {**state, "checksums": sums})
        shutil.rmtree(final, ignore_errors=True)
        os.replace(temporary, final)
        fsync(folder)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        shutil.rmtree(temporary, ignore_errors=True)
        raise _disk_error(folder, error) from error
    for old in _states(folder)[keep:]:
        shutil.rmtree(old)
    return final


def last_state(folder: Path, *, say: bool = True) -> tuple[Path, dict[str, Any]] | None:
    """The newest state whose files are whole, and what it says; None when there is none."""
    for path in _states(folder):
        try:
            state = json.loads((path / STATE).read_text())
            if all(checksum(path / name) == known for name, known in state["checksums"].items()):
                return path, state
        except (OSError, ValueError, KeyError, AttributeError):
            pass
        if say:
            print(f"{path}: not whole (a write was cut short); going back to the one before", flush=True)
    return None


def load_state(path: Path, draft: Draft, optimizer: torch.optim.Optimizer) -> None:
    """Put a state's weights and moments into `draft` and `optimizer`. The target's embedding is left as it is.

    How the optimizer computes stays its own: the state may come from another device.
    """
    _fill(draft, path, None)
    state = torch.load(path / OPTIMIZER, weights_only=True, map_location="cpu")
    for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved |= {name: own[name] for name in ("capturable", "fused", "foreach")}
    optimizer.load_state_dict(state)


def discard_states(folder: Path) -> None:
    """Remove every state: they belong to another run, and a later one must not take them for its own."""
    for path in _states(folder):
        shutil.rmtree(path)


def _states(folder: Path) -> list[Path]:
    """Newest first."""
    return sorted((p for p in folder.glob("step-*") if p.is_dir()), reverse=True)


def checksum(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(2**24):
            digest.update(block)
    return digest.hexdigest()


def _disk_error(folder: Path, error: Exception) -> Eagle3Error:
    free = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    return Eagle3Error(
        f"checkpoint {folder}: cannot write ({error}); {free / 1e9:.2f} GB are free there. Make room and run 04_train again: "
        "it goes on from the last whole checkpoint."
    )
