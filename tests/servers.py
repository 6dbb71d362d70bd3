"""Servers for tests: a Python whose `-m sglang.launch_server` is the scripted one, and the count of what is left behind."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from eagle3lib import preflight

HERE = Path(__file__).parent
LAYERS, CHUNK = [2, 4, 5], 128
START_S = 180.0  # a real start takes 12 s on two idle cores


def fake_python(folder: Path, fault: str = "none") -> str:
    """The path of an interpreter that runs tests/fake_server.py in SGLang's place, and everything else as it is."""
    path = folder / f"python-{fault.replace(' ', '-')}"
    path.write_text(f"""#!/bin/sh
if [ "$1" = -m ]; then shift 2; exec "{sys.executable}" "{HERE / 'fake_server.py'}" "{fault}" "$@"; fi
exec "{sys.executable}" "$@"
""")
    path.chmod(0o755)
    return str(path)


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """All of them have ended within so many seconds (a zombie has ended)."""
    return until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), seconds)


def until(holds: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Witness:
    """Sees what servers leave: processes, listening sockets, files in the dump folder, in shared memory and in the temporary folder.

    A process is ours when our environment variable reached it or it runs in a folder below ours: SGLang's processes overwrite
    their environment with a title. Shared memory is told by what those processes hold.
    """

    def __init__(self, folder: Path):
        self.mark, self.dumps, self.tmp = str(folder), folder / "dumps", folder / "tmp"
        self.tmp.mkdir(parents=True, exist_ok=True)
        self.environment = {"EAGLE3_TEST_WITNESS": self.mark, "SGLANG_HS_DUMP_DIR": str(self.dumps), "TMPDIR": str(self.tmp)}

    def processes(self) -> list[psutil.Process]:
        return [p for p in psutil.process_iter() if self._ours(p)]

    def _ours(self, process: psutil.Process) -> bool:
        try:
            marked = process.environ().get("EAGLE3_TEST_WITNESS") == self.mark or Path(process.cwd()).is_relative_to(self.mark)
            return marked and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def ports(self) -> set[int]:
        pids = {p.pid for p in self.processes()}
        return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN and c.pid in pids}

    def shared_memory(self) -> list[Path]:
        """Files under /dev/shm that one of our processes has mapped."""
        mapped = set()
        for process in self.processes():
            try:
                lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
            except OSError:
                continue
            mapped |= {int(line.split()[4]) for line in lines if "/dev/shm/" in line}
        return [path for path in preflight.SHM.iterdir() if path.exists() and path.stat().st_ino in mapped]

    def files(self) -> list[Path]:
        """What is left in the dump folder, and scratch folders of servers."""
        return [*(self.dumps.iterdir() if self.dumps.exists() else []), *self.tmp.glob("eagle3-*")]

    def require_nothing(self, seconds: float = 10.0, shared: list[Path] = (), ports: set[int] = frozenset()) -> None:
        """No process, no socket, no file of ours is there after so many seconds; nor the shared memory and ports that were seen before."""
        until(lambda: not self.processes() and not self.files(), seconds)
        left = [" ".join(p.cmdline())[:100] for p in self.processes()]
        assert not left and not self.files(), (left, self.files())
        assert not [path for path in shared if path.exists()]
        assert not [port for port in ports if preflight.holders(port)]
