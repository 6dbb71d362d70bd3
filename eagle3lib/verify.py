"""The gate between hours of extraction and hours of training.

Everything here reads the store as the trainer will, and compares it with a source that the capture had no hand in: the
prepared rows, the engine's own log-probabilities, transformers in float32. The outcome is verdict.json, which names
exactly the bytes that were looked at; training refuses any others.

Legend: T tokens, A aux layers, H hidden size, V vocabulary, L layers, r_k the residual stream that enters layer k.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from eagle3lib import targets
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.progress import tqdm
from eagle3lib.runs import read_json, write_json
from eagle3lib.store import Sample, Store, compare

PREPARE = "Look at the samples and the accounting above; mend the data or the chat template, and prepare again."
AGAIN = "Delete this run's store/ and run 02_extract again; if it fails again the capture is wrong, not the data."
# nats. The probe is another forward pass than the dump, in another batch, so bf16 rounds otherwise: right dumps of SmolLM2 showed medians of
# 0 to 0.043 and single places up to 0.5; rows shifted by one show a median of 6 to 8.
LOGPROB_MEDIAN, LOGPROB_WORST = 0.15, 2.0
PARITY_ERROR, PARITY_MARGIN = 0.05, 3.0  # measured 0.004 to 0.014 on SmolLM2 in bf16, neighbours 0.17 and more
AGREEMENT = 0.9  # bf16 near-ties and batch effects leave a few per cent of the greedy tokens open


# what will be taught ----------------------------------------------------------------------------------------------


def check_prepared(checks: Checks, rows: Any, accounting: Mapping[str, Any], generation_prompt: Sequence[int]) -> None:
    """The prepared rows are accounted for, have something to teach, and every reply starts where the server's does."""
    lost = accounting["rows_in"] - accounting["rows_kept"] - sum(accounting["dropped"].values())
    checks.add("rows in = kept + dropped", lost == 0 and len(rows) == accounting["rows_kept"], lost, 0, "records that vanish unseen", PREPARE)
    bare = sum(not _has_label(row["loss_mask"]) for row in rows)
    checks.add("something to learn in every row", bare == 0, bare, 0, "a loss mask of zeros", PREPARE)
    marker = list(generation_prompt)
    wrong = sum(not _starts_behind(row["input_ids"], row["loss_mask"], marker) for row in rows) if marker else 0
    checks.add("replies start behind the generation prompt", wrong == 0, wrong, 0, "a mask shifted against the reply", PREPARE)
    heldout = sum(rows["heldout"])
    checks.add("rows held out", 0 < heldout < len(rows), heldout, f"1 to {len(rows) - 1}", "no row to validate on, or none to train on",
               "Raise max_prompts, or heldout_share.")


def _has_label(mask: Sequence[bool]) -> bool:
    """Two supervised tokens in a row: the first is input, the second label."""
    return any(a and b for a, b in zip(mask, mask[1:], strict=False))


def _starts_behind(ids: Sequence[int], mask: Sequence[bool], marker: list[int]) -> bool:
    starts = [t for t in range(len(mask)) if mask[t] and (t == 0 or not mask[t - 1])]
    return all(list(ids[max(0, t - len(marker)): t]) == marker for t in starts)


# who dumped it -----------------------------------------------------------------------------------------------------


def check_identity(checks: Checks, record: Mapping[str, Any], store: Store, target: Path) -> None:
    """The dump came from a server of ours, with our capture in it, serving this very target."""
    handshake = record.get("handshake") or {}
    layers = handshake.get("layers")
    checks.add("plugin handshake", bool(handshake) and handshake.get("nonce") == record.get("nonce"), "present" if handshake else "missing",
               "same nonce as our server", "a capture that was never active behind a healthy server", AGAIN)
    checks.add("captured layers", layers == store.manifest["layers"], str(layers), str(store.manifest["layers"]),
               "layer ids off by one in a model family", AGAIN)
    differences = compare(store.manifest["fingerprint"].get("target", {}), targets.fingerprint(target))
    checks.add("target fingerprint", not differences, "; ".join(differences) or "equal", "equal",
               "states of other weights, tokenizer or chat template", "Name the target that was extracted, or extract this one.")


# what is in it -----------------------------------------------------------------------------------------------------


def check_rows(checks: Checks, prepared: Any, store: Store) -> None:
    """Every prepared row is in the store once, with exactly its token ids and mask, and nothing else is."""
    wanted = set(prepared["sample_id"])
    ids = store.ids
    found = set(ids)
    checks.add("every row is there", wanted <= found, len(wanted & found), len(wanted), "rows lost on the way", AGAIN)
    checks.add("nothing else is there", found <= wanted, len(found - wanted), 0, "a stale store of another preparation", AGAIN)
    checks.add("every row once", len(ids) == len(found), len(ids) - len(found), 0, "a row counted twice after a resume", AGAIN)
    rows = {row["sample_id"]: row for row in prepared}
    wrong = sum(_other_tokens(store.read(i), rows[name]) for i, name in enumerate(ids) if name in rows)
    checks.add("token ids and masks", wrong == 0, wrong, 0, "states of one request saved under another", AGAIN)


def _other_tokens(sample: Sample, row: Mapping[str, Any]) -> bool:
    return sample.input_ids.tolist() != list(row["input_ids"]) or sample.loss_mask.tolist() != [bool(m) for m in row["loss_mask"]]


def check_values(checks: Checks, store: Store) -> dict[str, list[float]]:
    """Finite, no zero, constant or repeated rows; checksums are proved by the reading itself.

    Returns the median norm of each stream by position, for a figure: stream name -> [positions].
    """
    bad = {"finite": 0, "rows that vary": 0, "no row repeats": 0}
    norms: list[torch.Tensor] = []
    for sample in tqdm(store, desc="verify values", total=len(store), mininterval=1):
        hidden = sample.hidden.float()
        bad["finite"] += int((~torch.isfinite(hidden)).any(-1).sum())
        bad["rows that vary"] += int((hidden.amax(-1) == hidden.amin(-1)).sum())
        bad["no row repeats"] += int((hidden[1:] == hidden[:-1]).all(-1).sum())
        norms.append(hidden.norm(dim=-1))
    why = {"finite": "NaN or Inf that training would spread", "rows that vary": "all-zero or constant states",
           "no row repeats": "one position copied over its neighbour"}
    for name, count in bad.items():
        checks.add(name, count == 0, count, 0, why[name], AGAIN)
    return _profile(norms, stream_names(store))


def stream_names(store: Store) -> list[str]:
    return [f"r_{k}" for k in store.manifest["layers"]] + ["last"]


def _profile(norms: list[torch.Tensor], names: list[str]) -> dict[str, list[float]]:
    longest = int(np.median([len(n) for n in norms]))
    padded = torch.full((len(norms), longest, len(names)), float("nan"))
    for row, norm in zip(padded, norms, strict=True):
        row[: len(norm)] = norm[:longest]
    return {name: padded[:, :, s].nanmedian(0).values.tolist() for s, name in enumerate(names)}


# does it mean what it says -----------------------------------------------------------------------------------------


def check_logprobs(checks: Checks, probes: Path, store: Store, target: Path) -> None:
    """`lm_head(last)` must give the log-probabilities that the engine itself reported, at every position of probe rows.

    Catches a last hidden state one layer early, the final norm left out or applied twice, and rows out of order.
    """
    head_VH = targets.head_weights(target)[0].to(store_dtype(store))
    where = {name: i for i, name in enumerate(store.ids)}
    errors, positions = [], 0
    for name, probe in _probes(probes).items():
        last_TH = store.read(where[name]).hidden[:, -1]
        logp_TV = torch.log_softmax((last_TH @ head_VH.T).float(), -1)
        ours = logp_TV.gather(1, probe["ids"].long())
        positions += len(ours)
        errors.append((ours - probe["logprobs"]).abs())
    error = torch.cat([e.flatten() for e in errors]) if errors else torch.tensor([float("inf")])
    remedy = "The last hidden state is not what the engine's lm_head sees: wrong layer, norm or rows. " + AGAIN
    checks.add("log-probabilities, median", float(error.median()) <= LOGPROB_MEDIAN, float(error.median()), LOGPROB_MEDIAN,
               "last hidden state of another layer or norm", remedy)
    checks.add("log-probabilities, worst", float(error.max()) <= LOGPROB_WORST, float(error.max()), LOGPROB_WORST,
               f"single wrong rows ({positions:,} positions of {len(errors)} rows)", remedy)


def store_dtype(store: Store) -> torch.dtype:
    return getattr(torch, store.manifest["dtype"])


def _probes(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """sample id -> {"logprobs": float32 [T, k], "ids": int [T, k]}, the engine's own top tokens at every position."""
    if not path.is_file():
        raise Eagle3Error(f"{path.name}: the engine's log-probabilities are missing in {path.parent}. Run 02_extract again.")
    probes: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(path).items():
        name, kind = key.split(".")
        probes.setdefault(name, {})[kind] = tensor
    return probes


def check_agreement(checks: Checks, store: Store, target: Path, rows: int = 32, seed: int = 0) -> None:
    """On text that the target wrote greedily, argmax of `lm_head(last)` is the next token."""
    head_VH = targets.head_weights(target)[0].to(store_dtype(store))
    right = total = 0
    for i in _pick(len(store), rows, seed):
        sample = store.read(i)
        written = sample.loss_mask[1:]
        guess = (sample.hidden[:-1, -1][written] @ head_VH.T).argmax(-1)
        right += int((guess == sample.input_ids[1:][written]).sum())
        total += len(guess)
    share = right / max(total, 1)
    checks.add("greedy agreement", share >= AGREEMENT, share, AGREEMENT, "states that belong to other tokens, shifted by one",
               "The states do not predict the text that they came from. " + AGAIN)


def _pick(n: int, count: int, seed: int) -> list[int]:
    return sorted(random.Random(seed).sample(range(n), min(n, count)))


def check_parity(checks: Checks, store: Store, target: Path, rows: int, seed: int = 0) -> dict[str, dict[int, float]]:
    """Each dumped stream against transformers in float32, with the neighbouring layers as controls.

    The error is |dump - ref| / |ref| a token, and its median over tokens: a norm over the whole tensor cannot tell
    layers apart, because token 0 of a Llama swamps it. Returns stream -> {k: error} for k-1, k, k+1 ("last": k = L).
    """
    _require_memory(target)
    model = targets.load_model(target)
    layers = [*store.manifest["layers"], targets.text_config(target).num_hidden_layers]
    samples = [store.read(i) for i in _pick(len(store), rows, seed)]
    errors = _layer_errors(model, samples, layers, stream_names(store))
    for (name, by_layer), k in zip(errors.items(), layers, strict=True):
        own, nearest = by_layer[k], min(v for j, v in by_layer.items() if j != k)
        checks.add(f"parity {name}", own <= PARITY_ERROR and own * PARITY_MARGIN <= nearest, own,
                   f"{PARITY_ERROR} and a third of the neighbours' {nearest:.3g}", "a layer off by one, a norm twice or never",
                   f"The stream dumped as {name} is not what transformers computes there. " + AGAIN)
    return errors


def _layer_errors(model: torch.nn.Module, samples: Sequence[Sample], layers: Sequence[int], names: Sequence[str]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in names}
    for sample in tqdm(samples, desc="verify parity", mininterval=1):
        with torch.inference_mode():
            reference = model(input_ids=sample.input_ids[None], output_hidden_states=True, logits_to_keep=1).hidden_states
        for s, (name, k) in enumerate(zip(names, layers, strict=True)):
            for j in (k - 1, k, k + 1):
                if j < len(reference):
                    ref_TH = reference[j][0].float()
                    error_T = (sample.hidden[:, s].float() - ref_TH).norm(dim=-1) / ref_TH.norm(dim=-1)
                    found[name].setdefault(j, []).append(error_T)
    return {name: {j: float(torch.cat(e).median()) for j, e in by.items()} for name, by in found.items()}


def _require_memory(target: Path) -> None:
    import psutil

    needed = 2 * sum(f.stat().st_size for f in target.glob("*.safetensors"))  # bf16 files become float32
    free = psutil.virtual_memory().available
    if needed > free:
        raise Eagle3Error(f"parity needs the target in float32: up to {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB of memory are free. "
                          "Run this notebook on a machine with more memory.")


# verdict -----------------------------------------------------------------------------------------------------------


def write_verdict(run: Path, store: Store, checks: Checks) -> bool:
    """Write verdict.json for exactly these bytes; True when every check passed."""
    passed = len(checks) > 0 and not checks.failed
    write_json(run / "verdict.json", {"passed": passed, "digest": store.digest(), "samples": len(store), "tokens": store.tokens,
                                      "checks": checks.records})
    return passed


def require_verdict(run: Path, store: Store) -> None:
    """Raise Eagle3Error unless verdict.json passed these very bytes."""
    if not (run / "verdict.json").is_file():
        raise Eagle3Error(f"{run}: this dump was never verified (no verdict.json). Run 03_verify first.")
    verdict = read_json(run / "verdict.json")
    if not verdict["passed"]:
        failed = [c["name"] for c in verdict["checks"] if not c["passed"]]
        raise Eagle3Error(f"{run}: this dump failed verification ({', '.join(failed)}). Training on it would learn from wrong states; see 03_verify.")
    if verdict["digest"] != store.digest():
        raise Eagle3Error(f"{run}: verdict.json is about other bytes ({verdict['digest'][:12]}) than this store holds "
                          f"({store.digest()[:12]}). Run 03_verify again.")
