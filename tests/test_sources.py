"""Files of every kind give the same records; damaged ones give an error that names file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from eagle3lib import sources
from eagle3lib.errors import Eagle3Error, ParamError

RECORDS = [{"prompt": f"question {i} \u2028 ü", "response": "x" * i} for i in range(5)]
LINES = "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in RECORDS).encode()


def values(source: Path | str) -> list:
    return [raw.value for raw in sources.read(str(source))]


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
        ("a.jsonl", LINES + b'{"prompt": "x"\n', r"a\.jsonl:6: broken JSON: .* at column 15, found the end; repair or remove"),
        ("a.jsonl", b"{}\n{'a': 1}\n{}", r"a\.jsonl:2: broken JSON: .* at column 2, found \"'a': 1}\""),
        ("a.jsonl", b'{}\n{"a": "\xff"}', r"a\.jsonl:2: not UTF-8 \(byte 7 is 0xff\)"),
        ("a.jsonl", b"{}\n" + b"[" * 200_000, r"a\.jsonl:2: broken JSON: nested too deeply"),
        ("a.json", b'[\n{"a": 1},\n{"a": oops}\n]', r"a\.json:3: broken JSON: .* at column 7, found 'oops"),
        ("a.json", b'[\n{"a": 1}\n{"a": 2}]', r"a\.json:3: broken JSON: an array goes on with ','"),
        ("a.json", b'[{"a": 1},\n{"a": 2}\n', r"a\.json:3: broken JSON: the array does not end"),
        ("a.json", b'[{"a": 1}, ', r"a\.json:1: broken JSON: the array does not end"),
        ("a.json", b'[{"a": "\xff"}]', r"a\.json:1: not UTF-8"),
        ("a.jsonl.gz", gzip.compress(LINES * 100)[:-20], r"a\.jsonl\.gz: cannot be read to its end"),
        ("a.jsonl.gz", LINES, r"a\.jsonl\.gz: cannot be read to its end"),
        ("a.jsonl.zst", LINES, r"a\.jsonl\.zst: cannot be read to its end"),
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
    with pytest.raises(Eagle3Error, match="the data hub did not give it"):
        list(sources.read("nobody-here/no-such-data"))  # tests run offline


def test_digest_knows_content_not_names(tmp_path: Path) -> None:
    for name, data in [("a.jsonl", LINES), ("b.jsonl", LINES), ("c.jsonl", LINES + b"{}")]:
        (tmp_path / name).write_bytes(data)
    a, b, c = (sources.digest(str(tmp_path / f"{n}.jsonl")) for n in "abc")
    assert a == b != c


def test_chitchat_gives_many_different_questions() -> None:
    texts = [raw.value["prompt"] for raw in sources.read("chitchat")]
    assert len(set(texts)) > 20_000
    assert all("?" in t and len(t.split()) >= sources.CHITCHAT_MIN_WORDS and t == t.strip() for t in texts)
