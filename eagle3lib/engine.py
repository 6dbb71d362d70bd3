"""Engine: one SGLang server of ours. Started, proved, used, and gone without a trace.

    with Engine.start(target, run_dir, capture_layers=[2, 15, 27]) as engine:
        engine.generate(prompts, rids=[engine.rid(name) for name in names], max_new_tokens=1, on_result=collect)

`start` returns only a server that is proved to be ours, ready and capturing (see readiness). Afterwards a dead server is
noticed within two seconds wherever somebody waits for it. The server's processes belong to a warden (see warden), so they
end with this process however it ends. T: tokens of one prompt; layer ids are residual indices k, for r_k.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from eagle3lib import capture, preflight, readiness, targets
from eagle3lib.checks import Checks
from eagle3lib.client import Client, Reply
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.runs import write_json

WARDEN = Path(__file__).resolve().parent / "warden.py"
STOP_S = 45.0  # the warden's own patience is shorter
CPU_TOKENS = 16384  # KV cache of a CPU server, in tokens; SGLang would take a share of all memory
TAIL_LINES = 15
CAUSE = re.compile(r"^(?:\S*(?:Error|Exception)\b.*|.*(?:out of memory|NCCL error|CUDA error|Killed).*)$", re.MULTILINE)
FORBIDDEN_ARGS = {"api_key", "admin_api_key", "ssl_keyfile", "enable_ssl_refresh", "tokenizer_path", "nnodes", "load_format"}


@dataclass(frozen=True)
class Settings:
    """What the server was asked to be. `arguments` is both its command line and what /server_info must show."""

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
        if self.chunked_prefill_size is not None:
            chosen["chunked_prefill_size"] = self.chunked_prefill_size
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
                      "SGLANG_HS_LAYERS": ",".join(map(str, self.capture_layers))}
        return preflight.engine_environment(extra)

    def require_sensible(self) -> None:
        named = {word.lstrip("-").partition("=")[0].replace("-", "_") for word in self.extra_args if word.startswith("--")}
        if taken := sorted(named & (self.arguments.keys() | FORBIDDEN_ARGS)):
            raise ParamError(f"engine arguments {', '.join(taken)}: these are set by the engine itself; take them out of extra_args.")
        if self.dtype not in capture.DTYPES:
            raise ParamError(f"engine dtype {self.dtype!r}: one of {', '.join(capture.DTYPES)} is wanted.")
        depth = targets.text_config(self.target).num_hidden_layers
        if (ks := self.capture_layers) is not None and not (ks and ks == sorted(set(ks)) and 0 < ks[0] and ks[-1] < depth):
            raise ParamError(f"capture layers {ks}: ascending residual indices between 1 and {depth - 1} are wanted for a target of "
                             f"{depth} layers.")


class Engine:
    """A running server. Make one with `Engine.start`; use it as a context manager.

    url, port, pid (of the launcher), nonce, log_path, dump_dir (None without capture), handshake (of the writing rank),
    server_info (the server's own resolved arguments), checks (what was proved), seconds ({"listening", "proved"}),
    versions (of the engine's interpreter).
    """

    def __init__(self, settings: Settings):
        config = targets.text_config(settings.target)
        self.settings, self.hidden_size = settings, int(config.hidden_size)
        self.nonce, self.port, self.url = settings.nonce, settings.port, f"http://127.0.0.1:{settings.port}"
        self.log_path = settings.run_dir / "engine.log"
        self.dump_dir = preflight.dump_base() / settings.nonce if settings.capture_layers is not None else None
        self.client = Client(self.url, int(config.vocab_size), self.require_alive)
        self.checks, self.handshake, self.server_info = Checks(), {}, {}
        self.versions: dict[str, str] = {}  # of the engine's interpreter
        self.seconds: dict[str, float] = {}
        self.pid, self.started = 0, time.monotonic()
        self._log_start = 0  # where this server's part of the log begins
        self._scratch: Path | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._processes: list[psutil.Process] = []
        self._exit_code: int | None = None

    # ---- start ----

    @classmethod
    def start(cls, target: Path, run_dir: Path, *, capture_layers: Sequence[int] | None = None, device: str = "auto",
              dtype: str = "bfloat16", python: str = "", port: int = 0, start_timeout_s: float = 300,
              max_total_tokens: int | None = None, chunked_prefill_size: int | None = None, extra_args: Sequence[str] = ()) -> Engine:
        """Start a server and prove it. Eagle3Error (or ParamError, CheckFailed) says what is wrong; nothing is left behind then.

        capture_layers: residual indices to capture, or None for a plain server. port 0: a free one. python "": this one.
        max_total_tokens: KV cache in tokens; None: 16384 on a CPU, SGLang's choice on a GPU. start_timeout_s: for all of it.
        """
        run_dir = Path(run_dir).resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        if max_total_tokens is None and device == "cpu":
            max_total_tokens = CPU_TOKENS
        engine = cls(Settings(
            target=Path(target).resolve(), run_dir=run_dir, nonce=secrets.token_hex(8), python=_absolute(python) or sys.executable,
            device=device, dtype=dtype, port=port or preflight.free_port(), max_total_tokens=max_total_tokens,
            capture_layers=None if capture_layers is None else list(capture_layers), chunked_prefill_size=chunked_prefill_size,
            extra_args=list(extra_args)))
        engine._preflight()
        try:
            engine._launch()
            readiness.prove(engine, start_timeout_s)
            engine._record("running")
        except BaseException:
            engine.stop()
            raise
        return engine

    def _preflight(self) -> None:
        settings = self.settings
        settings.require_sensible()
        self.versions = preflight.interpreter(settings.python, settings.run_dir)["versions"]
        if (old := preflight.leftover(settings.run_dir)).get("alive"):
            raise Eagle3Error(f"engine: another server of this run is alive: {preflight.describe_process(old['alive'][0])}, port "
                              f"{old['port']}. Stop it (engine.stop(), or end the notebook that started it), or take another run folder.")
        preflight.clean_leftover(settings.run_dir)
        preflight.require_port_free(self.port)
        if self.dump_dir:
            tokens = settings.max_total_tokens or 4 * CPU_TOKENS
            row = (len(settings.capture_layers or []) + 1) * self.hidden_size * capture.DTYPES[settings.dtype].itemsize
            preflight.require_room(self.dump_dir, tokens * row, "engine dump folder", f"That holds {tokens:,} tokens under way; free some, "
                                   "or set SGLANG_HS_DUMP_DIR to a larger place (Docker: --shm-size).")

    def _launch(self) -> None:
        if self.dump_dir:
            self._make_dump_dir(self.dump_dir)
        self._scratch = Path(tempfile.mkdtemp(prefix="eagle3-"))
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.started = time.monotonic()
        order = {"owner": os.getpid(), "command": self.settings.command, "cwd": str(self.settings.run_dir), "log": str(self.log_path),
                 "remove": [str(folder) for folder in (self.dump_dir, self._scratch) if folder]}
        environment = self.settings.environment(self.dump_dir, self.hidden_size, self._scratch)
        with self.log_path.open("ab") as log:
            self._warden = subprocess.Popen([sys.executable, "-I", str(WARDEN)], bufsize=0, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=environment)
        self._warden.stdin.write(json.dumps(order).encode() + b"\n")
        answer = self._warden.stdout.readline()
        if not answer:
            raise Eagle3Error(f"engine: the server could not be launched.\n{self.log_tail()}")
        self.pid = json.loads(answer)["pid"]
        self._processes = [psutil.Process(self._warden.pid), psutil.Process(self.pid)]
        self._record("starting")

    def _make_dump_dir(self, folder: Path) -> None:
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700)
        except OSError as error:
            raise Eagle3Error(f"engine dump folder {folder}: {error.strerror}. "
                              "Set SGLANG_HS_DUMP_DIR to a folder that you may write.") from None

    def adopt_children(self) -> None:
        """Watch the server's working processes too: when one dies, the launcher sleeps 5 s before it follows."""
        children = psutil.Process(self.pid).children(recursive=True)
        self._processes += [c for c in children if "sglang::" in "".join(c.cmdline()[:1]) and c not in self._processes]
        self._record("starting")

    def _record(self, state: str) -> None:
        """engine.json: what of ours is running, so that a later run can find and clean it."""
        processes = [{"pid": p.pid, "created": p.create_time()} for p in self._processes if p.is_running()]
        write_json(self.settings.run_dir / "engine.json", {
            "state": state, "nonce": self.nonce, "port": self.port, "pid": self.pid, "processes": processes,
            "command": self.settings.command, "log": str(self.log_path), "dump_dir": self.dump_dir and str(self.dump_dir),
            "seconds": self.seconds, "checks": self.checks.records})

    # ---- is it alive? ----

    def own_pids(self) -> set[int]:
        """The launcher and everything that descends from it."""
        try:
            return {self.pid, *(c.pid for c in psutil.Process(self.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    def require_alive(self) -> None:
        """Eagle3Error with exit code, cause and log tail when a process of the server has ended."""
        if self._warden is None:
            raise Eagle3Error("engine: it was stopped; start another one.")
        dead = next((p for p in self._processes if not _alive(p)), None)
        patience = 1.0 if dead is not None and dead.pid == self.pid else 0.0  # the warden is about to tell how it ended
        if self._exit_code is None and select.select([self._warden.stdout], [], [], patience)[0]:
            self._exit_code = json.loads(self._warden.stdout.readline() or b'{"exit": -9}')["exit"]
        if self._exit_code is None and dead is None:
            return
        ended = f"the server ended with exit code {self._exit_code}"
        what = ended if self._exit_code is not None else f"process {dead.pid} of the server is dead"
        causes = CAUSE.findall(self._log())
        cause = f"; last error in its log: {causes[-1].strip()[:300]}" if causes else ""
        seconds = time.monotonic() - self.started
        raise Eagle3Error(f"engine: {what} {seconds:.0f} s after its start{cause}. Log: {self.log_path}\n{self.log_tail()}")

    def _log(self) -> str:
        try:
            with self.log_path.open("rb") as log:
                log.seek(max(self._log_start, self.log_path.stat().st_size - 2**18))
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def log_tail(self, lines: int = TAIL_LINES) -> str:
        """The last lines of this server's part of the log, indented."""
        return "\n".join(f"  | {line[:300]}" for line in self._log().splitlines()[-lines:])

    # ---- use ----

    def generate(self, input_ids: list[list[int]], *, rids: Sequence[str] | None = None, max_new_tokens: int,
                 temperature: float = 0.0, concurrency: int = 64, stop_token_ids: Sequence[int] | None = None,
                 progress: str | None = "generate", on_result: Callable[[int, Reply], None] | None = None) -> list[Reply]:
        """Let the server continue each prompt (token ids). Replies come back in order; on_result(index, reply) as they arrive.

        rids: request ids, one a prompt; those of `rid` are dumped in capture mode (read them under reply.rid).
        stop_token_ids: end tokens beside the target's own. progress: the label of the bar, None for none.
        """
        names = list(rids) if rids is not None else [f"eagle3-{secrets.token_hex(8)}-{i}" for i in range(len(input_ids))]
        if len(set(names)) != len(input_ids):
            raise Eagle3Error(f"engine.generate: {len(set(names))} different request ids for {len(input_ids)} prompts; each needs its own.")
        params: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        if stop_token_ids:
            params["stop_token_ids"] = list(stop_token_ids)
        return self.client.generate_all(input_ids, names, params, concurrency, progress, on_result)

    def logprobs(self, input_ids: list[int], top_k: int = 5, rid: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's own top-k log-probabilities at every position: values [T, k] float32, token ids [T, k] int64.

        Row t is the distribution of token t+1. With a request id of `rid` the same forward pass is dumped too.
        """
        return self.client.logprobs(list(input_ids), rid or f"eagle3-{secrets.token_hex(8)}", top_k)

    def rid(self, name: str) -> str:
        """The request id under which this server dumps the request. name: letters, digits, - and _ (a sample id)."""
        if self.dump_dir is None:
            raise Eagle3Error("engine: this server does not capture; start it with capture_layers.")
        return capture.dump_rid(self.nonce, name)

    def read_dump(self, rid: str, input_ids: list[int]) -> torch.Tensor:
        """Hidden states [T, A+1, H] of a dumped request, checked (see capture.read_dump), in the engine's dtype."""
        return capture.read_dump(self.dump_dir, rid, input_ids, self.handshake, look=self.require_alive)

    def delete_dump(self, rid: str) -> None:
        capture.delete_dump(self.dump_dir, rid)

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that makes a hidden state of this server what it is. Two runs may be mixed only if these are equal."""
        info = self.server_info
        return {"engine": f"sglang {info['version']}", "torch": self.versions["torch"],
                "plugin_sha256": self.handshake.get("plugin_sha256"),
                **{name: info[name] for name in ("device", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size")},
                "capture_layers": self.settings.capture_layers,
                "capture_meaning": "k: residual stream entering layer k; last: after the final norm",
                "target": targets.fingerprint(self.settings.target)}

    # ---- stop ----

    def stop(self) -> None:
        """End the server and all its processes, delete its dump folder. Eagle3Error when something survives. Twice is harmless."""
        warden, self._warden = self._warden, None
        if warden is not None:
            self._end(warden)
        for folder in filter(None, (self.dump_dir, self._scratch)):
            shutil.rmtree(folder, ignore_errors=True)
        _, left = psutil.wait_procs(self._processes, timeout=5)
        left = [p for p in left if _alive(p)]
        if warden is not None:
            self._record("stopped")
        if left:
            raise Eagle3Error(f"engine: {', '.join(preflight.describe_process(p.pid) for p in left)} did not end; kill it by hand.")

    def _end(self, warden: subprocess.Popen[bytes]) -> None:
        try:
            warden.stdin.write(b"stop\n")  # said, not only closed: a fork of this process may hold the pipe open
            warden.stdin.close()
        except OSError:  # it is ending already
            pass
        try:
            warden.wait(STOP_S)
        except subprocess.TimeoutExpired:
            warden.kill()  # the kernel then kills the server
            warden.wait()
        warden.stdout.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _absolute(python: str) -> str:
    """A path made absolute, since the server runs in the run folder; its links are kept, since a venv is one. A name stays."""
    return os.path.abspath(os.path.expanduser(python)) if "/" in python else python


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
