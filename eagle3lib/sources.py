"""Sources: where records come from. Every source is streamed, so memory does not grow with its size.

A source is "chitchat" (human prompts that ship as a package), a file, a folder, a glob, or a data set's name on the
hub. Files: .jsonl .ndjson .json, plain or .gz or .zst; .parquet; .arrow. A file that cannot be read is an error that
names the file; one line of it, or a row, that cannot be read is a record with `broken` set. A record that cannot be
used is the business of `conversations`. What the bytes say counts more than the name: a gzip, zstd or Parquet file
is read as what it is, whatever it is called.
"""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import xxhash

from eagle3lib import places
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.evalsets import package_file

CHITCHAT = "chitchat"
CHITCHAT_MIN_WORDS = 8
JSON_LINES, JSON_VALUES = (".jsonl", ".ndjson"), (".json",)
TABLES = (".parquet", ".arrow")
COMPRESSED = (".gz", ".zst")
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
NOT_DATA = {"state.json", "dataset_info.json", "dataset_dict.json", "prepared.json"}  # what `datasets` and we put beside data
OTHER_FILES = (".csv", ".tsv", ".txt", ".xml", ".zip", ".bz2", ".xz", ".tar", ".pt", ".pkl")
_HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/\w[\w.-]*)?)(/(?P<config>\w[\w.-]*))?(:(?P<split>\w+))?")
_CHUNK = 1 << 20
_ROWS = 512  # of a table at a time


@dataclass(frozen=True)
class Raw:
    """One record as it stands in its source."""

    value: Any
    source: str  # the file's or data set's name: what the accounting is kept by
    where: str  # file and line, or file and row
    broken: str = ""  # why the record could not even be read; value is None then


def read(source: str, names: Mapping[Path, str] | None = None) -> Iterator[Raw]:
    """All records of one source, in its order. names: what to call its files (see `names_of`), else by their names. Raises Eagle3Error
    naming file and line when something is unreadable."""
    if source == CHITCHAT:
        return _chitchat()
    if files := find_files(source):
        return (_named(raw, (names or {}).get(file, file.name)) for file in files for raw in _read_file(file))
    if _may_be_hub_name(source):
        return _hub(source)
    raise Eagle3Error(f"prompts {source!r}: no such file, folder or glob. Give a path, a hub name (owner/name), or {CHITCHAT!r}.")


def _named(raw: Raw, name: str) -> Raw:
    return raw if raw.source == name else replace(raw, source=name)


def names_of(sources: Iterable[str]) -> dict[Path, str]:
    """File -> the shortest end of its path that no other file of these sources has: mostly its name."""
    left = {file for source in sources if source != CHITCHAT for file in find_files(source)}
    found: dict[Path, str] = {}
    n = 0
    while left:
        n += 1
        ends = Counter(file.parts[-n:] for file in left)
        told = {file for file in left if ends[file.parts[-n:]] == 1 or len(file.parts) <= n}
        found |= {file: "/".join(file.parts[-n:]) for file in told}
        left -= told
    return found


def find_files(source: str) -> list[Path]:
    """The data files that a path, folder or glob means, sorted; [] when nothing has that name."""
    path = places.located(source)
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
    return [m for m in places.matches(source) if m.is_file() and _kind(m)]


def digest(source: str) -> str | None:
    """A hash of the files behind a source, names within their folder included (rows carry them), or the hub's revision;
    None when neither can be had."""
    files = [_chitchat_file()] if source == CHITCHAT else find_files(source)
    if not files:
        return _hub_revision(source)
    state = xxhash.xxh3_128()
    for file in files:
        state.update(f"\0{file.name}\0{file.stat().st_size}\0".encode())
        with file.open("rb") as handle:
            while block := handle.read(_CHUNK):
                state.update(block)
    return state.hexdigest()


def _kind(path: Path) -> str:
    """The suffix that decides how the file is read, without the compression; "" when we do not read it."""
    suffixes = path.suffixes[-2:]
    if suffixes and suffixes[-1] in COMPRESSED:
        suffix = suffixes[0] if len(suffixes) == 2 else ""
        return suffix if suffix in JSON_LINES + JSON_VALUES else ""
    return path.suffix if path.suffix in JSON_LINES + JSON_VALUES + TABLES else ""


def _head(file: Path) -> bytes:
    with file.open("rb") as handle:
        return handle.read(6)


def _read_file(file: Path) -> Iterator[Raw]:
    try:
        kind = {b"PAR1": ".parquet", b"ARRO": ".arrow"}.get(_head(file)[:4], _kind(file))
        if kind in TABLES:
            yield from _table(file, kind)
        else:
            yield from (_json_lines if kind in JSON_LINES else _json_values)(file)
    except (EOFError, zlib.error, OSError) as error:  # gzip's and pyarrow's errors are OSErrors too
        raise Eagle3Error(f"{file}: cannot be read to its end ({error}); is the file damaged or half-copied?") from None


def _open(file: Path) -> Any:
    """Something with read(), of the bytes without their compression."""
    head = _head(file)
    if head.startswith(GZIP):
        return gzip.open(file, "rb")
    if head.startswith(ZSTD):
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
        if line.strip():
            where = f"{file}:{number}"
            value, broken = _decoded(line)
            yield Raw(value, file.name, where, broken)


def _decoded(line: bytes) -> tuple[Any, str]:
    """(the value of one line, "") or (None, why it has none)."""
    try:
        return json.loads(line.decode()), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {error.start} is {line[error.start]:#04x})"
    except json.JSONDecodeError as error:
        return None, _broken(error.msg, error.colno, error.doc[error.pos :])
    except RecursionError:
        return None, _broken("nested too deeply", 1, "")
    except ValueError as error:  # an integer of more than 4,300 digits
        return None, f"broken JSON: {error}"


def _broken(what: str, column: int, found: str) -> str:
    shown = f", found {found[:40]!r}" if found else ", found the end"
    return f"broken JSON: {what} at column {column}{shown}"


def _json_values(file: Path) -> Iterator[Raw]:
    """The items of one JSON array, or JSON values one after the other, decoded piece by piece."""
    with _open(file) as handle:
        yield from _items(file, _JsonText(file, handle))


def _items(file: Path, text: _JsonText) -> Iterator[Raw]:
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

    def __init__(self, file: Path, handle: Any):
        self._file, self._handle, self._decoder = file, handle, json.JSONDecoder()
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
            except ValueError as error:  # an integer of more than 4,300 digits
                raise self.broken(str(error)) from None
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
        return Eagle3Error(f"{self._file}:{line}: {_broken(what, column, self._window[position : position + 40])}; repair that record")

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


def _table(file: Path, kind: str) -> Iterator[Raw]:
    row = 0
    for batch in _batches(file, kind):
        for value, broken in _values(batch):
            row += 1
            yield Raw(value, file.name, f"{file}: row {row}", broken)


def _batches(file: Path, kind: str) -> Iterator[Any]:
    """Through buffers, not through a memory map: pages of a map would count as memory of ours, up to the whole file."""
    import pyarrow
    from pyarrow import ipc, parquet

    try:
        if kind == ".parquet":
            yield from parquet.ParquetFile(file, buffer_size=_CHUNK).iter_batches(batch_size=_ROWS)
            return
        with pyarrow.OSFile(str(file)) as handle:
            try:
                batches: Iterator[Any] = iter(ipc.open_stream(handle))  # what `datasets` writes
            except pyarrow.ArrowInvalid:
                handle.seek(0)
                reader = ipc.open_file(handle)
                batches = (reader.get_batch(i) for i in range(reader.num_record_batches))
            for batch in batches:
                yield from (batch.slice(at, _ROWS) for at in range(0, batch.num_rows, _ROWS))
    except pyarrow.ArrowInvalid as error:
        raise Eagle3Error(f"{file}: not a readable {kind[1:]} file ({error})") from None


def _without_nulls(value: Any) -> Any:
    """A table gives all its structs all keys that any of them has (the arguments of tools, say), and null for those that a struct
    never had. Items of lists stay."""
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    if isinstance(value, list) and isinstance(next((item for item in value if item is not None), None), (dict, list)):
        return [_without_nulls(item) for item in value]
    return value


def _values(batch: Any) -> Iterator[tuple[Any, str]]:
    """(row, "") or (None, why it cannot be read): text that is not UTF-8, a date that Python does not have."""
    try:
        yield from ((_without_nulls(value), "") for value in batch.to_pylist())
    except (ValueError, OverflowError) as error:
        if batch.num_rows == 1:
            yield None, f"unreadable row: {error}"
            return
        for row in range(batch.num_rows):
            yield from _values(batch.slice(row, 1))


def _may_be_hub_name(source: str) -> bool:
    """name or owner/name, perhaps /config, perhaps :split. A file's suffix means that a file was meant."""
    found = _HUB_NAME.fullmatch(source)
    return found is not None and Path(found["name"]).suffix not in JSON_LINES + JSON_VALUES + TABLES + COMPRESSED + OTHER_FILES


def _hub(source: str) -> Iterator[Raw]:
    import datasets

    found = _HUB_NAME.fullmatch(source)
    assert found is not None  # `read` has seen to it
    try:
        rows = datasets.load_dataset(found["name"], found["config"], split=found["split"] or "train", streaming=True)
        for number, value in enumerate(rows, 1):
            yield Raw(_without_nulls(value), source, f"{source}: row {number}")
    except Exception as error:  # the hub client raises a dozen kinds; all mean the same to the user
        why = (str(error).splitlines() or [""])[0][:200]
        raise Eagle3Error(f"prompts {source!r}: no such file, and the data hub did not give it ({type(error).__name__}: {why}). "
                          f"Give the path of a file, owner/name, owner/name:split, owner/name/config:split, or {CHITCHAT!r}.") from None


def _hub_revision(source: str) -> str | None:
    """The commit that the hub has now; None when it cannot be asked."""
    from huggingface_hub import HfApi

    found = _HUB_NAME.fullmatch(source)
    try:
        return HfApi().dataset_info(found["name"]).sha if found else None
    except Exception:  # offline, no such name, no right: reading will tell
        return None


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
