"""Progress bars that look right everywhere: in place in JupyterLab, one clean line in an executed notebook and in a log.

In a kernel they go to stdout: JupyterLab gives everything on stderr the red ground of an error. Elsewhere they go to stderr, so
that what a command prints can be read by another. Plain text, never a widget.
"""

from __future__ import annotations

import sys
from typing import Any

from tqdm.std import tqdm as standard


def in_kernel() -> bool:
    shell = sys.modules.get("IPython")
    return shell is not None and shell.get_ipython() is not None


class tqdm(standard):
    """tqdm, drawn once a second unless told otherwise."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{"file": sys.stdout if in_kernel() else sys.stderr, "mininterval": 1.0, **more})
