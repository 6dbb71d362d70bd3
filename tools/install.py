"""Install what pyproject.toml names. Standard library only; safe to run again.

    python tools/install.py cpu     a machine without a GPU: torch, what SGLang needs on a CPU, SGLang, the data packages
    python tools/install.py gpu     a machine with CUDA: SGLang with its own torch, the data packages
    python tools/install.py data    only the packages that are read for their data (after environment.yml)

Two pip calls cannot be one: SGLang's declared dependencies are CUDA kernels that do not install (or load) on a plain
machine, and the data packages declare evaluators' dependencies that nobody here needs. Both go in with --no-deps.
"""

from __future__ import annotations

import hashlib
import json
import os
import select
import subprocess
import sys
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS = ("Collecting", "  Downloading", "Installing", "Building", "Obtaining", "Processing")
WAITING = "\0"


def main(kind: str) -> None:
    if kind not in ("cpu", "gpu", "data"):
        raise SystemExit(__doc__)
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise SystemExit(f"Python {sys.version.split()[0]} at {sys.executable}: 3.11 or 3.12 is needed. Try `make PYTHON=python3.12 setup`.")
    if is_done(kind):
        print(f"set-up: {sys.prefix} is up to date with pyproject.toml")
        return
    began, asked_for = time.monotonic(), wanted()  # read before pip runs: what is edited meanwhile is not installed
    names = no_deps()
    if kind != "data":
        pip(f"packages of pyproject.toml [{kind},dev]", "-e", f"{ROOT}[{kind},dev]")
    pip("packages that need no dependencies", "--no-deps", *(names["engine"] if kind == "cpu" else []), *names["data"])
    stamp(kind).write_text(asked_for)
    print(f"set-up: done in {time.monotonic() - began:.0f} s")


def no_deps() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["eagle3"]["no-deps"]


def pip(what: str, *arguments: str) -> None:
    """One pip call that shows what it is at and for how long; the first one fetches several GB and takes a few minutes."""
    print(f"set-up: installing {what} (a few minutes the first time)", flush=True)
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    began, shown, text = time.monotonic(), time.monotonic(), ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        while chunk := _read(process.stdout.fileno(), 2.0):
            text = (text + (chunk if chunk != WAITING else ""))[-20_000:]
            if time.monotonic() - shown > (1 if sys.stdout.isatty() else 10):
                shown = time.monotonic()
                step = next((line for line in reversed(text.splitlines()) if line.startswith(STEPS)), "starting").split(" (")[0]
                line = f"  {time.monotonic() - began:4.0f} s  {step.strip()[:90]}"
                print(f"\r{line:<102}" if sys.stdout.isatty() else line, end="" if sys.stdout.isatty() else "\n", flush=True)
    if sys.stdout.isatty():
        print(f"\r{'':<102}\r", end="")
    if process.returncode:
        tail = "\n".join(text.splitlines()[-30:])
        raise SystemExit(f"{tail}\nset-up: pip failed with exit code {process.returncode}; its last lines are above. Run again to go on.")


def _read(pipe: int, seconds: float) -> str:
    """What pip wrote; WAITING when it wrote nothing for so long; "" at its end."""
    if not select.select([pipe], [], [], seconds)[0]:
        return WAITING
    return os.read(pipe, 65536).decode(errors="replace")


def wanted() -> str:
    """Changes when what is installed, this script or the folder change; then pip has something to do again."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    installed = [project["build-system"], project["project"], project["tool"]["eagle3"], project["tool"]["setuptools"]]
    parts = json.dumps(installed).encode() + Path(__file__).read_bytes() + str(ROOT).encode() + sys.version.encode()
    return hashlib.sha256(parts).hexdigest()


def stamp(kind: str) -> Path:
    return Path(sys.prefix) / f".eagle3-{kind}"


def is_done(kind: str) -> bool:
    return sys.prefix != sys.base_prefix and stamp(kind).is_file() and stamp(kind).read_text() == wanted()


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) == 2 else "")
