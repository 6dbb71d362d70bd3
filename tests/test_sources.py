"""Files of every kind give the same records; damaged ones give an error that names file and line."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import hub
import pyarrow
import pyarrow.parquet
import pytest

from eagle3lib import sources
from eagle3lib.conversations import parse
from eagle3lib.errors import Eagle3Error, ParamError

RECORDS = [{"prompt": f"question {i} \u2028 ü", "response": "x" * i} for i in range(5)]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS).encode()


def values(source: Path | str) -> list:
    """The records; a broken one is an error."""
    found = list(sources.read(str(source)))
    for raw in found:
        if raw.broken:
            raise Eagle3Error(f"{raw.where}: {raw.broken}")
    return [raw.value for raw in found]


def zst(data: bytes) -> bytes:
    out = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(out, "zstd") as stream:
        stream.write(data)
    return out.getvalue().to_pybytes()


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES), ("a.ndjson", LINES), ("a.jsonl", LINES.rstrip()), ("a.jsonl", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl", LINES.replace(b"\n", b"\r\n\n")), ("a.jsonl.gz", gzip.compress(LINES)), ("a.jsonl.zst", zst(LINES)),
        ("a.json", LINES), ("a.json", json.dumps(RECORDS, indent=2).encode()), ("a.json", b" \n" + json.dumps(RECORDS).encode() + b"\n "),
        ("a.json.gz", gzip.compress(json.dumps(RECORDS).encode())), ("a.json.zst", zst(json.dumps(RECORDS).encode())),
        # several members, as `cat a.gz b.gz` makes them
        ("a.jsonl.gz", gzip.compress(LINES[:40]) + gzip.compress(LINES[40:])), ("a.jsonl.zst", zst(LINES[:40]) + zst(LINES[40:])),
        # names that lie about the bytes
        ("a.jsonl", gzip.compress(LINES)), ("a.jsonl", zst(LINES)), ("a.jsonl.gz", LINES), ("a.jsonl.gz", zst(LINES)), ("a.json.zst", LINES),
    ],
)  # fmt: skip
def test_json_files(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    assert values(tmp_path / name) == RECORDS


def test_json_is_read_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values longer than the window, and numbers that end at its edge."""
    monkeypatch.setattr(sources, "_CHUNK", 7)
    wanted = [12345, {"a": "ü" * 100}, [1, [2, 3.25]], "x", 1234567, None]
    file = tmp_path / "a.json"
    file.write_text(json.dumps(wanted, ensure_ascii=False))
    assert values(file) == wanted
    file.write_text("\n".join(json.dumps(w) for w in wanted))
    assert values(file) == wanted
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps(w) for w in wanted))
    assert values(tmp_path / "a.jsonl") == wanted
    file.write_text("[]")
    assert values(file) == []


def test_a_table_teaches_what_the_same_records_as_lines_teach(tmp_path: Path) -> None:
    """A table's structs hold null for every key that another record has; what was never in the data must not come out."""
    def asks(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        call = {"id": f"of {name}", "type": "function", "function": {"name": name, "arguments": arguments}}
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "content": "r", "name": name}, {"role": "assistant", "content": "a"}]

    tools = [{"type": "function", "function": {"name": "find", "parameters": {"properties": {"place": {"type": "string", "enum": ["a", "b"]}}}}}]
    records = [
        {"messages": asks("find", {"place": "Rome", "more": {"near": 1}}), "tools": tools},
        {"messages": asks("add", {"numbers": [1, 2], "pairs": [{"x": 1}, {"y": 2}]}), "tools": None},
        {"messages": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pyarrow.ipc.new_stream(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    wanted = [parse(value).canonical for value in values(tmp_path / "a.jsonl")]
    for name in ("a.parquet", "a.arrow"):
        assert [parse(value).canonical for value in values(tmp_path / name)] == wanted


def test_tables(tmp_path: Path) -> None:
    table = pyarrow.Table.from_pylist(RECORDS)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    assert values(tmp_path / "a.parquet") == RECORDS
    with pyarrow.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table)
    assert values(tmp_path / "a.arrow") == RECORDS
    datasets.Dataset.from_list(RECORDS).save_to_disk(str(tmp_path / "saved"))
    assert values(tmp_path / "saved") == RECORDS


def test_folders_and_globs_are_sorted_and_keep_file_names(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    for i, name in enumerate(["b.jsonl", "a.json", "sub/c.jsonl", "notes.txt"]):
        (tmp_path / name).write_text(json.dumps({"prompt": f"{i}"}))
    assert [(r.source, r.value["prompt"]) for r in sources.read(str(tmp_path))] == [("a.json", "1"), ("b.jsonl", "0"), ("c.jsonl", "2")]
    assert [r.value["prompt"] for r in sources.read(str(tmp_path / "**" / "*.jsonl"))] == ["0", "2"]
    assert [r.where for r in sources.read(str(tmp_path / "b.jsonl"))] == [f"{tmp_path / 'b.jsonl'}:1"]


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.jsonl", LINES + b'{"prompt": "x"\n', r"a\.jsonl:6: broken JSON: .* at column 15, found the end"),
        ("a.jsonl", b"{}\n{'a': 1}\n{}", r"a\.jsonl:2: broken JSON: .* at column 2, found \"'a': 1}\""),
        ("a.jsonl", b'{}\n{"a": "\xff"}', r"a\.jsonl:2: not UTF-8 \(byte 7 is 0xff\)"),
        ("a.jsonl", b"{}\n" + b"[" * 200_000, r"a\.jsonl:2: broken JSON: nested too deeply"),
        ("a.json", b'[\n{"a": 1},\n{"a": oops}\n]', r"a\.json:3: broken JSON: .* at column 7, found 'oops"),
        ("a.json", b'[\n{"a": 1}\n{"a": 2}]', r"a\.json:3: broken JSON: an array goes on with ','"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n', r"a\.json:3: broken JSON: the array does not end"),
        ("a.json", b'[{"a": 1}, ', r"a\.json:1: broken JSON: the array does not end"),
        ("a.json", b'[{"a": "\xff"}]', r"a\.json:1: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES * 100)[:-20], r"a\.jsonl\.gz: cannot be read to its end"),
        ("a.jsonl.zst", zst(LINES * 100)[:-3], r"a\.jsonl\.zst: cannot be read to its end"),
        ("a.jsonl.gz", gzip.compress(LINES * 100) + b"rubbish", r"a\.jsonl\.gz: cannot be read to its end"),
        ("a.jsonl.gz", b"\x1f\x8c" + gzip.compress(LINES)[2:], r"a\.jsonl\.gz:1: not UTF-8"),
        ("a.jsonl", b'{"n": ' + b"7" * 5000 + b"}", r"a\.jsonl:1: broken JSON: .*digits"),
        ("a.json", b'[{"n": ' + b"7" * 5000 + b"}]", r"a\.json:1: broken JSON: .*digits"),
        ("a.jsonl", "{}\n".encode("utf-16"), r"a\.jsonl:1: not UTF-8"),
        ("a.jsonl", b"{}\n" + b"\0" * 64, r"a\.jsonl:2: broken JSON"),
        ("a.parquet", LINES, r"a\.parquet: not a readable parquet file"),
        ("a.arrow", LINES, r"a\.arrow: not a readable arrow file"),
        ("a.csv", LINES, r"files of type \.csv are not read"),
        ("a.parquet.gz", LINES, r"files of type \.gz are not read"),
    ],
)  # fmt: skip
def test_damage_is_named_with_its_place(tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(Eagle3Error, match=message):
        values(tmp_path / name)


def test_missing_sources(tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="no such file, folder or glob"):
        sources.read(str(tmp_path / "nothing.jsonl"))
    with pytest.raises(Eagle3Error, match="no such file, folder or glob"):
        sources.read(str(tmp_path / "*.jsonl"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(Eagle3Error, match="holds no"):
        sources.read(str(tmp_path / "empty"))
    with pytest.raises(ParamError):
        (tmp_path / "a").write_text("")
        sources.read(str(tmp_path / "a"))


def test_hub_name_that_cannot_be_had_is_one_readable_error() -> None:
    for name in ("nobody-here/no-such-data", "nobody/data-2.5", "nobody/data/config:split"):  # tests run offline
        with pytest.raises(Eagle3Error, match="the data hub did not give it"):
            list(sources.read(name))
    assert sources.digest("nobody-here/no-such-data") is None
    for path in ("data/missing.jsonl", "data/missing.jsonl.gz", "../data", "a/b/c/d", "data.csv"):
        with pytest.raises(Eagle3Error, match="no such file, folder or glob"):
            list(sources.read(path))


USE_HUB = """
import sys
from eagle3lib import sources
from eagle3lib.conversations import parse
for name in sys.argv[1:]:
    try:
        print([(raw.value["prompt"], raw.source, raw.where) for raw in sources.read(name)], sources.digest(name))
    except Exception as error:
        print(error)
"""


def test_hub_name_is_read_through_datasets(tmp_path: Path) -> None:
    """A hub of three answers on the loopback interface, and the real client. (It reads its address when imported.)"""
    with hub.serve({"own/chats-1.5": {"train.jsonl": LINES, "test.jsonl": LINES.splitlines()[0]}}) as url:
        env = {**os.environ, "HF_ENDPOINT": url, "HF_HUB_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0", "HF_HOME": str(tmp_path)}
        command = [sys.executable, "-c", USE_HUB, "own/chats-1.5", "own/chats-1.5:test", "own/chats-1.5:dev", "own/nothing"]
        out = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100).stdout.splitlines()
    assert out[0] == f"{[(r['prompt'], 'own/chats-1.5', f'own/chats-1.5: row {i}') for i, r in enumerate(RECORDS, 1)]} {hub.COMMIT}"
    assert out[1].startswith("[('question 0")
    assert "dev" in out[2] and "'train'" in out[2]  # which splits there are
    assert "own/nothing" in out[3] and "did not give it" in out[3]


def test_tables_by_their_bytes_and_rows_that_python_cannot_hold(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "named.jsonl")
    assert values(tmp_path / "named.jsonl") == RECORDS
    text = pyarrow.StringArray.from_buffers(3, pyarrow.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0\3\0\0\0"), pyarrow.py_buffer(b"a\xffc"))
    days = pyarrow.array([0, 2**50, 0], pyarrow.timestamp("ms"))
    for name, column in [("text", text), ("days", days)]:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y", "z"], "c": column}), tmp_path / f"{name}.parquet")
        found = [(r.broken[:14], r.where.split(": ")[1]) for r in sources.read(str(tmp_path / f"{name}.parquet"))]
        assert found == [("", "row 1"), ("unreadable row", "row 2"), ("", "row 3")]


def test_digest_knows_bytes_names_and_where_files_end(tmp_path: Path) -> None:
    """Names, because rows carry them; ends, because a line that moves to the next file changes its rows."""

    def digest(**files: bytes) -> str | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        for name, data in files.items():
            (folder / f"{name}.jsonl").write_bytes(data)
        return sources.digest(str(folder))

    seen = [digest(a=LINES), digest(b=LINES), digest(a=LINES + b"{}"), digest(a=b"{}\n{}\n", b=b"{}\n"), digest(a=b"{}\n", b=b"{}\n{}\n")]
    assert len(set(seen)) == 5 and digest(a=LINES) == seen[0]


def test_chitchat_gives_many_different_questions() -> None:
    texts = [raw.value["prompt"] for raw in sources.read("chitchat")]
    assert len(set(texts)) > 20_000
    assert all("?" in t and len(t.split()) >= sources.CHITCHAT_MIN_WORDS and t == t.strip() for t in texts)
