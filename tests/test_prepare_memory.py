"""Memory does not grow with the input: 5 GB of JSONL must pass through less than 2 GB."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

MEASURE = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import templates
from eagle3lib import prepare, prepared
from eagle3lib.chat import Chat

prepared._SPILL_TOKENS = 100_000
prepare._BATCH_CHARS = 20_000
peak = 0

def watch():  # anonymous memory: pages of files are the kernel's, and it takes them back when it needs to
    global peak
    while True:
        peak = max(peak, *(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("RssAnon")))
        time.sleep(0.01)

threading.Thread(target=watch, daemon=True).start()
chat = Chat(templates.bytes_of("chatml"))
for number, source in enumerate(sys.argv[3:]):
    options = prepare.Options(prompts=source, answer="data", max_prompts=0, max_tokens=8000, decontaminate=False)
    rows = prepare.build(prepare.load(options), chat, f"{sys.argv[2]}/{number}").about["rows_kept"]
    print(rows, peak * 1024, flush=True)
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    sizes = []
    for megabytes in (1, 1, 10):
        file = tmp_path / f"{len(sizes)}.jsonl"
        lines = [json.dumps({"prompt": f"{len(sizes)} {i}", "response": f"{i} " * 80}) + "\n" for i in range(2000 * megabytes)]
        file.write_text("".join(lines))
        sizes.append(file.stat().st_size)
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path), *(str(tmp_path / f"{n}.jsonl") for n in range(3))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    rows, peaks = zip(*(map(int, line.split()) for line in done.stdout.splitlines()), strict=True)
    assert rows == (2000, 2000, 20000), done.stderr
    slope = (peaks[2] - peaks[1]) / (sizes[2] - sizes[1])
    assert slope < 0.25, f"{slope:.2f} bytes of memory a byte of input, from {peaks[1]:,}; 5 GB would take {peaks[1] + slope * 5e9:,.0f}"
