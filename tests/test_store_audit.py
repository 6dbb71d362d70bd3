"""A damaged index, and a listing of damaged stores: the tools say it, go on with the others, and lose nothing that is good."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from test_store import MANIFEST, SAMPLES, assert_holds, fill

from eagle3lib import cli, quarantine, storetool
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import Store

LINE = 48


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return fill(tmp_path / "a/store").path


def store(*words: object) -> int:
    return cli.main(["store", *map(str, words)])


def harm(path: Path, change: Callable[[bytearray], bytes | bytearray]) -> None:
    path.write_bytes(change(bytearray(path.read_bytes())))


def flip(at: int) -> Callable[[bytearray], bytearray]:
    def change(data: bytearray) -> bytearray:
        data[at] ^= 1
        return data
    return change


HARMS = {
    "last line flipped": (lambda path: harm(path / "index.bin", flip(-20)), "1 lines at its end are damaged or torn"),
    "last line torn": (lambda path: harm(path / "index.bin", lambda data: data[:-5]), "1 lines at its end are damaged or torn"),
    "all lines cut": (lambda path: harm(path / "index.bin", lambda data: b""), "shard-00000.safetensors: no line of the index names it"),
    "tail cut": (lambda path: harm(path / "index.bin", lambda data: data[: 2 * LINE]), "no line of the index names it"),
    "index gone": (lambda path: (path / "index.bin").unlink(), "index.bin is missing"),
    "middle line flipped": (lambda path: harm(path / "index.bin", flip(3 * LINE + 5)), "1 of 12 lines of its index are damaged or doubled"),
    "manifest torn": (lambda path: harm(path / "store.json", lambda data: data[:40]), "store.json is damaged"),
}


@pytest.mark.parametrize("name", HARMS)
def test_a_damaged_index_fails_the_audit_and_the_other_stores_are_audited(path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    change, says = HARMS[name]
    fill(path.parents[1] / "b/store", SAMPLES[:3])
    change(path)
    assert store("verify", path.parents[1]) == 1
    said = capsys.readouterr().out
    assert says in said and "b/store: 3 of 3 samples are whole" in said


def test_shards_without_an_index_are_never_deleted_by_a_writer(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    index = (path / "index.bin").read_bytes()
    (path / "index.bin").unlink()
    before = {file.name: file.read_bytes() for file in path.glob("shard-*")}
    with pytest.raises(Eagle3Error, match="it has shards and no index.bin"):
        Store.create(path, MANIFEST)
    assert store("verify", "--drop", path) == 1 and "has shards and no index.bin" in capsys.readouterr().out
    assert {file.name: file.read_bytes() for file in path.glob("shard-*")} == before
    (path / "index.bin").write_bytes(index)
    assert_holds(Store.open(path), SAMPLES)


def test_two_drops_at_once_take_out_the_damaged_sample_only(path: Path) -> None:
    """Both have audited before either takes the lock; then the sample is extracted again."""
    victim = Store.open(path).index[4]
    harm(path / f"shard-{int(victim['shard']):05d}.safetensors", flip(1024 + int(victim["row"]) * 64 + 5))
    first, second = storetool.audit(path), storetool.audit(path)
    assert storetool._drop(path, first.records) == 1 and storetool._drop(path, second.records) == 0
    assert len(Store.open(path)) == 11
    with Store.create(path, MANIFEST) as writer:
        writer.append(next(sample for sample in SAMPLES if sample.id not in writer))
    assert storetool._drop(path, second.records) == 0
    assert_holds(Store.open(path), SAMPLES)


def test_a_drop_leaves_a_store_that_the_audit_passes(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harm(path / "index.bin", flip(-20))
    assert store("verify", "--drop", path) == 1 and "1 samples were taken out" in capsys.readouterr().out
    assert store("verify", path) == 0 and "11 of 11" in capsys.readouterr().out


def test_an_audit_while_somebody_writes_takes_nothing_new_for_damage(path: Path) -> None:
    with Store.create(path, MANIFEST):
        (path / "shard-00099.safetensors").write_bytes(b"sealed, its lines are on their way")
        assert store("verify", path) == 0


# ---- ls, reclaim ----


def test_a_listing_goes_on_behind_what_is_damaged_and_creates_nothing(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = fill(path.parents[1] / "b/store", SAMPLES[:3]).path
    (path / quarantine.FILE).write_text('{"sample_id": ')
    (path / "dangling").symlink_to("nowhere")
    for one in (path, other):
        (one / "lock").unlink()
    assert store("ls", path.parents[1]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and " 12 " in lines[1] and lines[1].endswith("quarantine.jsonl is damaged") and " 3 " in lines[2]
    assert not (path / "lock").exists() and not (other / "lock").exists()


def test_a_store_named_twice_is_counted_and_deleted_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(file.stat().st_blocks * 512 for file in path.iterdir())
    assert store("reclaim", path, path.parent / "." / "store", path.parents[1] / "a" / ".." / "a" / "store", "--yes") == 0
    assert f"({size:,} bytes) are free again" in capsys.readouterr().out and not path.exists()
