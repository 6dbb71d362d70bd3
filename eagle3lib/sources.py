"""Sources: where records come from. Every source is streamed, so memory does not grow with its size.

A source is "chitchat" (human prompts that ship as a package), a file, a folder, a glob, or a data set's name on the
hub. Files: .jsonl .ndjson .json, plain or .gz or .zst; .parquet; .arrow. A file that cannot be read is an error that
names file and line; a record that cannot be used is the business of `conversations`.
"""

from __future__ import annotations

import codecs
import glob
import gzip
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.evalsets import package_file

CHITCHAT = "chitchat"
CHITCHAT_MIN_WORDS = 8
JSON_LINES, JSON_VALUES = (".jsonl", ".ndjson"), (".json",)
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")
NOT_DATA = {"state.json", "dataset_info.json", "dataset_dict.json", "prepared.json"}  # what `datasets` and we put beside data
_CHUNK = 1 << 20


@dataclass(frozen=True)
class Raw:
    """One record as it stands in its source."""

    value: Any
    source: str  # the file's or data set's name: what the accounting is kept by
    where: str  # file and line, or file and row


def read(source: str) -> Iterator[Raw]:
    """All records of one source, in its order. Raises Eagle3Error naming file and line when something is unreadable."""
    if source == CHITCHAT:
        return _chitchat()
    if files := find_files(source):
        return (raw for file in files for raw in _read_file(file))
    if _may_be_hub_name(source):
        return _hub(source)
    raise Eagle3Error(f"prompts {source!r}: no such file, folder or glob. Give a path, a hub name (owner/name), or {CHITCHAT!r}.")


def find_files(source: str) -> list[Path]:
    """The data files that a path, folder or glob means, sorted; [] when nothing has that name."""
    path = Path(source).expanduser()
    if path.is_file():
        if not _kind(path):
            raise ParamError(f"prompts {source!r}: files of type {path.suffix or '(none)'} are not read; known are "
                             f"{', '.join(JSON_LINES + JSON_VALUES + TABLES)}, the first three also with .gz or .zst")
        return [path]
    if path.is_dir():
        found = [p for p in path.rglob("*") if p.is_file() and _kind(p) and p.name not in NOT_DATA]
        if not found:
            raise Eagle3Error(f"prompts {source!r}: the folder holds no .jsonl, .json, .parquet or .arrow file")
        return sorted(found)
    matches = [Path(m) for m in glob.glob(str(path), recursive=True)] if glob.has_magic(str(path)) else []
    return sorted(m for m in matches if m.is_file() and _kind(m))


def digest(source: str) -> str | None:
    """A hash of the bytes behind a source; None when they lie on a hub and cannot be hashed without reading all."""
    files = [_chitchat_file()] if source == CHITCHAT else find_files(source)
    state = xxhash.xxh3_128()
    for file in files:
        with file.open("rb") as handle:
            while block := handle.read(_CHUNK):
                state.update(block)
    return state.hexdigest() if files else None


def _kind(path: Path) -> str:
    """The suffix that decides how the file is read, without the compression; "" when we do not read it."""
    suffixes = path.suffixes[-2:]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffix = suffixes[0] if len(suffixes) == 2 else ""
        return suffix if suffix in JSON_LINES + JSON_VALUES else ""
    return path.suffix if path.suffix in JSON_LINES + JSON_VALUES + TABLES else ""


def _read_file(file: Path) -> Iterator[Raw]:
    kind = _kind(file)
    reader = _json_lines if kind in JSON_LINES else _json_values if kind in JSON_VALUES else _table
    try:
        yield from reader(file)
    except (EOFError, zlib.error, OSError) as error:  # gzip's and pyarrow's errors are OSErrors too
        raise Eagle3Error(f"{file}: cannot be read to its end ({error}); is the file damaged or half-copied?") from None


def _open(file: Path) -> BinaryIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rb")
    if file.suffix == ".zst":
        import pyarrow

        return pyarrow.CompressedInputStream(pyarrow.OSFile(str(file)), "zstd")
    return file.open("rb")


# JSON --------------------------------------------------------------------------------------------------------------


def _lines(file: Path) -> Iterator[bytes]:
    """Lines without their ends. (Our own splitting: a zstd stream is no Python file, and it costs nothing.)"""
    rest = b""
    with _open(file) as handle:
        while block := handle.read(_CHUNK):
            *lines, rest = (rest + block).split(b"\n")
            yield from lines
    if rest:
        yield rest


def _json_lines(file: Path) -> Iterator[Raw]:
    for number, line in enumerate(_lines(file), 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        where = f"{file}:{number}"
        try:
            value = json.loads(line.decode())
        except UnicodeDecodeError as error:
            raise Eagle3Error(f"{where}: not UTF-8 (byte {error.start} is {line[error.start]:#04x}); convert the file to UTF-8") from None
        except json.JSONDecodeError as error:
            raise _broken(where, error.msg, error.colno, error.doc[error.pos :]) from None
        except RecursionError:
            raise _broken(where, "nested too deeply", 1, "") from None
        yield Raw(value, file.name, where)


def _broken(where: str, what: str, column: int, found: str) -> Eagle3Error:
    shown = f", found {found[:40]!r}" if found else ", found the end"
    return Eagle3Error(f"{where}: broken JSON: {what} at column {column}{shown}; repair or remove that record")


def _json_values(file: Path) -> Iterator[Raw]:
    """The items of one JSON array, or JSON values one after the other, decoded piece by piece."""
    text = _JsonText(file)
    in_array = text.peek() == "["
    if in_array:
        text.skip()
        if text.peek() == "]":
            text.skip()
            in_array = False
    while text.peek():
        where = f"{file}:{text.line}"
        yield Raw(text.value(), file.name, where)
        if in_array:
            mark = text.peek()
            if mark not in (",", "]", ""):
                raise text.broken("an array goes on with ',' or ends with ']'")
            if mark:
                text.skip()
            in_array = mark != "]"
    if in_array:
        raise text.broken("the array does not end")


class _JsonText:
    """A window that slides over a JSON file."""

    def __init__(self, file: Path):
        self._file, self._handle, self._decoder = file, _open(file), json.JSONDecoder()
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")()
        self._window, self._start, self._ended, self._size = "", 0, False, _CHUNK
        self.line = 1

    def peek(self) -> str:
        """The next character that is no blank; "" at the end."""
        while True:
            while self._start < len(self._window):
                char = self._window[self._start]
                if not char.isspace():
                    return char
                self.skip()
            if self._ended:
                return ""
            self._more()

    def skip(self) -> None:
        self.line += self._window[self._start] == "\n"
        self._start += 1

    def value(self) -> Any:
        """Decode the value that starts here. A window that ends within a value is enlarged, doubling each time."""
        while True:
            try:
                value, end = self._decoder.raw_decode(self._window, self._start)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.broken(error.msg, error.pos) from None
            except RecursionError:
                raise self.broken("nested too deeply") from None
            else:
                if end < len(self._window) or self._ended:
                    self.line += self._window.count("\n", self._start, end)
                    self._start = end
                    return value
            self._more()

    def broken(self, what: str, position: int | None = None) -> Eagle3Error:
        position = self._start if position is None else position
        line = self.line + self._window.count("\n", self._start, position)
        column = position - self._window.rfind("\n", 0, position)
        return _broken(f"{self._file}:{line}", what, column, self._window[position : position + 40])

    def _more(self) -> None:
        self._window, self._start = self._window[self._start :], 0
        self._size = max(_CHUNK, len(self._window))
        block = self._handle.read(self._size)
        self._ended = not block
        try:
            self._window += self._utf8.decode(block, final=self._ended)
        except UnicodeDecodeError as error:
            raise Eagle3Error(f"{self._file}:{self.line}: not UTF-8 behind this line ({error.reason}); convert the file to UTF-8") from None
        if self._ended:
            self._handle.close()


# tables, hub, package ------------------------------------------------------------------------------------------------


def _table(file: Path) -> Iterator[Raw]:
    row = 0
    for batch in _batches(file):
        for value in batch.to_pylist():
            row += 1
            yield Raw(value, file.name, f"{file}: row {row}")


def _batches(file: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if file.suffix == ".parquet":
            yield from parquet.ParquetFile(file).iter_batches(batch_size=512)
            return
        with pyarrow.memory_map(str(file)) as mapped:
            try:
                yield from ipc.open_stream(mapped)  # what `datasets` writes
            except pyarrow.ArrowInvalid:
                mapped.seek(0)
                reader = ipc.open_file(mapped)
                yield from (reader.get_batch(i) for i in range(reader.num_record_batches))
    except pyarrow.ArrowInvalid as error:
        raise Eagle3Error(f"{file}: not a readable {file.suffix[1:]} file ({error})") from None


def _may_be_hub_name(source: str) -> bool:
    return source.count("/") <= 1 and not source.startswith((".", "/", "~")) and not glob.has_magic(source) and not Path(source).suffix


def _hub(name: str) -> Iterator[Raw]:
    import datasets

    try:
        rows = datasets.load_dataset(name, split="train", streaming=True)
        for number, value in enumerate(rows, 1):
            yield Raw(value, name, f"{name}: row {number}")
    except Exception as error:  # the hub client raises a dozen kinds; all mean the same to the user
        raise Eagle3Error(f"prompts {name!r}: no such file, and the data hub did not give it ({type(error).__name__}). "
                          f"Give the path of a file, or {CHITCHAT!r}.") from None


def _chitchat_file() -> Path:
    return package_file("chitchat-dataset", "chitchat_dataset/dataset.json")


def _chitchat() -> Iterator[Raw]:
    """Real people's prompts out of 7,168 chats between people.

    A turn in the middle of a chat rarely makes sense alone ("haha right"), and the openers are mostly "Hello?". So a
    prompt is any turn that asks something (a question mark) in at least eight words; its messages are joined by line
    ends, as they were typed.
    """
    for chat_id, chat in json.loads(_chitchat_file().read_bytes()).items():
        for number, turn in enumerate(chat["messages"]):
            text = "\n".join(message["text"].strip() for message in turn).strip()
            if "?" in text and len(text.split()) >= CHITCHAT_MIN_WORDS:
                yield Raw({"prompt": text}, CHITCHAT, f"{CHITCHAT}: chat {chat_id} turn {number}")
