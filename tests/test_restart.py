"""A server that dies is started again a set number of times, the work goes on where it was, and nothing is counted twice."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from servers import CHUNK, LAYERS, Witness, fake_python

from eagle3lib import extract, preflight
from eagle3lib.engine import Engine
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import Store, sample_id

ROWS = [torch.randint(3, 259, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in range(10, 30)]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagle3lib.client.BACK_OFF_S", 0.05)


def start(tiny: Path, folder: Path, fault: str, **options: object) -> Engine:
    return Engine.start(tiny, folder / fault.replace(" ", "-"), capture_layers=LAYERS, device="cpu", dtype="float32",
                        chunked_prefill_size=CHUNK, python=fake_python(folder, fault), **options)


def collected(engine: Engine, **options: object) -> tuple[list[list[int]], Counter[int], dict[int, torch.Tensor]]:
    """Replies, how often each was handed over, and the dumps."""
    seen, dumps = Counter[int](), dict[int, torch.Tensor]()

    def collect(index: int, reply: object) -> None:
        seen[index] += 1
        dumps[index] = engine.read_dump(reply.rid, ROWS[index]).clone()
        engine.delete_dump(reply.rid)

    rids = [engine.rid(f"row-{i}") for i in range(len(ROWS))]
    replies = engine.generate(ROWS, rids=rids, max_new_tokens=3, concurrency=3, progress=None, on_result=collect)
    return [r.output_ids for r in replies], seen, dumps


def test_the_work_goes_on_where_it_was_and_each_row_comes_once(tiny: Path, tmp_path: Path, witness: Witness) -> None:
    with start(tiny, tmp_path, "none") as steady:
        wanted, _, whole = collected(steady)
    with start(tiny, tmp_path, "dies once") as engine:
        nonce, pid = engine.nonce, engine.pid
        replies, seen, dumps = collected(engine)
        assert replies == wanted and seen == Counter(range(len(ROWS)))
        assert all(torch.equal(dumps[i], whole[i]) for i in range(len(ROWS)))
        assert len(engine.restarts) == 1 and "CUDA out of memory" in engine.restarts[0]
        assert engine.nonce != nonce and engine.pid != pid and not engine.checks.failed and len(engine.checks) >= 20
        assert [p.name for p in (tmp_path / "dumps").iterdir()] == [engine.nonce]
        old = engine.generate(ROWS[:1], rids=[f"{nonce}-asked-for-before"], max_new_tokens=1, progress=None)
        assert torch.equal(engine.read_dump(old[0].rid, ROWS[0]), whole[0])
    assert engine.log_path.read_text().count("CUDA out of memory") == 1


def test_a_server_that_dies_again_and_again_ends_the_work_at_the_limit(tiny: Path, tmp_path: Path, witness: Witness) -> None:
    with start(tiny, tmp_path, "dies always", max_restarts=1) as engine:
        seen: list[int] = []
        with pytest.raises(Eagle3Error, match=r"exit code 7 .*CUDA out of memory.*restarted 1 times, which is the limit \(max_restarts\)"):
            engine.generate(ROWS, max_new_tokens=1, concurrency=2, progress=None, on_result=lambda i, _: seen.append(i))
        assert len(seen) == len(set(seen)) >= 6  # what was answered stays answered


def test_an_extraction_survives_a_death_and_stores_each_row_once(tiny: Path, tmp_path: Path, witness: Witness) -> None:
    rows = [{"sample_id": sample_id(row, [True] * len(row)), "input_ids": row, "loss_mask": [True] * len(row)} for row in ROWS]
    with start(tiny, tmp_path, "dies once") as engine:
        result = extract.extract(engine, rows, tmp_path / "store", tiny, shard_mb=1, tokens_in_flight=100)
        assert len(engine.restarts) == 1
    store = Store.open(tmp_path / "store")
    assert result.samples == len(store) == len(set(store.ids)) == len(ROWS)
    assert result.tokens == sum(map(len, ROWS))


def test_another_server_after_the_restart_is_refused(tiny: Path, tmp_path: Path, witness: Witness, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter was upgraded meanwhile: states of two versions must not be mixed."""
    with start(tiny, tmp_path, "dies once") as engine:
        assert engine.fingerprint["torch"]
        found = preflight.interpreter

        def upgraded(*args: object) -> dict:
            there = found(*args)
            return there | {"versions": there["versions"] | {"torch": "99.0"}}

        monkeypatch.setattr(preflight, "interpreter", upgraded)
        with pytest.raises(Eagle3Error, match="after its restart the server differs in torch"):
            engine.generate(ROWS, max_new_tokens=1, concurrency=2, progress=None)
    assert re.search("CUDA out of memory", engine.restarts[0])
