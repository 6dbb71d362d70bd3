"""Memory does not grow with the input: nothing may keep a row, a text or an id list.

At these sizes the slope of a sound preparation was seen between 0.1 and 0.31 (allocators keep what they once had); a list that keeps
every row's ids adds 2 and more. How much 5 GB take is for a measurement at such a size, not for a test.
"""

from __future__ import annotations

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
ids = " ".join(str(3 + i % 250) for i in range(400)).replace(" ", ", ")

def write(path, rows):  # ids given, one conversation in twenty: rendering and encoding go by batches, and are slow
    with open(path, "w") as file:
        for i in range(rows):
            given = '{"input_ids": [%d, %d, %s], "labels": [-100, %d, %s]}' % (3 + i % 250, 3 + i // 250, ids, 3 + i // 250, ids)
            file.write((given if i % 20 else '{"prompt": "%d", "response": "%s"}' % (i, "word " * 80)) + "\\n")

for number, rows in enumerate((4000, 16000)):
    source = f"{sys.argv[2]}/{number}.jsonl"
    write(source, rows)
    size = prepare.sources.Path(source).stat().st_size
    options = prepare.Options(prompts=source, answer="data", max_prompts=0, max_tokens=8000, decontaminate=False)
    kept = prepare.build(prepare.load(options), chat, f"{sys.argv[2]}/{number}").about["rows_kept"]
    print("result", kept, size, peak * 1024, flush=True)
"""


def test_memory_does_not_grow_with_the_input(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEASURE, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    results = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("result")]
    rows, sizes, peaks = zip(*(map(int, result) for result in results), strict=True)
    assert rows == (4000, 16000)
    slope = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    assert slope < 0.6, f"{slope:.2f} bytes of memory a byte of input, from {peaks[1]:,}"
