"""Training with more than one process: torchrun, started and followed from a notebook, and ended with it.

    <run>/training/job.json, vocab.safetensors    what the processes are to do; nothing else is passed to them
    <run>/training/started.json                   they have met: steps done and to do, their process ids
    <run>/training/result.json, error.txt         how it ended; torchrun.log holds what they printed

On several nodes with one file system: `processes` a node, and torchrun's own options (`--nnodes=2 --rdzv-backend=c10d
--rdzv-endpoint=HOST:PORT`) in `options`; the other nodes run the command that is printed. Without options everything stays on the
loopback device. A process of ours cannot outlive the one that started it: it gets SIGTERM, writes a state and ends.
"""

from __future__ import annotations

import ctypes
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle3lib import parallel, runs
from eagle3lib.acceptance import Acceptance
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.progress import tqdm
from eagle3lib.recipe import Recipe
from eagle3lib.steplog import Record
from eagle3lib.store import Store
from eagle3lib.train import Result, interruptible, train

PR_SET_PDEATHSIG = 1  # prctl(2)
SAVING_S = 600.0  # at most this long a process may take to write its state when it is asked to stop
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def run(
    folder: Path, store: Store, target: Path, d2t: Tensor, t2d: Tensor, recipe: Recipe, *, processes: int = 1, options: str = "",
    on_record: Callable[[Record], None] | None = None, heldout: set[str] = frozenset(), **more: Any,  # type: ignore[assignment]
) -> Result:
    """`train.train` in this process, or with `processes` of them (a node) under torchrun. Same arguments, records and result.

    `options`: torchrun's own, for several nodes. Raises what train raises (Eagle3Error, KeyboardInterrupt when asked to stop).
    """
    if processes < 1:
        raise ParamError(f"processes is {processes}, must be at least 1")
    if processes == 1 and not options:
        return train(folder, store, target, d2t, t2d, recipe, heldout=heldout, on_record=on_record, **more)
    if (device := more.get("device", "cpu")) == "cuda" and processes > torch.cuda.device_count():
        raise ParamError(f"processes is {processes}, this machine has {torch.cuda.device_count()} GPU(s): one process a GPU")
    at = folder / "training"
    _write_job(at, {"folder": str(folder), "store": str(store.path), "target": str(target), "recipe": asdict(recipe), "heldout": sorted(heldout),
                    **more, "device": device, "start_from": str(more.get("start_from") or "")}, d2t, t2d)
    command = _command(at / "job.json", processes, options)
    if options:
        print(f"on the other nodes, in the same folder: {shlex.join(['python', *command[1:]])}", flush=True)
    with _torchrun(command, at / "torchrun.log", {} if options else LOOPBACK) as process, interruptible() as interrupted:
        _follow(process, folder, on_record or (lambda record: None), interrupted)
    return _read_result(at, process.returncode)


def _write_job(at: Path, job: Mapping[str, Any], d2t: Tensor, t2d: Tensor) -> None:
    at.mkdir(parents=True, exist_ok=True)
    for name in ("started.json", "result.json", "error.txt"):
        (at / name).unlink(missing_ok=True)
    save_file({"d2t": d2t.contiguous(), "t2d": t2d.contiguous()}, at / "vocab.safetensors")
    runs.write_json(at / "job.json", job)


def _command(job: Path, processes: int, options: str) -> list[str]:
    where = shlex.split(options) if options else ["--standalone", "--local-addr=127.0.0.1"]
    return [sys.executable, "-m", "torch.distributed.run", *where, f"--nproc-per-node={processes}", "--max-restarts=0",
            "-m", "eagle3lib.launch", str(job)]


@contextmanager
def _torchrun(command: list[str], log: Path, more: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Torchrun in a process group of its own; gone when the block is left, whatever happens."""
    env = {**os.environ, **more, "PYTHONPATH": os.pathsep.join([str(runs.repo_root()), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)}
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=env, start_new_session=True, preexec_fn=die_with_parent)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def die_with_parent() -> None:
    """The kernel sends SIGTERM when the thread that started this process is gone (Linux; nothing happens elsewhere)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _follow(process: subprocess.Popen[bytes], folder: Path, on_record: Callable[[Record], None], interrupted: Callable[[], bool]) -> None:
    """Hand on the records as they are written, until torchrun ends. Asked to stop, ask the processes, and wait for their state."""
    started, records, asked = folder / "training" / "started.json", Tail(folder / "metrics.jsonl"), 0.0
    bar: tqdm | None = None
    while True:
        over = process.poll() is not None
        if bar is None and started.is_file():
            facts = runs.read_json(started)
            bar = tqdm(total=facts["total"], initial=facts["step"], desc=f"train, {len(facts['pids'])} processes", unit="step", mininterval=1)
        for record in records.new() if bar is not None else []:
            on_record(record)
            if bar is not None and "loss" in record and record["step"] > bar.n:
                bar.update(record["step"] - bar.n)
        if over:
            break
        if interrupted() and not asked:
            asked = time.monotonic()
            _ask(process, started)
        if asked and time.monotonic() - asked > SAVING_S:
            break
        time.sleep(0.1)
    if bar is not None:
        bar.close()
    if asked:
        raise KeyboardInterrupt


def _ask(process: subprocess.Popen[bytes], started: Path) -> None:
    """SIGTERM to the processes of this machine: through torchrun they would have 30 s and no more."""
    pids = runs.read_json(started)["local_pids"] if started.is_file() else []
    for pid in pids or [process.pid]:
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            pass


class Tail:
    """The lines of a growing file of JSON, each once, only when whole."""

    def __init__(self, path: Path) -> None:
        self.path, self._at = path, 0

    def new(self) -> list[Record]:
        if not self.path.is_file():
            return []
        with self.path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def _read_result(at: Path, code: int | None) -> Result:
    if (at / "error.txt").is_file():
        raise Eagle3Error((at / "error.txt").read_text())
    if code or not (at / "result.json").is_file():
        tail = "\n".join((at / "torchrun.log").read_text(errors="replace").splitlines()[-5:])
        raise Eagle3Error(f"torchrun ended with exit code {code} and no result; its last words ({at / 'torchrun.log'}):\n{tail}")
    found = runs.read_json(at / "result.json")
    heldout = Acceptance(**found["heldout"]) if found["heldout"] else None
    return Result(**{**found, "heldout": heldout, "draft": Path(found["draft"])})


# In each process -------------------------------------------------------------------------------------------------------


def main(job_file: str) -> int:
    """What torchrun runs: train as the job says. 0 done, 1 an error (in error.txt), 130 interrupted."""
    die_with_parent()
    at, job = Path(job_file).parent, runs.read_json(Path(job_file))
    words = load_file(at / "vocab.safetensors")
    more = {name: job[name] for name in ("device", "shape", "tensorboard") if job.get(name) is not None}
    try:
        result = train(
            Path(job["folder"]), Store.open(Path(job["store"])), Path(job["target"]), words["d2t"], words["t2d"], Recipe(**job["recipe"]),
            heldout=set(job["heldout"]), start_from=Path(job["start_from"]) if job["start_from"] else None,
            on_start=lambda group, step, total: _say_started(at, group, step, total), **more)
    except KeyboardInterrupt:
        return 130
    except Eagle3Error as error:
        runs.write_text(at / "error.txt", str(error))
        return 1
    if int(os.environ["RANK"]) == 0:
        runs.write_json(at / "result.json", {**asdict(result), "draft": str(result.draft)})
    return 0


def _say_started(at: Path, group: parallel.Group, step: int, total: int) -> None:
    pids = group.gather((os.uname().nodename, os.getpid()))
    if group.main:
        local = [pid for node, pid in pids if node == os.uname().nodename]
        runs.write_json(at / "started.json", {"step": step, "total": total, "pids": [pid for _, pid in pids], "local_pids": local})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
