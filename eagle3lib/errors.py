"""The errors that users see: one readable line, never a traceback.

A message names the thing, the value found, the limit, and the way out. Further lines (a log tail, a table) may
follow the first one.
"""

from __future__ import annotations

RED, RESET = "\x1b[31m", "\x1b[0m"


class Eagle3Error(Exception):
    """Something that we understand went wrong; the message says what to do. Exit code 1."""

    exit_code = 1

    def _render_traceback_(self) -> list[str]:
        """IPython prints these lines in place of a traceback: in JupyterLab, in papermill, in the HTML."""
        first, *rest = str(self).splitlines() or [type(self).__name__]
        return [f"{RED}{type(self).__name__}: {first}{RESET}", *rest]


class ParamError(Eagle3Error):
    """A parameter is unknown, of the wrong type, or out of range. Exit code 2."""

    exit_code = 2


class CheckFailed(Eagle3Error):
    """A stage's own verification failed: nothing may be built on its results. Exit code 1."""
