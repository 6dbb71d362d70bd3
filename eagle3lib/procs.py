"""Processes: everything that a stage starts is known, and ended with it.

A server that a notebook starts may live in a session of its own and outlive its parent. So the process that executes
the notebook adopts orphans (Linux), and descendants are also noted while they are still in the tree, and found by the
nonce in their environment.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time

import psutil

from eagle3lib.preflight import alive
from eagle3lib.runs import ENV_NONCE

PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def adopt_orphans() -> None:
    """From now on a descendant whose parent dies becomes this process's child. Linux only; nothing happens elsewhere."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Family:
    """A process and all its descendants, also those whose parent is gone by now.

    This process itself may be the root; it is then no member. Call `look` a few times a second: an orphan that nobody
    adopted, that was never seen and that has no nonce in its environment is not found.
    """

    def __init__(self, root: int, nonce: str = ""):
        self._root, self._known = root, dict[int, psutil.Process]()
        self._nonce, self.peak_memory, self._looked = nonce, 0, 0.0
        self._note([psutil.Process(root)])

    def _note(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            if process.pid != os.getpid():
                self._known[process.pid] = process

    def look(self, now: bool = False) -> None:
        """Note the descendants of all known members, and the memory that they hold together [bytes]. At most every 0.2 s."""
        if time.monotonic() - self._looked < 0.2 and not now:
            return
        self._looked = time.monotonic()
        children: dict[int, list[psutil.Process]] = {}
        for process in psutil.process_iter(["ppid"]):
            children.setdefault(process.info["ppid"], []).append(process)
        todo = [*{self._root if self._root == os.getpid() else 0, *(p.pid for p in self.members())} - {0}]
        for pid in todo:  # grows while it is walked
            self._note(found := children.get(pid, []))
            todo += [p.pid for p in found if p.pid not in todo]
        self.peak_memory = max(self.peak_memory, sum(map(_memory, self.members())))

    def members(self) -> list[psutil.Process]:
        """The known members that are alive (a reused process number is not one)."""
        self._known = {pid: p for pid, p in self._known.items() if alive(p)}
        return list(self._known.values())

    def kernel(self) -> psutil.Process | None:
        """The Jupyter kernel among the members."""
        return next((p for p in self.members() if "ipykernel_launcher" in _command(p)), None)

    def interrupt(self) -> bool:
        """Interrupt the kernel as Jupyter does, so that the running cell can clean up. False when there is no kernel."""
        kernel = self.kernel()
        if kernel is None:
            return False
        try:
            group = os.getpgid(kernel.pid)
            os.killpg(group, signal.SIGINT) if group != os.getpgrp() else kernel.send_signal(signal.SIGINT)
        except (ProcessLookupError, psutil.NoSuchProcess):
            return False
        return True

    def end(self, grace_s: float = 5.0) -> list[str]:
        """End every member: wait shortly, SIGTERM, wait, SIGKILL. Returns the names of those that did not go by themselves."""
        self._find_by_nonce()
        self.look(now=True)
        _wait(self, 1.0)
        left = [_name(p) for p in self.members()]
        for sign, patience in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
            for process in self.members():
                try:
                    process.send_signal(sign)
                except psutil.Error:
                    continue
            _wait(self, patience)
        return left

    def _find_by_nonce(self) -> None:
        if self._nonce:
            self._note([p for p in psutil.process_iter() if _environment(p).get(ENV_NONCE) == self._nonce])


def _wait(family: Family, seconds: float) -> None:
    end = time.monotonic() + seconds
    while family.members() and time.monotonic() < end:
        time.sleep(0.05)
        family.look()


def _memory(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.name()} ({process.pid})"
    except psutil.Error:
        return f"process {process.pid}"


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:
        return {}
