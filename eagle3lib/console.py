"""What the runner prints: plain lines, and the cells' own streams passed on in readable form."""

from __future__ import annotations

import codecs
import time
from typing import TextIO

from eagle3lib.redact import hide

RED, GREEN, DIM, RESET = "\x1b[31m", "\x1b[32m", "\x1b[2m", "\x1b[0m"
NOISE = "KeyboardInterrupt caught in kernel"  # a kernel may say so while it is shut down; it means nothing
EVERY_S = 10.0  # how often a progress bar's state becomes a line where lines cannot be overwritten


class Console:
    """Lines and streams to one text file. Nothing raises here: a closed terminal must not end a run."""

    def __init__(self, out: TextIO):
        self.out, self.terminal = out, out.isatty()
        self._decoders = [codecs.getincrementaldecoder("utf-8")("replace") for _ in range(2)]
        self._pending, self._shown_at = ["", ""], time.monotonic()

    def say(self, text: str = "", colour: str = "") -> None:
        """Print lines of our own."""
        text = hide(text)
        self._write(f"{colour}{text}{RESET}\n" if colour and self.terminal else f"{text}\n")

    def stream(self, data: bytes, source: int) -> None:
        """Pass on output of a cell (source 0: stdout, 1: stderr).

        On a terminal as it is; in a log only the last state of a line, and of an unfinished one at most every 10 s.
        """
        text = self._decoders[source].decode(data)
        if self.terminal:
            return self._write(hide(text))
        *lines, rest = (self._pending[source] + text).split("\n")
        for line in lines:
            self._line(line)
        if "\r" in rest and time.monotonic() - self._shown_at > EVERY_S:
            self._line(rest)
            rest = ""
        self._pending[source] = rest

    def flush(self) -> None:
        """End the cells' current lines, at the end of a stage."""
        for rest in filter(None, self._pending):
            self._line(rest)
        self._pending = ["", ""]

    def _line(self, line: str) -> None:
        states = [state for state in line.split("\r") if state.strip()]
        if states and NOISE not in states[-1]:
            self._write(f"    {hide(states[-1]).rstrip()}\n")
            self._shown_at = time.monotonic()

    def _write(self, text: str) -> None:
        try:
            self.out.write(text)
            self.out.flush()
        except (OSError, ValueError):
            pass


def duration(seconds: float) -> str:
    """93.4 -> `1 min 33 s`."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"


def size(number: float) -> str:
    """1234567 -> `1.2 MB` (decimal units)."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"
