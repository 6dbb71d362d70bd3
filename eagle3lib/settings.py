"""Settings: what a server is asked to be, and whether that makes sense, before anything is started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eagle3lib import capture, preflight, targets
from eagle3lib.errors import ParamError

CHUNK = {"cpu": 2048, "cuda": 8192}  # prefill chunk of a capturing server [tokens]: what SGLang 0.5.14 takes by itself on such machines
CPU_TOKENS = 16384  # KV cache of a CPU server, in tokens; SGLang would take a share of all memory
MAX_PREFILL_TOKENS = 16384  # SGLang's own limit of a prefill batch
OURS = "these are set by the engine itself; take them out of the engine's arguments."
FORBIDDEN = {"api_key", "admin_api_key", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_keyfile_password", "enable_ssl_refresh",
             "tokenizer_path", "load_format", "config"}
# What a capturing server must not be given, and why. The plugin refuses the same, from the arguments as the server resolved them.
NO_CAPTURE = {
    "speculative_algorithm": "speculation takes the aux hidden states for itself",
    "enable_mixed_chunk": "decode rows would sit among the prompt rows",
    "enable_two_batch_overlap": "a batch would be computed in two halves",
    "enable_dp_attention": "each rank would hold other rows, padded",
    "dp_size": "each replica would hold other rows",
    "data_parallel_size": "each replica would hold other rows",
    "pp_size": "the captured layers would live in several processes",
    "pipeline_parallel_size": "the captured layers would live in several processes",
    "attn_cp_size": "each rank would hold a part of the rows",
    "enable_hierarchical_cache": "a prefix taken from a cache has no rows to dump",
    "cuda_graph_config": "a replayed CUDA graph runs no Python, so nothing would be written",
    "cuda_graph_backend_prefill": "a replayed CUDA graph runs no Python, so nothing would be written",
    "cuda_graph_backend_decode": "a replayed CUDA graph runs no Python, so nothing would be written",
}
NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


@dataclass(frozen=True)
class Settings:
    """What the server was asked to be. `arguments` is both its command line and what /server_info must show.

    versions: what the engine's interpreter must have, as requirements ("sglang==0.5.14"). high_water: bytes in the dump
    folder above which the server waits before it computes on.
    """

    target: Path
    run_dir: Path
    nonce: str
    python: str
    device: str  # "cpu" or "cuda"
    dtype: str
    port: int
    capture_layers: list[int] | None
    max_total_tokens: int | None
    chunked_prefill_size: int | None
    extra_args: list[str]
    versions: tuple[str, ...] = ()
    high_water: int = 0

    @property
    def chunk(self) -> int | None:
        """Longest piece of a prompt in one forward pass [tokens]; a capturing server is always told it. None: SGLang's choice."""
        if self.chunked_prefill_size is None and self.capture_layers is not None:
            return CHUNK[self.device]
        return self.chunked_prefill_size

    @property
    def tp_size(self) -> int:
        """GPUs of this machine that share the weights."""
        return local_ranks(self.extra_args)

    @property
    def arguments(self) -> dict[str, Any]:
        chosen: dict[str, Any] = {
            "model_path": str(self.target), "served_model_name": self.nonce, "host": "127.0.0.1", "port": self.port,
            "device": self.device, "dtype": self.dtype, "sampling_backend": "pytorch", "grammar_backend": "none",
            "attention_backend": "torch_native" if self.device == "cpu" else "triton",
            "skip_server_warmup": True, "log_level_http": "warning"}
        if self.device == "cpu":
            # sleep_on_idle: the scheduler would otherwise spin a whole core while it waits
            chosen |= {"disable_cuda_graph": True, "disable_overlap_schedule": True, "sleep_on_idle": True, "mem_fraction_static": 0.3}
        if self.capture_layers is not None:
            chosen |= {"disable_radix_cache": True, "disable_cuda_graph": True, "disable_custom_all_reduce": True}
        if self.max_total_tokens is not None:
            chosen["max_total_tokens"] = self.max_total_tokens
        if self.chunk is not None:
            chosen["chunked_prefill_size"] = self.chunk
        return chosen

    @property
    def command(self) -> list[str]:
        words = [self.python, "-m", "sglang.launch_server"]
        for name, value in self.arguments.items():
            words += [f"--{name.replace('_', '-')}"] + ([] if value is True else [str(value)])
        return words + self.extra_args

    def environment(self, dump_dir: Path | None, hidden_size: int, scratch: Path) -> dict[str, str]:
        """scratch: a private TMPDIR, since SGLang leaves its socket files there; compile caches stay where they were."""
        compiled = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        # gRPC stays off, but SGLang refuses ports above 55535 unless that other port is named. /health tells the server's state
        # only: its own test request is lost, and 503 the answer, when it arrives just as another one ends. Our probes are the test.
        extra = {"TMPDIR": str(scratch), "TORCHINDUCTOR_CACHE_DIR": compiled, "SGLANG_ENABLE_GRPC": "0", "SGLANG_GRPC_PORT": "1",
                 "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        if self.device == "cpu":
            # Threads that wait for each other spin briefly, then sleep. SmolLM2, 64 requests, two cores: 279 tokens/s, 74 beside another
            # busy process. With OMP_WAIT_POLICY=PASSIVE 93; spinning for milliseconds, as by default, 286, but 8 to 17 on a shared machine.
            extra |= {"SGLANG_USE_CPU_ENGINE": "1", "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT", "20000")}
        if self.capture_layers is not None:
            extra |= {"SGLANG_HS_DUMP_DIR": str(dump_dir), "SGLANG_HS_NONCE": self.nonce, "SGLANG_HS_HIDDEN_SIZE": str(hidden_size),
                      "SGLANG_HS_LAYERS": ",".join(map(str, self.capture_layers)), "SGLANG_HS_HIGH_WATER": str(self.high_water)}
        return preflight.engine_environment(extra)

    def require_sensible(self) -> None:
        """ParamError when the arguments contradict the engine, one another, or the capture; it names the right value."""
        given = parse_arguments(self.extra_args)
        if taken := sorted(given.keys() & (self.arguments.keys() | FORBIDDEN)):
            raise ParamError(f"engine arguments {', '.join(taken)}: {OURS}")
        itemsize(self.dtype)
        require_sensible_nodes(given)
        require_sensible_speculation(given, self.device)
        if self.capture_layers is not None:
            require_layers(self.capture_layers, targets.text_config(self.target).num_hidden_layers)
            require_capturable(given)


def choose(target: Path, run_dir: Path, *, capture_layers: Sequence[int] | None = None, device: str = "auto", dtype: str = "bfloat16",
           python: str = "", port: int = 0, max_total_tokens: int | None = None, chunked_prefill_size: int | None = None,
           extra_args: Sequence[str] = (), versions: Sequence[str] = ()) -> Settings:
    """Settings from what a caller says (see Engine.start), with what is left open filled in."""
    if device not in ("auto", *CHUNK):
        raise ParamError(f"engine device {device!r}: auto, {' or '.join(CHUNK)} is wanted.")
    if not 0 <= port < 65536:
        raise ParamError(f"engine port {port}: 1 to 65535 is wanted, or 0 for any free one.")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if max_total_tokens is None and device == "cpu":
        max_total_tokens = CPU_TOKENS
    return Settings(target=Path(target).resolve(), run_dir=run_dir, nonce="", python=_absolute(python) or sys.executable, device=device,
                    dtype=dtype, port=port, capture_layers=None if capture_layers is None else list(capture_layers),
                    max_total_tokens=max_total_tokens, chunked_prefill_size=chunked_prefill_size, extra_args=list(extra_args),
                    versions=tuple(versions))


def dump_bytes(settings: Settings, hidden_size: int) -> int:
    """Room that the dump folder must have: four prefill batches and the longest request, which is what may be under way while the
    server waits for the client. A batch takes at most max_prefill_tokens (16384 in SGLang) or one chunk, if that is more."""
    row = (len(settings.capture_layers or []) + 1) * hidden_size * itemsize(settings.dtype)
    batch = max(settings.chunk or 0, MAX_PREFILL_TOKENS)
    return (settings.max_total_tokens or 5 * batch) * row


def _absolute(python: str) -> str:
    """A path made absolute, since the server runs in the run folder; its links are kept, since a venv is one. A name stays."""
    return os.path.abspath(os.path.expanduser(python)) if "/" in python else python


def itemsize(dtype: str) -> int:
    """Bytes of one number. ParamError for a dtype that a server cannot be asked for."""
    if dtype not in capture.DTYPES:
        raise ParamError(f"engine dtype {dtype!r}: one of {', '.join(capture.DTYPES)} is wanted.")
    return capture.DTYPES[dtype].itemsize


def local_ranks(words: list[str]) -> int:
    """GPUs of this machine that share the weights of a server with these arguments."""
    given = parse_arguments(words)
    ranks = given.get("tp_size") or given.get("tp") or given.get("tensor_parallel_size") or "1"
    return max(1, int(ranks) // _number(given, "nnodes", 1)) if ranks.isdigit() else 1


def parse_arguments(words: list[str]) -> dict[str, str]:
    """["--tp-size", "8", "--flag", "--x=1"] as {"tp_size": "8", "flag": "", "x": "1"}. ParamError on a value without a name."""
    found: dict[str, str] = {}
    name = ""
    for word in words:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            found[name := name.replace("-", "_")] = value
        elif name:
            found[name] = f"{found[name]} {word}".strip()
        else:
            raise ParamError(f"engine arguments: {word!r} stands before any --name; write --name value.")
    return found


def require_layers(ks: list[int], depth: int) -> None:
    if not (ks and ks == sorted(set(ks)) and 0 < ks[0] and ks[-1] < depth):
        raise ParamError(f"capture layers {ks}: ascending residual indices between 1 and {depth - 1} are wanted for a target of {depth} layers.")


def require_capturable(given: dict[str, str]) -> None:
    for name in sorted(given.keys() & NO_CAPTURE.keys()):
        if given[name] not in ("1", "disabled"):  # one replica, one stage: harmless
            raise ParamError(f"engine argument {name} ({given[name] or 'on'}): a server that captures cannot have it, because {NO_CAPTURE[name]}. "
                             "Take it out for the extraction.")


def require_sensible_nodes(given: dict[str, str]) -> None:
    nodes = _number(given, "nnodes", 1)
    if nodes > 1 and "dist_init_addr" not in given:
        raise ParamError(f"engine argument nnodes is {nodes}, but dist_init_addr is missing: give --dist-init-addr HOST:PORT of this node.")
    if _number(given, "node_rank", 0, least=0) != 0:
        raise ParamError(f"engine argument node_rank is {given['node_rank']}: the engine is node 0. Start `sglang.launch_server --node-rank "
                         f"{given['node_rank']}` on the other machine by hand, with the same arguments.")


def require_sensible_speculation(given: dict[str, str], device: str) -> None:
    """What SGLang 0.5.14 (arg_groups/speculative_hook.py, speculative/eagle_utils.py) would change without a word, or die of."""
    named = sorted(name for name in given if name.startswith("speculative_") and name != "speculative_algorithm")
    algorithm = given.get("speculative_algorithm", "")
    if not algorithm:
        if named:
            raise ParamError(f"engine arguments {', '.join(named)}: without speculative_algorithm the server ignores them. "
                             "Add --speculative-algorithm EAGLE3, or take them out.")
        return
    if device == "cpu":
        raise ParamError(f"engine argument speculative_algorithm {algorithm}: SGLang cannot speculate on a CPU. Take it out, or use a GPU.")
    if algorithm.upper() not in ("EAGLE", "EAGLE3"):
        return
    if not given.get("speculative_draft_model_path") and algorithm.upper() == "EAGLE3":
        raise ParamError("engine argument speculative_draft_model_path is missing: EAGLE3 needs the folder of a draft.")
    missing = [name for name in NUMBERS if name not in given]
    if len(missing) in (1, 2):
        raise ParamError(f"engine arguments {', '.join(sorted(set(NUMBERS) - set(missing)))} are given without {', '.join(missing)}: "
                         "give all three, or none for SGLang's own choice.")
    if not missing:
        _require_tree(*(_number(given, name, 0) for name in NUMBERS))


def _require_tree(steps: int, topk: int, tokens: int) -> None:
    """A draft of `steps` levels with topk branches has topk + (steps - 1) topk^2 candidates; `tokens` counts the root too."""
    what = f"engine argument speculative_num_draft_tokens is {tokens} with speculative_num_steps {steps} and speculative_eagle_topk {topk}"
    most = 1 + topk + (steps - 1) * topk**2
    if topk == 1 and tokens != steps + 1:
        raise ParamError(f"{what}: a chain has one token a step and the root, so {steps + 1} is the right value (SGLang would change it silently).")
    if tokens < steps + 1:
        raise ParamError(f"{what}: the deepest branch could never be verified; at least {steps + 1} is the right value.")
    if tokens > most:
        raise ParamError(f"{what}: that tree has only {most - 1} candidates and the root; at most {most} is the right value.")


def _number(given: dict[str, str], name: str, default: int, least: int = 1) -> int:
    text = given.get(name, str(default))
    if name in given and not (text.isdigit() and int(text) >= least):
        raise ParamError(f"engine argument {name} is {text!r}: a whole number of at least {least} is wanted.")
    return int(text)
