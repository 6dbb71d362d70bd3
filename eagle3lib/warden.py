"""Warden: a small process between us and the server, so that nothing of the server outlives us. Standard library only.

Run by path, never imported by the server. It reads one line of JSON from its stdin (see `Order` fields below), starts the
command in a session of its own, and answers on stdout: {"pid": ...} at once, {"exit": code} when the server ends by itself.
It ends everything that descends from it when
    its stdin says anything or closes (the owner stopped, or died, by kill -9 too),
    its parent is no longer the owner (a fork of the owner may still hold the pipe open),
    it gets SIGTERM or SIGINT, or the server ends (which leaves children behind for seconds).
Should the warden itself be killed, the kernel kills the server (PR_SET_PDEATHSIG) and SGLang's children do the same.

    order: {"owner": pid, "command": [...], "cwd": folder, "log": file, "remove": [folders to delete at the end]}
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
POLL_S = 0.2
GRACE_S = 2.5  # between SIGTERM and SIGKILL: SGLang's own orderly end takes 5 s and more, and frees nothing that we need
SHM = Path("/dev/shm")
ENGINE_SHM = re.compile(r"(sglang_|sgl_|psm_|sem\.|nccl-|torch_)")  # what servers leave there when they are killed


class Warden:
    def __init__(self, order: dict):
        self.order = order
        self.stopping = False
        self.exit_code: int | None = None
        self.shm_before = _shm_names()
        self.shm_ours: set[str] = set()

    def run(self) -> None:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of the server become our children, so they can be found and reaped
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        self.server = self._launch(libc)
        _say({"pid": self.server})
        self._watch()
        if self.exit_code is not None:
            _say({"exit": self.exit_code})
        self.shm_ours |= self._shared_memory()
        self._end_all()
        self._remove()

    def _stop(self, *_: object) -> None:
        self.stopping = True

    def _launch(self, libc: ctypes.CDLL) -> int:
        def die_with_warden() -> None:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

        with open(self.order["log"], "ab") as log:
            process = subprocess.Popen(self.order["command"], cwd=self.order["cwd"], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                       start_new_session=True, preexec_fn=die_with_warden)
        return process.pid

    def _watch(self) -> None:
        rounds = 0
        while not self.stopping and self.exit_code is None and os.getppid() == self.order["owner"]:
            if select.select([sys.stdin], [], [], POLL_S)[0]:
                return
            self._reap()
            rounds += 1
            if rounds % 25 == 0:
                self.shm_ours |= self._shared_memory()

    def _reap(self) -> None:
        """Collect every child that has ended; remember how the server did."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self.server:
                    self.exit_code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return

    def _end_all(self) -> None:
        """SIGTERM to the server and all that descends from it, then SIGKILL to what is left, until nothing is."""
        for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 30.0)):
            _signal(descendants(), number)
            deadline = time.monotonic() + patience
            while time.monotonic() < deadline:
                self._reap()
                left = descendants()
                if not left:
                    return
                if number == signal.SIGKILL:
                    _signal(left, number)  # one may have been born since
                time.sleep(0.05)

    def _shared_memory(self) -> set[str]:
        """Names in /dev/shm that our processes hold and that were not there before they started."""
        held = set().union(*(_held_shm(pid) for pid in descendants()))
        return {name for name in held - self.shm_before if ENGINE_SHM.match(name)}

    def _remove(self) -> None:
        for name in self.shm_ours:
            (SHM / name).unlink(missing_ok=True)
        for folder in self.order["remove"]:
            shutil.rmtree(folder, ignore_errors=True)


def descendants() -> list[int]:
    """Process ids of everything that descends from this process."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (parent := _parent(int(entry))) is not None:
            children.setdefault(parent, []).append(int(entry))
    found, queue = [], [os.getpid()]
    while queue:
        mine = children.get(queue.pop(), [])
        found += mine
        queue += mine
    return found


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
    except (OSError, IndexError, ValueError):  # it ended while we looked
        return None


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue


def _shm_names() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def _held_shm(pid: int) -> set[str]:
    """Names directly in /dev/shm that process pid has open or mapped."""
    paths = set()
    try:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            paths.add(os.readlink(link))
    except OSError:
        return set()
    try:
        paths |= {line.split(maxsplit=5)[-1].strip() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/dev/shm/" in line}
    except OSError:
        pass
    return {Path(path).name for path in paths if os.path.dirname(path) == str(SHM)}


def _say(message: dict) -> None:
    try:
        print(json.dumps(message), flush=True)
    except OSError:  # the owner is gone; nobody listens
        pass


if __name__ == "__main__":
    Warden(json.loads(os.read(0, 2**20))).run()
