"""Progress bars that look right everywhere: in place in JupyterLab, one clean line in an executed notebook and in a log.

They go to stdout: JupyterLab gives everything on stderr the red ground of an error. Plain text, never a widget.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm.std import tqdm as standard


class tqdm(standard):
    """tqdm on stdout, drawn once a second unless told otherwise."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"file": sys.stdout, "mininterval": 1.0, **more})
