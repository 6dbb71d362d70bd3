"""Probes: a few real requests to a capturing server, whose dumps must be right before any row is extracted.

What a dump means is judged by three witnesses that do not depend on the plugin: the engine's own log-probabilities of the
very same forward pass, the same prompt under other conditions (again, in a batch, in chunks, behind its own prefix), and
transformers in float32 with the neighbouring layers as controls. Every figure goes into the engine's checks.

Legend: T tokens, A captured layers, H hidden size, V vocabulary, r_k the residual stream that enters layer k.
"""

from __future__ import annotations

import random
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import torch

from eagle3lib import capture, targets
from eagle3lib.errors import CheckFailed, Eagle3Error
from eagle3lib.progress import tqdm

if TYPE_CHECKING:
    from eagle3lib.engine import Engine

LENGTHS, SHARED = (12, 17, 29, 48), 8  # prompts, and how many of their first tokens are the same in all
BEYOND = 17  # tokens of the long prompt behind its first chunk
PREFIX = 256  # tokens of it that are sent again
ROWS = 64  # of the long prompt whose log-probabilities are computed anew
TOP = 5
DUMP_WAIT_S = 30.0
REFERENCE_WAIT_S = 300.0  # for transformers, which began when the server did
# The same row computed twice in another batch, |a - b| / |b|: median and worst row. Another row or layer differs by about its size.
NOISE = {"bfloat16": (0.03, 0.3), "float16": (0.01, 0.1), "float32": (1e-4, 1e-3)}
# A logit is rounded once by the engine, to half a unit in the last place: at most 2^-8 of it in bf16. A log-probability is the
# difference of two such; measured 0.12 where twice that allows 0.27 (SmolLM2 in bf16, logits up to 35). float32: room for another order of sums.
STEP = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18}
PARITY, MARGIN = 0.05, 3.0  # error against transformers, and how much nearer than the neighbouring layers it must be
LARGEST = 4e9  # bytes of weights up to which transformers computes the whole target; of a larger one only the first layers


def require(engine: Engine, name: str, passed: bool, measured: Any, limit: Any, protects: str) -> None:
    """Record one check of the start; CheckFailed, with the log's tail, when it failed."""
    check = engine.checks.add(f"engine.{name}", passed, measured, limit, protects, f"See {engine.log_path}.")
    if not passed:
        raise CheckFailed(f"engine not ready: check {check.line()} Protects against: {protects}.\n{engine.log_tail()}")


@dataclass(frozen=True)
class Dump:
    """One probe: what was sent, the states that came back [T, A+1, H], the greedy token or the log-probabilities (values, ids) [T, TOP]."""

    ids: list[int]
    hidden: torch.Tensor
    token: int
    logprobs: tuple[torch.Tensor, torch.Tensor] | None = None


class Prober:
    """Sends probes and reads their dumps; leaves no file behind."""

    def __init__(self, engine: Engine):
        self.engine, self.numbers = engine, count(1)

    def __call__(self, ids: list[int], logprobs: bool = False) -> Dump:
        engine, rid = self.engine, self.engine.rid(f"probe-{next(self.numbers)}")
        try:
            if logprobs:
                values = engine.logprobs(ids, TOP, rid)
                return Dump(ids, self._read(rid, ids), int(values[1][-1, 0]), values)
            reply = engine.client.generate(ids, rid, {"temperature": 0, "max_new_tokens": 1})
            require(engine, "probe", len(reply.output_ids) == 1, reply.error or f"{len(reply.output_ids)} token", "1 token",
                    "a server that is healthy but fails every request")
            return Dump(ids, self._read(reply.rid, ids), reply.output_ids[0])
        finally:
            for name in {rid, *(f"{rid}-retry{n}" for n in range(1, 4))}:
                engine.delete_dump(name)

    def _read(self, rid: str, ids: list[int]) -> torch.Tensor:
        try:
            return self.engine.read_dump(rid, ids, DUMP_WAIT_S).clone()
        except Eagle3Error as error:
            raise CheckFailed(f"engine not ready: check engine.dump: {error} Log: {self.engine.log_path}\n{self.engine.log_tail()}") from None


def prompts(vocab_size: int) -> list[list[int]]:
    """Token ids that every vocabulary has, the same at every start."""
    draw = random.Random(3)
    ids = [draw.randrange(20, min(vocab_size, 10_000)) for _ in range(SHARED + sum(LENGTHS))]
    starts = [SHARED + sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    return [ids[:SHARED] + ids[at : at + length - SHARED] for at, length in zip(starts, LENGTHS, strict=True)]


def prove(engine: Engine, reference: Future[dict[int, torch.Tensor]]) -> None:
    """Return when every probe came out right; CheckFailed names the one that did not. reference: see `streams`."""
    ask, short = Prober(engine), prompts(engine.vocab_size)
    alone = [ask(ids) for ids in short]
    require(engine, "dump", True, [list(d.hidden.shape) for d in alone], f"{LENGTHS} rows", "a capture that says yes and writes nothing")
    again = ask(short[-1], logprobs=True)
    _prove_same(engine, "same again", [again], alone[-1:], "a server that is not itself, or dumps of an earlier request")
    head_VH = targets.head_weights(engine.settings.target)[0].to(capture.DTYPES[engine.settings.dtype])
    _prove_greedy(engine, alone, head_VH)
    _prove_logprobs(engine, "log-probabilities", again, head_VH)
    _prove_streams(engine, alone[-1], reference)
    _prove_together(engine, ask, alone, head_VH)


def _prove_together(engine: Engine, ask: Prober, alone: list[Dump], head_VH: torch.Tensor) -> None:
    """While one long prompt is computed the short ones queue up, and then form a batch."""
    long = _long_prompt(engine)
    with ThreadPoolExecutor(len(alone) + 1) as pool:
        first = pool.submit(ask, long, True) if long else None
        together = list(pool.map(ask, [d.ids for d in alone]))
        whole = first.result() if first else None
    _prove_same(engine, "in a batch", together, alone, "states of one request saved under another's name in a batch")
    if whole:
        _prove_logprobs(engine, "long prompt", whole, head_VH)
        prefix = ask(long[:PREFIX])
        cut = Dump(prefix.ids, whole.hidden[: len(prefix.ids)], prefix.token)
        _prove_same(engine, "known prefix", [prefix], [cut], "rows missing or wrong through chunked prefill or prefix-cache hits", token=False)


def _long_prompt(engine: Engine) -> list[int]:
    """A prompt of more than one prefill chunk; empty when the context has no room for one, and then there are no chunks either."""
    length = (engine.settings.chunk or 0) + BEYOND
    room = [engine.server_info.get("context_length"), targets.text_config(engine.settings.target).max_position_embeddings,
            engine.settings.max_total_tokens]
    if length + 2 > min(n for n in room if n):
        return []
    draw = random.Random(4)
    return [draw.randrange(20, min(engine.vocab_size, 10_000)) for _ in range(length)]


# ---- the same under other conditions ----


def _prove_same(engine: Engine, name: str, found: list[Dump], wanted: list[Dump], protects: str, token: bool = True) -> None:
    """The same states row by row, within the noise of another batch; and the same greedy token where `token` is set."""
    errors = torch.cat([_row_errors(a.hidden, b.hidden).flatten() for a, b in zip(found, wanted, strict=True)])
    median, worst = float(errors.median()), float(errors.max())
    limits = NOISE[engine.settings.dtype]
    require(engine, name, median <= limits[0] and worst <= limits[1], f"states off by {median:.2g} (median row), {worst:.2g} (worst)",
            f"{limits[0]}, {limits[1]}", protects)
    if token and engine.settings.dtype == "float32":  # elsewhere two candidates may be a rounding apart
        tokens = [[d.token for d in dumps] for dumps in (found, wanted)]
        require(engine, f"{name}, tokens", tokens[0] == tokens[1], tokens[0], tokens[1], protects)


def _row_errors(found_TAH: torch.Tensor, wanted_TAH: torch.Tensor) -> torch.Tensor:
    """|found - wanted| / |wanted| for each row of each stream [T, A+1]."""
    found, wanted = found_TAH.float(), wanted_TAH.float()
    return (found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-12)


# ---- against the engine's own words ----


def _logits(last_TH: torch.Tensor, head_VH: torch.Tensor) -> torch.Tensor:
    """[T, V] in float32; the head is converted piece by piece, as it can be gigabytes."""
    return torch.cat([last_TH.float() @ piece.float().T for piece in head_VH.split(16384)], dim=1)


def _prove_greedy(engine: Engine, dumps: list[Dump], head_VH: torch.Tensor) -> None:
    """The engine's greedy token is the best of `lm_head(last)`, or no further from it than one rounding."""
    logits_NV = _logits(torch.stack([d.hidden[-1, -1] for d in dumps]), head_VH)
    chosen = logits_NV.gather(1, torch.tensor([[d.token] for d in dumps]))[:, 0]
    gap, limit = float((logits_NV.amax(1) - chosen).max()), _tolerance(engine, logits_NV)
    require(engine, "greedy token", gap <= limit, gap, limit, "states that are not those that the engine's lm_head sees")


def _prove_logprobs(engine: Engine, name: str, dump: Dump, head_VH: torch.Tensor) -> None:
    """log_softmax(lm_head(last)) is what the engine itself reports of the same forward pass, at rows that include both ends and
    the borders of the chunks."""
    assert dump.logprobs
    values, ids = dump.logprobs
    rows = _rows_to_check(len(dump.ids), engine.settings.chunk or len(dump.ids))
    logits_NV = _logits(dump.hidden[rows, -1], head_VH)
    ours = torch.log_softmax(logits_NV, -1).gather(1, ids[rows])
    error, limit = float((ours - values[rows]).abs().max()), _tolerance(engine, logits_NV)
    require(engine, name, error <= limit, f"{error:.3g} at worst of {len(rows)} rows of {len(dump.ids)}", f"{limit:.3g}",
            "last hidden state of another layer or row, or normed twice or never")


def _rows_to_check(total: int, chunk: int) -> list[int]:
    borders = {r for at in range(0, total + 1, chunk) for r in (at - 1, at)} | {total - 1}
    spread = {round(i * (total - 1) / ROWS) for i in range(ROWS)}
    return sorted(r for r in borders | spread if 0 <= r < total)


def _tolerance(engine: Engine, logits_NV: torch.Tensor) -> float:
    return STEP[engine.settings.dtype] * float(logits_NV.abs().max()) + 1e-3


# ---- against transformers ----


def start_reference(engine: Engine) -> Future[dict[int, torch.Tensor]]:
    """Compute `streams` in a thread of its own, while the server starts."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="reference")
    future = pool.submit(streams, engine.settings.target, prompts(engine.vocab_size)[-1], engine.settings.capture_layers or [])
    pool.shutdown(wait=False)
    return future


def streams(target: Path, ids: list[int], layers: list[int]) -> dict[int, torch.Tensor]:
    """k -> r_k [T, H] as transformers computes it in float32 (k = L: after the final norm), for the whole target if that is small.

    Of a large one only the layers around the first captured one are loaded: an index convention that is off shows there too.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging as progress

    config = AutoConfig.from_pretrained(target, trust_remote_code=False)
    text, weights = config.get_text_config(), sum(file.stat().st_size for file in target.glob("*.safetensors"))
    depth = text.num_hidden_layers
    if getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        raise NotImplementedError("its weights are quantised")
    if weights > LARGEST:
        shallow = layers[0] + 2
        if weights * 2 * shallow / depth * 2 > psutil.virtual_memory().available:  # float32, and as much again for the embeddings
            raise MemoryError(f"even its first {shallow} layers are too large for the memory that is free")
        depth = text.num_hidden_layers = shallow
        if getattr(text, "layer_types", None):
            text.layer_types = text.layer_types[:shallow]
    progress.disable_progress_bar()  # the start shows its own line
    try:
        model = AutoModelForCausalLM.from_pretrained(target, config=config, dtype=torch.float32, trust_remote_code=False).eval()
    finally:
        progress.enable_progress_bar()
    with torch.inference_mode():
        found = model(input_ids=torch.tensor([ids]), output_hidden_states=True, logits_to_keep=1).hidden_states
    return {k: found[k][0] for k in range(len(found)) if k < depth or weights <= LARGEST}


def _prove_streams(engine: Engine, dump: Dump, reference: Future[dict[int, torch.Tensor]]) -> None:
    try:
        wanted = reference.result(timeout=REFERENCE_WAIT_S)
    except Exception as error:  # an architecture that transformers cannot load, or too little memory
        why = (str(error).splitlines() or [""])[0][:200]
        tqdm.write(f"engine: the captured layers were not compared with transformers ({type(error).__name__}: {why}). "
                   "The plugin's own word and the log-probabilities were.")
        return
    layers = engine.settings.capture_layers or []
    named = [(k, f"r_{k}") for k in layers] + [(max(wanted), "last")] * (len(wanted) > max(layers) + 1)
    for stream, (k, name) in enumerate(named):
        if k in wanted and k + 1 <= max(wanted) or name == "last":
            _prove_stream(engine, name, k, dump.hidden[:, stream], wanted)


def _prove_stream(engine: Engine, name: str, k: int, found_TH: torch.Tensor, wanted: dict[int, torch.Tensor]) -> None:
    errors = {j: float(_row_errors(found_TH, wanted[j]).median()) for j in (k - 1, k, k + 1) if j in wanted}
    own, nearest = errors.pop(k), min(errors.values())
    require(engine, f"layer of {name}", own <= PARITY and own * MARGIN <= nearest, f"{own:.3g} off transformers, neighbours {nearest:.3g}",
            f"{PARITY}, and a third of the neighbours", "layer ids off by one, which differs by model family")
