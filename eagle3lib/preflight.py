"""Preflight: what must hold before a server is started, found out in a second instead of after a night.

Every function raises Eagle3Error that names what was found, what was wanted and the way out.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import InvalidRequirement, Requirement

from eagle3lib import redact
from eagle3lib.errors import Eagle3Error, ParamError

PLUGIN_DIR = Path(__file__).resolve().parent / "sglang_plugin"
PLUGIN = "eagle3_capture"  # the name of its entry point
SHM_NOTE = "eagle3-shm.json"  # in the server's scratch folder: what its processes hold in /dev/shm, as the warden saw it
SHM = Path("/dev/shm")
# Runs in the engine's interpreter. Looks sglang up without importing it: that alone takes seconds.
PROBE = """
import importlib.metadata as metadata, importlib.util, json, os, platform, sys
def version(name):
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
spec = importlib.util.find_spec("sglang")
places = list(spec.submodule_search_locations or []) if spec else []
points = metadata.entry_points()
group = points.select(group="sglang.srt.plugins") if hasattr(points, "select") else points.get("sglang.srt.plugins", [])
print(json.dumps({
    "executable": sys.executable,
    "launcher": any(os.path.isfile(os.path.join(place, "launch_server.py")) for place in places),
    "plugins": sorted({p.name for p in group}),
    "versions": {"python": platform.python_version(), **{n: version(n) for n in ("sglang", "torch", "transformers", "safetensors")}},
}))
"""


def engine_environment(extra: dict[str, str]) -> dict[str, str]:
    """The server's environment: ours without the secrets (the server needs none), with the plugin's folder on PYTHONPATH."""
    kept = {name: value for name, value in os.environ.items() if value not in redact.secrets() and not name.startswith("SGLANG_HS_")}
    path = os.pathsep.join(filter(None, [str(PLUGIN_DIR), kept.get("PYTHONPATH")]))
    return {**kept, "PYTHONPATH": path, "SGLANG_PLUGINS": PLUGIN, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", **extra}


def interpreter(python: str, cwd: Path, wanted: Sequence[str] = ()) -> dict[str, Any]:
    """What the interpreter that will run the server can see: {"executable", "launcher", "plugins", "versions"}.

    cwd: the folder that the server will run in; it is on Python's search path there, so it must be here too.
    wanted: requirements on sglang, torch, transformers, safetensors or python, as pip writes them.
    """
    found = _ask_interpreter(python, cwd)
    versions = ", ".join(f"{name} {version or 'absent'}" for name, version in found["versions"].items())
    if not found["launcher"]:
        raise Eagle3Error(f"engine interpreter {python}: it has no module sglang.launch_server (found: {versions}); wanted: SGLang 0.5.14. "
                          "Install it there, or set engine_python to the interpreter that has it.")
    if PLUGIN not in found["plugins"]:
        raise Eagle3Error(f"engine interpreter {python}: it does not see the capture plugin's entry point {PLUGIN!r} in {PLUGIN_DIR} "
                          f"(found: {found['plugins']}; {versions}). Is that folder complete and readable?")
    for text in wanted:
        _require_version(python, found["versions"], text)
    return found


def _require_version(python: str, found: dict[str, str | None], text: str) -> None:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ParamError(f"engine versions: {text!r} is no requirement ({str(error).splitlines()[0]}); write for example sglang==0.5.14.") from None
    if requirement.name not in found:
        raise ParamError(f"engine versions: {requirement.name!r} is not looked at; name one of {', '.join(found)}.")
    version = found[requirement.name]
    if version is None or not requirement.specifier.contains(version, prereleases=True):
        raise Eagle3Error(f"engine interpreter {python}: it has {requirement.name} {version or 'not at all'}; wanted: {requirement}. "
                          "Install that version there, or set engine_python to the interpreter that has it.")


def _ask_interpreter(python: str, cwd: Path) -> dict[str, Any]:
    try:
        done = subprocess.run([python, "-c", PROBE], cwd=cwd, env=engine_environment({}), capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Eagle3Error(f"engine interpreter {python}: it cannot be run ({type(error).__name__}: {error}); wanted: a Python 3.11 or 3.12 "
                          f"with SGLang. Set engine_python to one; \"\" means {sys.executable}.") from None
    try:
        return json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise Eagle3Error(f"engine interpreter {python}: asked for its packages, it ended with exit code {done.returncode} ({last}); "
                          "wanted: a Python with SGLang. Set engine_python to one.") from None


# ---- ports ----


def free_port() -> int:
    """A TCP port that nobody uses now, from below the range that Linux hands out to outgoing connections (32768 and up)."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        if _bind_error(port) is None:
            return port


def require_port_free(port: int) -> None:
    if (error := _bind_error(port)) is not None:
        raise Eagle3Error(f"engine port {port}: {(error.strerror or str(error)).lower()}, held by {describe_holders(port)}. "
                          "Stop that process if it is yours, or set engine_port=0 to take a free port.")


def _bind_error(port: int) -> OSError | None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port in TIME_WAIT is free
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return error
    return None


def holders(port: int) -> set[int | None]:
    """Process ids that listen on TCP port `port` of this machine; None stands for a process that we may not see."""
    return {c.pid for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.laddr.port == port}


def describe_holders(port: int) -> str:
    return "; ".join(describe_process(pid) for pid in sorted(holders(port), key=str)) or "nobody that can be seen"


def describe_process(pid: int | None) -> str:
    """"process 12 (python -m http.server), 34 s old": secrets hidden."""
    try:
        process = psutil.Process(pid if pid is not None else -1)
        command = " ".join(process.cmdline())[:120] or process.name()
        return f"process {pid} ({redact.hide(command)}), {time.time() - process.create_time():.0f} s old"
    except (psutil.Error, ValueError):
        return "a process of another user" if pid is None else f"process {pid}, gone by now"


# ---- room ----


def dump_base() -> Path:
    """The folder under which each server run gets its own dump folder: $SGLANG_HS_DUMP_DIR, else shared memory."""
    named = os.environ.get("SGLANG_HS_DUMP_DIR")  # absolute, since the server runs in another folder than we
    return Path(os.path.abspath(os.path.expanduser(named))) if named else (SHM if SHM.is_dir() else Path.home() / ".cache") / "sglang_hs"


def require_room(folder: Path, needed: int, what: str, way_out: str) -> None:
    """needed: bytes. Eagle3Error when the file system of `folder` has less."""
    free = free_bytes(folder)
    if free < needed:
        raise Eagle3Error(f"{what}: {folder} has {free / 1e6:,.0f} MB free, {needed / 1e6:,.0f} MB are needed. {way_out}")


def alive(process: psutil.Process) -> bool:
    """Neither gone nor waiting to be reaped."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def free_bytes(folder: Path) -> int:
    """Free bytes of the file system of `folder`, which need not exist yet."""
    return shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free


def require_device_memory(target: Path, device: str, ranks: int) -> str:
    """Says what is free; Eagle3Error when the weights alone do not fit: in each GPU's memory its share of them, on a CPU all."""
    weights = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    free = _gpu_free() if device == "cuda" else [psutil.virtual_memory().available]
    if not free:
        return "GPU memory could not be read (no nvidia-smi)"
    if device == "cuda" and len(free) < ranks:
        raise Eagle3Error(f"device memory: {ranks} GPUs are asked for (tp_size), {len(free)} are there. Lower it, or set CUDA_VISIBLE_DEVICES.")
    share, least = weights / ranks, min(sorted(free)[-ranks:])
    if share > least:
        raise Eagle3Error(f"device memory: the weights take {share / 1e9:,.1f} GB on each of {ranks} {device} devices, {least / 1e9:,.1f} GB are "
                          "free. End what holds it (nvidia-smi), or spread the weights: engine_args --tp-size.")
    return f"{least / 1e9:,.1f} GB free, {share / 1e9:,.1f} GB of weights on each of {ranks}"


def _gpu_free() -> list[int]:
    """Free bytes of each visible GPU; asked of nvidia-smi, since CUDA itself would take half a gigabyte to answer. [] if it is not there."""
    command = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return [int(line) * 2**20 for line in done.stdout.split()]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []


# ---- an earlier engine of the same run ----


def leftover(run_dir: Path) -> dict[str, Any]:
    """The record of an engine of this run that is still alive or has left something behind; {} when all is clean.

    Only what `engine.json`, and the warden's note that it points to, recorded as ours is looked at. Adds "alive": [process
    ids] and "files": [dump folder, scratch folder, files in shared memory] that are there.
    """
    try:
        record = json.loads((Path(run_dir) / "engine.json").read_text())
        alive = [p["pid"] for p in record.get("processes", []) if same_process(p)]
        folders = [Path(record[name]) for name in ("dump_dir", "scratch") if record.get(name)]
    except (OSError, ValueError, TypeError, AttributeError):
        return {}
    files = _shm_files(folders[-1] / SHM_NOTE) if record.get("scratch") else []
    files += [folder for folder in folders if _is_ours(folder, record.get("nonce", ""))]
    return {**record, "alive": alive, "files": files} if alive or files else {}


def owned(record: dict[str, Any]) -> bool:
    """Is the process that started this server alive? Then it is in use, and no leftover."""
    return same_process(record.get("owner") or {"pid": -1, "created": 0})


def describe_leftover(record: dict[str, Any]) -> str:
    alive = [describe_process(pid) for pid in record["alive"]]
    return ", ".join([*alive, *map(str, record["files"])])


def _shm_files(note: Path) -> list[Path]:
    """Files in shared memory of that server that are still the very same (by inode)."""
    try:
        noted = list(json.loads(note.read_text()).items())
    except (OSError, ValueError, AttributeError):
        return []
    return [SHM / name for name, inode in noted if "/" not in name and _inode(SHM / name) == inode]


def _inode(file: Path) -> int:
    """0 when it is not there (any more)."""
    try:
        return file.stat().st_ino
    except (OSError, ValueError):  # ValueError: a zero byte in the name
        return 0


def same_process(recorded: dict[str, Any]) -> bool:
    """Is {"pid", "created"} still that very process, and not a zombie?"""
    try:
        process = psutil.Process(recorded["pid"])
        return process.status() != psutil.STATUS_ZOMBIE and abs(process.create_time() - recorded["created"]) < 1
    except (psutil.Error, ValueError, KeyError):
        return False


def clean_leftover(run_dir: Path) -> list[str]:
    """End the recorded processes of an earlier engine of this run and delete its files. Says what was done."""
    record = leftover(run_dir)
    victims = [psutil.Process(pid) for pid in record.get("alive", []) if psutil.pid_exists(pid)]
    for number in ("terminate", "kill"):
        for process in victims:
            try:
                getattr(process, number)()
            except psutil.NoSuchProcess:
                continue
        _, victims = psutil.wait_procs(victims, timeout=10)
    for path in record.get("files", []):  # those in shared memory first: their note lies in the scratch folder
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
    return [f"ended process {pid}" for pid in record.get("alive", [])] + [f"deleted {path}" for path in record.get("files", [])]


def _is_ours(folder: Path, nonce: str) -> bool:
    """A dump folder bears its server's nonce as name; a scratch folder is a private one of this user, named by mkdtemp."""
    if not folder.is_dir() or folder.is_symlink() or folder.stat().st_uid != os.getuid():
        return False
    return (len(nonce) >= 8 and folder.name == nonce) or re.fullmatch(r"eagle3-[a-z0-9_]{8}", folder.name) is not None
