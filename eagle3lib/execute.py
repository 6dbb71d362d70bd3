"""Execute one notebook through papermill, in a process of its own: `python -m eagle3lib.execute`, the job as JSON on stdin.

A process of its own because papermill changes the working directory of the whole process, and because a runner that
waits for a process can always go on, whatever state the kernel is in. The cells' streams go to its own.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
import time
from typing import Any

from eagle3lib.procs import Family, adopt_orphans
from eagle3lib.runs import ENV_NONCE


def execute(job: dict[str, Any]) -> int:
    """Run job["input"] into job["output"] with job["parameters"] in folder job["cwd"]; job["private"] is a folder for sockets.

    Returns 1 when papermill reports an error.
    """
    import papermill
    from papermill.exceptions import PapermillException, PapermillExecutionError
    from traitlets.config import Config

    try:
        papermill.execute_notebook(
            job["input"],
            job["output"],
            parameters=job["parameters"],
            cwd=job["cwd"],
            kernel_name="python3",
            progress_bar=False,
            stdout_file=sys.stdout,
            stderr_file=sys.stderr,
            start_timeout=300,
            iopub_timeout=900,  # after a cell that printed a lot; a dead kernel is noticed all the same
            coalesce_streams=True,
            store_widget_state=False,
            config=Config({"KernelManager": private_sockets(job["private"])}),
        )
    except PapermillExecutionError:
        return 1  # the notebook's own error: it stands in the notebook
    except (PapermillException, RuntimeError, OSError) as err:
        print(f"{type(err).__name__}: {err}", flush=True)
        return 1
    return 0


def private_sockets(folder: str) -> dict[str, str]:
    """Kernel sockets in a folder of this run instead of TCP ports: no clash among parallel runs, nothing to connect to.

    The names must be given: by default they are `kernel-ipc-1`, ... in the working directory, the same for all.
    """
    return {"transport": "ipc", "ip": f"{folder}/kernel", "connection_file": f"{folder}/kernel.json"}


def follow_parent(family: Family, private: str) -> None:
    """End this process and all its descendants as soon as the runner is gone, however it went; clear its private folder."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        family.end()
        shutil.rmtree(private, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main() -> int:
    adopt_orphans()
    family = Family(os.getpid(), os.environ.get(ENV_NONCE, ""))
    job = json.load(sys.stdin)
    follow_parent(family, job["private"])
    code = execute(job)
    if left := family.end():
        print(f"ended what the notebook left running: {', '.join(left)}", flush=True)
    reap()
    return code


def reap() -> None:
    """Collect adopted children that ended, so that they do not stay in the process table."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


if __name__ == "__main__":
    sys.exit(main())
