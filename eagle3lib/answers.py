"""Answers: the target's replies, kept in an append-only file so that nothing is asked twice and nothing is lost.

One line an answer. The key is the hash of the prompt's token ids and of the scope: everything else that decides the
reply (the target, the server, the sampling parameters). A line is one write to the kernel, so a killed process loses
at most the line under way, and a torn last line is cut off at the next start.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from eagle3lib.errors import Eagle3Error

_HEAD, _KEY_HEX = b'{"key":"', 32


@dataclass(frozen=True)
class Answer:
    """output_ids end with a stop token when finish_reason is "stop"; with "refused" there are none and `error` says why."""

    output_ids: list[int]
    finish_reason: str
    error: str = ""


class AnswerBook:
    """The answers of one scope in one file. Reading is free; writing needs `with book:`, which locks the file."""

    def __init__(self, path: Path, scope: dict[str, Any]):
        self.path, self.scope = Path(path), scope
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.touch()
        self._reader = os.open(self.path, os.O_RDONLY)
        self._scope_bytes = json.dumps(scope, sort_keys=True).encode()
        self._places: dict[bytes, tuple[int, int]] = {}
        self._writer: int | None = None
        self._index()

    @property
    def scope_hash(self) -> str:
        return xxhash.xxh3_128_hexdigest(self._scope_bytes)

    def key(self, prompt_ids: Sequence[int]) -> bytes:
        return xxhash.xxh3_128_digest(self._scope_bytes + np.asarray(prompt_ids, dtype="<i4").tobytes())

    def get(self, prompt_ids: Sequence[int]) -> Answer | None:
        place = self._places.get(self.key(prompt_ids))
        if place is None:
            return None
        line = json.loads(os.pread(self._reader, place[1], place[0]))
        return Answer(line["output_ids"], line["finish_reason"], line.get("error", ""))

    def put(self, prompt_ids: Sequence[int], answer: Answer) -> None:
        """Append one answer; a key that is there already is left as it is. Eagle3Error when the disk refuses."""
        if self._writer is None:
            raise RuntimeError("AnswerBook.put needs `with book:`")
        key = self.key(prompt_ids)
        if key in self._places:
            return
        error = {"error": answer.error} if answer.error else {}
        fields = {"finish_reason": answer.finish_reason, "output_ids": list(answer.output_ids), **error}
        line = _HEAD + key.hex().encode() + b'",' + json.dumps(fields, separators=(",", ":")).encode()[1:] + b"\n"
        at = os.lseek(self._writer, 0, os.SEEK_END)
        try:
            written = os.write(self._writer, line)
        except OSError as error:
            raise self._refused(error.strerror) from None
        if written != len(line):
            os.ftruncate(self._writer, at)
            raise self._refused("no space left")
        self._places[key] = (at, len(line))

    def _refused(self, why: str | None) -> Eagle3Error:
        return Eagle3Error(f"{self.path}: cannot be written ({why}). Free some space and run again: what was answered until now is kept.")

    def __enter__(self) -> AnswerBook:
        self._writer = os.open(self.path, os.O_RDWR | os.O_APPEND)
        try:
            fcntl.flock(self._writer, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._writer)
            self._writer = None
            raise Eagle3Error(f"{self.path} is being written by another process; wait for it, or use another run folder") from None
        self._cut_torn_line()
        self._index()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._writer is not None
        os.fsync(self._writer)
        os.close(self._writer)
        self._writer = None

    def __del__(self) -> None:
        try:
            os.close(self._reader)
        except (OSError, AttributeError):  # never opened
            pass

    def _cut_torn_line(self) -> None:
        assert self._writer is not None
        end = size = os.fstat(self._writer).st_size
        while end:
            start = max(0, end - 65536)
            newline = os.pread(self._writer, end - start, start).rfind(b"\n")
            if newline >= 0:
                end = start + newline + 1
                break
            end = start
        if end != size:
            os.ftruncate(self._writer, end)

    def _index(self) -> None:
        """Where each line is. A line without an end is still being written, or torn: it does not count."""
        self._places.clear()
        at = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                self._places.setdefault(self._key_of(line, number), (at, len(line)))
                at += len(line)

    def _key_of(self, line: bytes, number: int) -> bytes:
        key = line[len(_HEAD) : len(_HEAD) + _KEY_HEX]
        try:
            if not line.startswith(_HEAD) or not line.endswith(b"}\n") or len(key) != _KEY_HEX:
                raise ValueError
            return bytes.fromhex(key.decode())
        except ValueError:
            raise Eagle3Error(f"{self.path}:{number}: not an answer; remove that line (its prompt will be asked again)") from None
