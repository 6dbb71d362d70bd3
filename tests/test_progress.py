"""Bars never mix with what a command prints; in a kernel they are no red error (test_browser looks at that one)."""

from __future__ import annotations

import subprocess
import sys

from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook

BAR = "from eagle3lib.progress import tqdm\nfor _ in tqdm(range(3), desc='bar', mininterval=0): pass\nprint('result')"


def test_a_commands_output_is_its_own():
    done = subprocess.run([sys.executable, "-c", BAR], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n" and "bar: 100%" in done.stderr


def test_in_a_kernel_a_bar_is_no_error():
    notebook = new_notebook(cells=[new_code_cell(BAR)], metadata={"kernelspec": {"name": "python3", "display_name": "x"}})
    NotebookClient(notebook, timeout=120).execute()
    assert {o.name for o in notebook.cells[0].outputs} == {"stdout"}
