"""Start: from launch to proved ready, beside the bare server's own time to its first answered request; and clean starts in a row.

    python benchmarks/start.py                       # SmolLM2 on the CPU, three pairs, ratio printed (aim: at most 2)
    python benchmarks/start.py --clean-starts 20     # how often a sound server is refused (aim: never)
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import requests

from eagle3lib import preflight, probes, targets
from eagle3lib.engine import Engine
from eagle3lib.errors import Eagle3Error
from eagle3lib.settings import choose


def bare(target: Path, folder: Path, device: str, dtype: str) -> float:
    """Seconds from launch to the first answer of the same server, started by hand, with no plugin and no proof."""
    settings = choose(target, folder, device=device, dtype=dtype, port=preflight.free_port())
    environment = settings.environment(None, 0, folder) | {"SGLANG_PLUGINS": ""}
    body = {"input_ids": probes.prompts(1000)[0], "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    began = time.monotonic()
    with (folder / "bare.log").open("ab") as log, subprocess.Popen(settings.command, cwd=folder, env=environment, stdout=log, stderr=log) as server:
        try:
            while True:
                try:
                    if requests.post(f"http://127.0.0.1:{settings.port}/generate", json=body, timeout=60).status_code == 200:
                        return time.monotonic() - began
                except requests.RequestException:
                    pass
                if server.poll() is not None:
                    raise Eagle3Error(f"the bare server ended with exit code {server.returncode}; see {folder / 'bare.log'}")
                time.sleep(0.05)
        finally:
            family = psutil.Process(server.pid).children(recursive=True)
            server.terminate()
            server.wait(30)
            psutil.wait_procs(family, timeout=30)  # they live on for seconds, and would slow down what comes next


def ours(target: Path, folder: Path, device: str, dtype: str) -> tuple[float, float, int]:
    """(seconds to listening, seconds to proved, checks) of a capturing server."""
    layers = targets.capture_layers(targets.text_config(target).num_hidden_layers)
    with Engine.start(target, folder, capture_layers=layers, device=device, dtype=dtype, start_timeout_s=1800) as engine:
        return engine.seconds["listening"], engine.seconds["proved"], len(engine.checks)


def compare(target: Path, folder: Path, device: str, dtype: str, pairs: int) -> None:
    ratios = []
    for _ in range(pairs):
        alone = bare(target, folder, device, dtype)
        listening, proved, checks = ours(target, folder, device, dtype)
        ratios.append(proved / alone)
        print(f"bare server to its first answer {alone:.1f} s; ours listening {listening:.1f} s, proved {proved:.1f} s ({checks} checks): "
              f"ratio {ratios[-1]:.2f}", flush=True)
    print(f"ratio, median of {pairs}: {statistics.median(ratios):.2f} (aim: at most 2)")


def clean_starts(target: Path, folder: Path, device: str, dtype: str, count: int) -> int:
    """Start and stop `count` times; returns how many starts were refused."""
    refused = 0
    for number in range(1, count + 1):
        try:
            _, proved, checks = ours(target, folder, device, dtype)
            print(f"start {number} of {count}: {checks} checks passed, {proved:.1f} s", flush=True)
        except Eagle3Error as error:
            refused += 1
            print(f"start {number} of {count}: REFUSED: {error}", flush=True)
    print(f"{count - refused} of {count} clean starts proved, {refused} refused (aim: 0)")
    return refused


def main() -> int:
    parse = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parse.add_argument("--target", default="smollm2")
    parse.add_argument("--device", default="cpu")
    parse.add_argument("--dtype", default="bfloat16")
    parse.add_argument("--pairs", type=int, default=3)
    parse.add_argument("--clean-starts", type=int, default=0, metavar="N")
    args = parse.parse_args()
    target = targets.resolve(args.target)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    with tempfile.TemporaryDirectory(prefix="eagle3-bench-", ignore_cleanup_errors=True) as folder:
        if args.clean_starts:
            return min(1, clean_starts(target, Path(folder), args.device, args.dtype, args.clean_starts))
        compare(target, Path(folder), args.device, args.dtype, args.pairs)
    return 0


if __name__ == "__main__":
    sys.exit(main())
