"""Warden: a small process between us and the server, so that nothing of the server outlives us. Standard library only.

Run by path, never imported by the server. It reads one line of JSON from its stdin (see `Order` fields below), starts the
command in a session of its own, and answers on stdout: {"pid": ...} at once, {"exit": code} when the server ends by itself.
It ends everything that descends from it when
    its stdin says anything or closes (the owner stopped, or died, by kill -9 too),
    its parent is no longer the owner (a fork of the owner may still hold the pipe open),
    it gets SIGTERM or SIGINT, or the server ends (which leaves children behind for seconds).
Should the warden itself be killed, the kernel kills the server (PR_SET_PDEATHSIG) and SGLang's children do the same.

    order: {"owner": pid, "command": [...], "cwd": folder, "log": file, "remove": [folders to delete at the end],
            "note": file for {name in /dev/shm: inode} of what the server holds there, for whoever cleans up after a killed warden}
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
LOOKS_A_SECOND = 5
GRACE_S = 2.5  # between SIGTERM and SIGKILL: SGLang's own orderly end takes 5 s and more, and frees nothing that we need
SHM = Path("/dev/shm")
ENGINE_SHM = re.compile(r"(sglang_|sgl_|psm_|sem\.|nccl-|torch_)")  # what servers leave there when they are killed


class Warden:
    def __init__(self, order: dict):
        self.order = order
        self.stopping = False
        self.exit_code: int | None = None
        self.shm_before = _shm_names()
        self.shm_ours: dict[str, int | None] = {}

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
        self._adopt_shared_memory()
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
        while not self.stopping and self.exit_code is None and os.getppid() == self.order["owner"]:
            if select.select([sys.stdin], [], [], 1 / LOOKS_A_SECOND)[0]:
                return
            self._reap()
            self._adopt_shared_memory()

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

    def _adopt_shared_memory(self) -> None:
        """Note the new files in /dev/shm that our processes hold. Told by inode: a semaphore is mapped under another name."""
        new = {name: _inode(SHM / name) for name in _shm_names() - self.shm_before - self.shm_ours.keys() if ENGINE_SHM.match(name)}
        if new:
            held = set().union(*(_held_shm(pid) for pid in descendants()))
            self.shm_ours |= {name: inode for name, inode in new.items() if inode in held}
            self._note()

    def _note(self) -> None:
        if note := self.order.get("note"):
            try:
                Path(f"{note}.part").write_text(json.dumps(self.shm_ours))
                os.replace(f"{note}.part", note)
            except OSError:  # the folder is being removed, or the disk is full; this is a second safety line only
                pass

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


def _inode(path: Path | str) -> int | None:
    try:
        return os.stat(path).st_ino
    except OSError:
        return None


def _held_shm(pid: int) -> set[int | None]:
    """Inodes of the files under /dev/shm that process pid has open or mapped."""
    try:
        links = [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it ended while we looked
        return set()
    return {_inode(link) for link in links if _in_shm(link)} | {int(line.split()[4]) for line in lines if f"{SHM}/" in line}


def _in_shm(link: str) -> bool:
    try:
        return os.readlink(link).startswith(f"{SHM}/")
    except OSError:
        return False


def _say(message: dict) -> None:
    try:
        print(json.dumps(message), flush=True)
    except OSError:  # the owner is gone; nobody listens
        pass


if __name__ == "__main__":
    Warden(json.loads(os.read(0, 2**20))).run()
