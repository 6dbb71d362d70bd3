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

from eagle3lib import quarantine, reference, targets, values
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.progress import tqdm
from eagle3lib.runs import read_json, write_json
from eagle3lib.shards import FP8
from eagle3lib.store import Sample, Store, compare
from eagle3lib.values import Portrait

PREPARE = "Look at the samples and the accounting above; mend the data or the chat template, and prepare again."
AGAIN = "Delete this run's store/ and run 02_extract again; if it fails again the capture is wrong, not the data."
# nats. The probe is another forward pass than the dump, in another batch, so bf16 rounds otherwise: right dumps of SmolLM2 showed medians of
# 0 to 0.043 and single places up to 0.5; rows shifted by one show a median of 6 to 8.
# fp8 keeps four bits: SmolLM2 showed a median of 0.07 and single places up to 0.9.
LOGPROB_MEDIAN = {"bfloat16": 0.15, "float16": 0.15, "float32": 0.15, FP8: 0.3}
LOGPROB_WORST = {"bfloat16": 2.0, "float16": 2.0, "float32": 2.0, FP8: 3.0}
# Measured 0.004 to 0.014 on SmolLM2 in bf16, neighbours 0.17 and more; fp8 adds 0.026 of its own.
PARITY_ERROR, PARITY_MARGIN = {"bfloat16": 0.05, "float16": 0.05, "float32": 0.05, FP8: 0.08}, 3.0
COSINE = 0.999  # two streams that are one; SmolLM2 shows 0.30 to 0.69 between its neighbours
AGREEMENT = 0.9  # bf16 near-ties and batch effects leave a few per cent of the greedy tokens open


# what will be taught ----------------------------------------------------------------------------------------------


def check_prepared(checks: Checks, rows: Any, accounting: Mapping[str, Any], generation_prompt: Sequence[int]) -> None:
    """The prepared rows are accounted for, have something to teach, and every reply starts where the server's does."""
    lost = accounting["rows_in"] - accounting["rows_kept"] - sum(accounting["dropped"].values())
    checks.add("rows in = kept + dropped", lost == 0 and len(rows) == accounting["rows_kept"], lost, 0, "records that vanish unseen", PREPARE)
    masks = rows.with_format("numpy")  # no Python object a token
    bare = sum(not _has_label(row["loss_mask"]) for row in masks)
    checks.add("something to learn in every row", bare == 0, bare, 0, "a loss mask of zeros", PREPARE)
    marker = list(generation_prompt)
    exact = accounting.get("options", {}).get("train_thinking", True)
    wrong = sum(not _starts_behind(row["input_ids"], row["loss_mask"], marker, exact) for row in masks) if marker else 0
    lawful = accounting.get("own_starts", 0)  # rows with masks of their own, or with tool results
    checks.add("replies start behind the generation prompt", wrong <= lawful, wrong, lawful, "a mask shifted against the reply", PREPARE)
    heldout = sum(rows["heldout"])
    checks.add("rows held out", 0 < heldout < len(rows), heldout, f"1 to {len(rows) - 1}", "no row to validate on, or none to train on",
               "Raise max_prompts, or heldout_share.")


def _has_label(mask: np.ndarray) -> bool:
    """Two supervised tokens in a row: the first is input, the second label."""
    return bool((mask[:-1] & mask[1:]).any())


def _starts_behind(ids: np.ndarray, mask: np.ndarray, marker: list[int], exact: bool) -> bool:
    """Does every supervised stretch begin behind the generation prompt? exact: right behind it; else untrained thinking may
    stand between the two, but no other stretch."""
    before = 0
    for t in np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]])).tolist():
        last = t - len(marker)
        if not any(ids[i : i + len(marker)].tolist() == marker for i in range(last, last - 1 if exact else before - 1, -1) if i >= before):
            return False
        before = t
    return True


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


def check_rows(checks: Checks, prepared: Any, store: Store, quarantine_share: float = quarantine.SHARE) -> None:
    """Every prepared row is in the store once, with exactly its token ids and mask, and nothing else is.

    Rows in quarantine are missing by intent; they are counted, and may be `quarantine_share` of all.
    """
    where = {name: i for i, name in enumerate(prepared["sample_id"])}
    ids = store.ids
    found = set(ids)
    away = {entry["sample_id"] for entry in quarantine.read(store.path)} & where.keys() - found
    checks.add("every row is there", where.keys() - away <= found, len(where.keys() & found), len(where) - len(away), "rows lost on the way", AGAIN)
    checks.add("rows in quarantine", len(away) <= quarantine_share * len(where), len(away), int(quarantine_share * len(where)),
               "data that the engine cannot dump, unseen", "Read the reasons in store/quarantine.jsonl. " + AGAIN)
    checks.add("nothing else is there", found <= where.keys(), len(found - where.keys()), 0, "a stale store of another preparation", AGAIN)
    checks.add("every row once", len(ids) == len(found), len(ids) - len(found), 0, "a row counted twice after a resume", AGAIN)
    wrong = sum(_other_tokens(store.read_tokens(i), prepared[where[name]]) for i, name in enumerate(ids) if name in where)
    checks.add("token ids and masks", wrong == 0, wrong, 0, "states of one request saved under another", AGAIN)
    twice = _shared_states(store)
    checks.add("states of their own", twice == 0, twice, 0, "one request's states saved for several rows", AGAIN)


def _other_tokens(stored: tuple[np.ndarray, np.ndarray], row: Mapping[str, Any]) -> bool:
    return stored[0].tolist() != list(row["input_ids"]) or stored[1].tolist() != [bool(m) for m in row["loss_mask"]]


def _shared_states(store: Store) -> int:
    """Samples whose states are those of an earlier sample with other tokens; only the mask may differ between the two."""
    sums = store.index["hidden_xxh"]
    order = np.argsort(sums, kind="stable")
    pairs = [(order[n], order[n + 1]) for n in np.flatnonzero(sums[order][1:] == sums[order][:-1])]
    return sum(not np.array_equal(store.read_tokens(int(a))[0], store.read_tokens(int(b))[0]) for a, b in pairs)


def check_values(checks: Checks, store: Store) -> Portrait:
    """Finite, no zero, constant or repeated rows, streams that differ; checksums are proved by the reading itself.

    Returns what the figures show: norms by position, cosines between neighbouring streams.
    """
    portrait = values.look(store)
    why = {"finite": "NaN or Inf that training would spread", "rows that vary": "all-zero or constant states",
           "no row is near zero": "states that were never computed", "no row repeats": "one position copied over another"}
    for name, count in portrait.sick.items():
        checks.add(name, count == 0, count, 0, why[name], AGAIN)
    alike = {pair: float(np.median(cosines)) for pair, cosines in portrait.cosines.items()}
    closest = max(alike, key=lambda pair: alike[pair]) if alike else "none"
    checks.add("streams differ", bool(alike) and alike[closest] <= COSINE, alike.get(closest, float("nan")), COSINE,
               f"one layer captured twice (closest: {closest}, median cosine)", AGAIN)
    return portrait


# does it mean what it says -----------------------------------------------------------------------------------------


def check_logprobs(checks: Checks, probes: Path, store: Store, target: Path) -> None:
    """`lm_head(last)` must give the log-probabilities that the engine itself reported, at every position of probe rows.

    Catches a last hidden state one layer early, the final norm left out or applied twice, and rows out of order.
    """
    head_VH = targets.head_weights(target)[0].to(store_dtype(store))
    where = {name: i for i, name in enumerate(store.ids)}
    errors, positions = [], 0
    asked = _probes(probes)
    gone = sorted(asked.keys() - where.keys())
    checks.add("probe rows are there", not gone, len(gone), 0, "log-probabilities of another dump", AGAIN)
    for name in sorted(asked.keys() & where.keys()):
        probe = asked[name]
        last_TH = store.read(where[name]).hidden[:, -1]
        logp_TV = torch.log_softmax((last_TH @ head_VH.T).float(), -1)
        ours = logp_TV.gather(1, probe["ids"].long())
        positions += len(ours)
        errors.append((ours - probe["logprobs"]).abs())
    error = torch.cat([e.flatten() for e in errors]) if errors else torch.tensor([float("inf")])
    remedy = "The last hidden state is not what the engine's lm_head sees: wrong layer, norm or rows. " + AGAIN
    kind = store.manifest["store_dtype"]
    checks.add("log-probabilities, median", float(error.median()) <= LOGPROB_MEDIAN[kind], float(error.median()), LOGPROB_MEDIAN[kind],
               "last hidden state of another layer or norm", remedy)
    checks.add("log-probabilities, worst", float(error.max()) <= LOGPROB_WORST[kind], float(error.max()), LOGPROB_WORST[kind],
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


def check_parity(checks: Checks, store: Store, target: Path, rows: int, seed: int = 0, free: int | None = None) -> dict[str, dict[int, float]]:
    """Each dumped stream against transformers in float32, with the neighbouring layers as controls.

    The error is |dump - ref| / |ref| a token, and its median over tokens: a norm over the whole tensor cannot tell
    layers apart, because token 0 of a Llama swamps it. Returns stream -> {k: error} for k-1, k, k+1 ("last": k = L).
    Of a target too big for this machine only the first stream is compared; log-probabilities then prove the last.
    free: bytes of memory, for tests.
    """
    if rows == 0:
        checks.add("parity", True, "not asked for (parity_rows 0)", "log-probabilities stand alone", "a layer off by one", AGAIN)
        return {}
    depth, limit = targets.text_config(target).num_hidden_layers, PARITY_ERROR[store.manifest["store_dtype"]]
    streams = dict(zip(stream_names(store), [*store.manifest["layers"], depth], strict=True))
    samples = [store.read(i) for i in _pick(len(store), rows, seed)]
    with reference.load(target, store.manifest["layers"][0], free) as (model, run):
        known = run + 1 if run == depth else run  # of a part, the stream behind the last layer has passed the final norm
        errors = _layer_errors(model, samples, streams, known)
    for name, by_layer in errors.items():
        own, nearest = by_layer[streams[name]], min(v for j, v in by_layer.items() if j != streams[name])
        checks.add(f"parity {name}", own <= limit and own * PARITY_MARGIN <= nearest, own,
                   f"{limit} and a third of the neighbours' {nearest:.3g}", "a layer off by one, a norm twice or never",
                   f"The stream dumped as {name} is not what transformers computes there. " + AGAIN)
    return errors


def stream_names(store: Store) -> list[str]:
    return [f"r_{k}" for k in store.manifest["layers"]] + ["last"]


def _layer_errors(model: torch.nn.Module, samples: Sequence[Sample], streams: Mapping[str, int], known: int) -> dict[str, dict[int, float]]:
    """known: the reference has r_k for k below it; streams beyond are left out."""
    compared = {name: k for name, k in streams.items() if k < known}
    found: dict[str, dict[int, list[torch.Tensor]]] = {name: {} for name in compared}
    for sample in tqdm(samples, desc="verify parity", mininterval=1):
        with torch.inference_mode():
            states = model(input_ids=sample.input_ids[None], output_hidden_states=True, logits_to_keep=1).hidden_states
        for s, (name, k) in enumerate(compared.items()):
            for j in (k - 1, k, k + 1):
                if j < known:
                    ref_TH = states[j][0].float()
                    error_T = (sample.hidden[:, s].float() - ref_TH).norm(dim=-1) / ref_TH.norm(dim=-1)
                    found[name].setdefault(j, []).append(error_T)
    return {name: {j: float(torch.cat(e).median()) for j, e in by.items()} for name, by in found.items()}


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
