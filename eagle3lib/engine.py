"""Engine: one SGLang server of ours. Started, proved, used, and gone without a trace.

    with Engine.start(target, run_dir, capture_layers=[2, 15, 27]) as engine:
        engine.generate(prompts, rids=[engine.rid(name) for name in names], max_new_tokens=1, on_result=collect)

`start` returns only a server that is proved to be ours, ready and capturing (see readiness). Afterwards a dead server is
noticed within two seconds wherever somebody waits for it; `generate` and `logprobs` then start it again, prove it again, and
go on with what is not answered yet, at most max_restarts times. The server's processes belong to a warden (see warden), so
they end with this process however it ends. T: tokens of one prompt; layer ids are residual indices k, for r_k.
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
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

from eagle3lib import capture, preflight, readiness, targets
from eagle3lib.checks import Checks
from eagle3lib.client import Client, Reply
from eagle3lib.errors import Eagle3Error
from eagle3lib.progress import tqdm
from eagle3lib.runs import write_json
from eagle3lib.settings import Settings, choose, dump_bytes

WARDEN = Path(__file__).resolve().parent / "warden.py"
STOP_S = 45.0  # the warden's own patience is shorter
TAIL_LINES = 15
CAUSE = re.compile(r"^(?:\S*(?:Error|Exception)\b.*|.*(?:out of memory|NCCL error|CUDA error|Killed).*)$", re.MULTILINE)
MAX_RESTARTS = 2
Result = TypeVar("Result")


class ServerDied(Eagle3Error):
    """A process of the server has ended although nobody asked it to."""


class Engine:
    """A running server. Make one with `Engine.start`; use it as a context manager.

    url, port, pid (of the launcher), nonce, log_path, dump_dir (None without capture), handshake (of the writing rank),
    server_info (the server's own resolved arguments), checks (what was proved), seconds ({"listening", "proved"}),
    versions (of the engine's interpreter), restarts (what each restart was for). A restart or `switch` renews most of them.
    """

    def __init__(self, settings: Settings, start_timeout_s: float = 300, max_restarts: int = MAX_RESTARTS):
        if not (settings.target / "config.json").is_file():
            raise Eagle3Error(f"engine target {settings.target}: no such model folder, or no config.json in it. Give the folder of a model.")
        config = targets.text_config(settings.target)
        self.hidden_size, self.vocab_size = int(config.hidden_size), int(config.vocab_size)
        self.log_path = settings.run_dir / "engine.log"
        self.start_timeout_s, self.max_restarts, self.restarts = start_timeout_s, max_restarts, list[str]()
        self._nonces: list[str] = []  # of this server and of those before it
        self._port_wanted, self.generation, self._looking = settings.port, 0, threading.Lock()
        self._begin(settings)

    def _begin(self, settings: Settings) -> None:
        """Become a new server, not started yet: a nonce, a port and a dump folder of its own."""
        nonce, port = secrets.token_hex(8), self._port_wanted or preflight.free_port()
        self.settings = settings = replace(settings, nonce=nonce, port=port)
        self._nonces.append(nonce)
        self.nonce, self.port, self.url = nonce, port, f"http://127.0.0.1:{port}"
        self.dump_dir = preflight.dump_base() / nonce if settings.capture_layers is not None else None
        self.generation += 1
        generation = self.generation
        self.client = Client(self.url, self.vocab_size, lambda: self.require_alive(generation))
        self.checks, self.handshake, self.server_info = Checks(), dict[str, Any](), dict[str, Any]()
        self.versions: dict[str, str] = {}  # of the engine's interpreter
        self.seconds: dict[str, float] = {}
        self.pid, self.started = 0, time.monotonic()
        self._log_start = 0  # where this server's part of the log begins
        self._scratch: Path | None = None
        self._warden: subprocess.Popen[bytes] | None = None
        self._processes: list[psutil.Process] = []
        self._exit_code: int | None = None
        self._fingerprint: dict[str, Any] = {}

    # ---- start ----

    @classmethod
    def start(cls, target: Path, run_dir: Path, *, capture_layers: Sequence[int] | None = None, device: str = "auto",
              dtype: str = "bfloat16", python: str = "", port: int = 0, start_timeout_s: float = 300, max_restarts: int = MAX_RESTARTS,
              max_total_tokens: int | None = None, chunked_prefill_size: int | None = None, extra_args: Sequence[str] = (),
              versions: Sequence[str] = ()) -> Engine:
        """Start a server and prove it. Eagle3Error (or ParamError, CheckFailed) says what is wrong; nothing is left behind then.

        capture_layers: residual indices to capture, or None for a plain server. port 0: a free one. python "": this one.
        max_total_tokens: KV cache in tokens; None: 16384 on a CPU, SGLang's choice on a GPU. start_timeout_s: for each start.
        max_restarts: times that a server which died is started again. versions: what `python` must have ("sglang==0.5.14").
        """
        run_dir = Path(run_dir).resolve()
        run_dir.mkdir(parents=True, exist_ok=True)
        engine = cls(choose(target, run_dir, capture_layers=capture_layers, device=device, dtype=dtype, python=python, port=port,
                            max_total_tokens=max_total_tokens, chunked_prefill_size=chunked_prefill_size, extra_args=extra_args,
                            versions=versions), start_timeout_s, max_restarts)
        engine._start()
        return engine

    def _start(self) -> None:
        self._preflight()
        try:
            self._launch()
            readiness.prove(self, self.start_timeout_s)
            self._record("running")
        except BaseException:
            self.stop()
            raise

    def restart(self, why: str = "asked for") -> None:
        """Stop what is left of the server and start it again with the same settings, proved as before.

        Eagle3Error when that was done max_restarts times already, or when the new server would not compute the same states.
        """
        if len(self.restarts) >= self.max_restarts:
            first, *rest = why.splitlines()
            raise Eagle3Error("\n".join([f"{first} It was restarted {len(self.restarts)} times, which is the limit (max_restarts).", *rest]))
        self.restarts.append(why.splitlines()[0])
        before = self.fingerprint
        tqdm.write(f"engine: restart {len(self.restarts)} of at most {self.max_restarts}: {self.restarts[-1]}")
        self.switch(self.settings.capture_layers)
        if self.fingerprint != before:
            self.stop()
            changed = sorted(name for name in before if before[name] != self.fingerprint[name])
            raise Eagle3Error(f"engine: after its restart the server differs in {', '.join(changed)}; its states must not be mixed with "
                              "those before. Start the stage again in a new run.")

    def switch(self, capture_layers: Sequence[int] | None) -> None:
        """Stop this server, clear its shared memory, and start it again in the other mode: capturing these layers, or None."""
        self.stop()
        self._begin(replace(self.settings, capture_layers=None if capture_layers is None else list(capture_layers)))
        self._start()

    def _preflight(self) -> None:
        settings = self.settings
        settings.require_sensible()
        self.versions = preflight.interpreter(settings.python, settings.run_dir, settings.versions)["versions"]
        if (old := preflight.leftover(settings.run_dir)).get("alive"):
            raise Eagle3Error(f"engine: another server of this run is alive: {preflight.describe_process(old['alive'][0])}, port "
                              f"{old['port']}. Stop it (engine.stop(), or end the notebook that started it), or take another run folder.")
        preflight.clean_leftover(settings.run_dir)
        preflight.require_port_free(self.port)
        preflight.require_device_memory(settings.target, settings.device, settings.tp_size)
        if self.dump_dir:
            needed = dump_bytes(settings, self.hidden_size)
            preflight.require_room(self.dump_dir, needed, "engine dump folder", "That is what is under way at most; free some, "
                                   "or set SGLANG_HS_DUMP_DIR to a larger place (Docker: --shm-size).")
            if not settings.high_water:  # half of what is free, so that the other half takes what is under way when the server stops
                self.settings = replace(settings, high_water=max(needed, preflight.free_bytes(self.dump_dir) // 2))

    def _launch(self) -> None:
        if self.dump_dir:
            self._make_dump_dir(self.dump_dir)
        self._scratch = Path(tempfile.mkdtemp(prefix="eagle3-"))
        self._log_start = self.log_path.stat().st_size if self.log_path.exists() else 0
        self.started = time.monotonic()
        order = {"owner": os.getpid(), "command": self.settings.command, "cwd": str(self.settings.run_dir), "log": str(self.log_path),
                 "remove": [str(folder) for folder in (self.dump_dir, self._scratch) if folder],
                 "note": str(self._scratch / preflight.SHM_NOTE)}
        environment = self.settings.environment(self.dump_dir, self.hidden_size, self._scratch)
        with self.log_path.open("ab") as log:
            self._warden = subprocess.Popen([sys.executable, "-I", str(WARDEN)], bufsize=0, stdin=subprocess.PIPE,
                                            stdout=subprocess.PIPE, stderr=log, start_new_session=True, env=environment)
        assert self._warden.stdin and self._warden.stdout
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
        processes = [_identity(p) for p in self._processes if p.is_running()]
        write_json(self.settings.run_dir / "engine.json", {
            "state": state, "owner": _identity(psutil.Process()),
            "nonce": self.nonce, "port": self.port, "pid": self.pid, "process_group": self.pid, "processes": processes,
            "command": self.settings.command, "log": str(self.log_path), "dump_dir": self.dump_dir and str(self.dump_dir),
            "scratch": self._scratch and str(self._scratch), "seconds": self.seconds, "restarts": self.restarts,
            "checks": self.checks.records})

    # ---- is it alive? ----

    def own_pids(self) -> set[int]:
        """The launcher and everything that descends from it."""
        try:
            return {self.pid, *(c.pid for c in psutil.Process(self.pid).children(recursive=True))}
        except psutil.NoSuchProcess:
            return set()

    def require_alive(self, generation: int = 0) -> None:
        """ServerDied with exit code, cause and log tail when a process of the server has ended.

        generation: of the server that the caller talks to; one before a restart is dead. 0: whichever is there now.
        """
        if generation not in (0, self.generation) or self._warden is None:
            raise Eagle3Error("engine: it was stopped; start another one.")
        with self._looking:  # several threads ask, and the warden says it once
            self._look()

    def _look(self) -> None:
        dead = next((p for p in self._processes if not preflight.alive(p)), None)
        patience = 1.0 if dead is not None and dead.pid == self.pid else 0.0  # the warden is about to tell how it ended
        said = self._warden.stdout if self._warden else None  # another thread may be stopping the server
        if self._exit_code is None and said and select.select([said], [], [], patience)[0]:
            self._exit_code = json.loads(said.readline() or b'{"exit": -9}')["exit"]
        if self._exit_code is not None:
            raise self._death(f"the server ended with exit code {self._exit_code}")
        if dead is not None:
            raise self._death(f"process {dead.pid} of the server is dead")

    def _death(self, what: str) -> ServerDied:
        causes = CAUSE.findall(self._log())
        cause = f"; last error in its log: {causes[-1].strip()[:300]}" if causes else ""
        seconds = time.monotonic() - self.started
        return ServerDied(f"engine: {what} {seconds:.0f} s after its start{cause}. Log: {self.log_path}\n{self.log_tail()}")

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
                 temperature: float = 0.0, sampling_seed: int | None = None, concurrency: int = 64, stop_token_ids: Sequence[int] | None = None,
                 progress: str | None = "generate", on_result: Callable[[int, Reply], None] | None = None) -> list[Reply]:
        """Let the server continue each prompt (token ids). Replies come back in order; on_result(index, reply) as they arrive.

        rids: request ids, one a prompt; those of `rid` are dumped in capture mode (read them under reply.rid).
        sampling_seed: SGLang heeds it with enable_deterministic_inference only.
        stop_token_ids: end tokens beside the target's own. progress: the label of the bar, None for none.
        Should the server die, it is started again and asked for what on_result has not dealt with: each index once, in all.
        """
        names = list(rids) if rids is not None else [f"eagle3-{secrets.token_hex(8)}-{i}" for i in range(len(input_ids))]
        if len(set(names)) != len(input_ids):
            raise Eagle3Error(f"engine.generate: {len(set(names))} different request ids for {len(input_ids)} prompts; each needs its own.")
        params: dict[str, Any] = {"temperature": temperature, "max_new_tokens": max_new_tokens}
        if sampling_seed is not None:
            params["sampling_seed"] = sampling_seed
        if stop_token_ids:
            params["stop_token_ids"] = list(stop_token_ids)
        replies = dict[int, Reply]()

        def remaining() -> None:
            todo = [i for i in range(len(input_ids)) if i not in replies]
            now = [self._current(names[i]) for i in todo]

            def arrived(n: int, reply: Reply) -> None:
                if on_result:
                    on_result(todo[n], reply)
                replies[todo[n]] = reply

            self.client.generate_all([input_ids[i] for i in todo], now, params, concurrency, progress, arrived)

        self._surviving(remaining)
        return [replies[i] for i in range(len(input_ids))]

    def _current(self, rid: str) -> str:
        """The request id under which the server that is there now dumps what an earlier one was asked for."""
        head, _, name = rid.partition("-")
        return f"{self.nonce}-{name}" if head in self._nonces else rid

    def _surviving(self, work: Callable[[], Result]) -> Result:
        """Do the work; when the server dies under it, restart the server and do what `work` then finds undone."""
        while True:
            try:
                return work()
            except ServerDied as death:
                self.restart(str(death))

    def logprobs(self, input_ids: list[int], top_k: int = 5, rid: str | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's own top-k log-probabilities at every position: values [T, k] float32, token ids [T, k] int64.

        Row t is the distribution of token t+1. With a request id of `rid` the same forward pass is dumped too; a server that dies
        meanwhile is then an error, as its dumps are gone with it.
        """
        if rid is not None:
            return self.client.logprobs(list(input_ids), rid, top_k)
        return self._surviving(lambda: self.client.logprobs(list(input_ids), f"eagle3-{secrets.token_hex(8)}", top_k))

    def rid(self, name: str) -> str:
        """The request id under which this server dumps the request. name: letters, digits, - and _ (a sample id)."""
        self._folder()
        return capture.dump_rid(self.nonce, name)

    def read_dump(self, rid: str, input_ids: list[int], timeout_s: float | None = None) -> torch.Tensor:
        """Hidden states [T, A+1, H] of a dumped request, checked (see capture.read_dump), in the engine's dtype."""
        return capture.read_dump(self._folder(), rid, input_ids, self.handshake, timeout_s=timeout_s, look=self.require_alive)

    def delete_dump(self, rid: str) -> None:
        capture.delete_dump(self._folder(), rid)

    def _folder(self) -> Path:
        if self.dump_dir is None:
            raise Eagle3Error("engine: this server does not capture; start it with capture_layers.")
        return self.dump_dir

    @property
    def fingerprint(self) -> dict[str, Any]:
        """Everything that makes a hidden state of this server what it is. Two runs may be mixed only if these are equal."""
        self._fingerprint = self._fingerprint or self._describe(self.server_info)
        return self._fingerprint

    def _describe(self, info: dict[str, Any]) -> dict[str, Any]:
        return {"engine": f"sglang {info.get('version')}", "torch": self.versions["torch"].partition("+")[0],  # metadata may leave the build out
                "plugin_sha256": self.handshake.get("plugin_sha256"),
                **{name: info.get(name) for name in ("device", "dtype", "quantization", "kv_cache_dtype", "attention_backend", "tp_size")},
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
        left = [p for p in left if preflight.alive(p)]
        if warden is not None:
            self._record("stopped")
        if left:
            raise Eagle3Error(f"engine: {', '.join(preflight.describe_process(p.pid) for p in left)} did not end; kill it by hand.")

    def _end(self, warden: subprocess.Popen[bytes]) -> None:
        assert warden.stdin and warden.stdout
        try:
            warden.stdin.write(b"stop\n")  # said, not only closed: a fork of this process may hold the pipe open
        except OSError:  # it is ending already
            pass
        warden.stdin.close()
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


def _identity(process: psutil.Process) -> dict[str, Any]:
    return {"pid": process.pid, "created": process.create_time()}
