"""Real SGLang on the tiny target: the client dies by kill -9, then the engine under its successor, and nothing is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from tiny import tiny_target

from eagle3lib import engine, extract, fleet, preflight, targets
from eagle3lib.errors import Eagle3Error
from eagle3lib.store import Store, sample_id

LAYERS = [2, 4, 5]
CLIENT = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from pathlib import Path
from test_extract_real import extraction
extraction(Path({target!r}), Path({run!r}))
"""


def make_rows(count: int = 500) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for n in range(count):
        ids = torch.randint(3, 259, (60 + n % 120,), generator=generator).tolist()
        mask = [t > 20 for t in range(len(ids))]
        rows.append({"sample_id": sample_id(ids, mask), "input_ids": ids, "loss_mask": mask})
    return rows


def extraction(target: Path, run: Path) -> tuple[engine.Engine, extract.Extraction]:
    with engine.Engine.start(target, run, capture_layers=LAYERS, device="cpu") as server:
        return server, extract.extract(server, make_rows(), run / "store", target, shard_mb=1, tokens_in_flight=2000)


def stored(run: Path) -> dict[str, int]:
    if not (run / "store/index.bin").exists():
        return {}
    return {bytes(r["id"]).hex(): int(r["hidden_xxh"]) for r in Store.open(run / "store").index}


def wait_for(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def kill_scheduler_once(run: Path, more_than: int) -> list[int]:
    """As soon as the store has grown: kill -9 of the process that computes."""
    wait_for(lambda: len(stored(run)) > more_than, 240)
    schedulers = [p for p in psutil.Process().children(recursive=True) if "sglang::scheduler" in "".join(p.cmdline()[:1])]
    for process in schedulers:
        process.send_signal(signal.SIGKILL)
    return [p.pid for p in schedulers]


def test_kill_9_of_the_client_and_then_of_the_engine_loses_nothing(tmp_path: Path, tiny: Path) -> None:
    run, root = tmp_path / "run", Path(__file__).resolve().parents[1]
    script = CLIENT.format(root=str(root), tests=str(root / "tests"), target=str(tiny), run=str(run))
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: stored(run) or client.poll() is not None, 240)
        server = psutil.Process(client.pid).children(recursive=True)
    finally:
        os.kill(client.pid, signal.SIGKILL)
        client.wait()
    kept = stored(run)
    assert 0 < len(kept) < 500
    wait_for(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in server), 60)

    killed: list[list[int]] = []
    killer = threading.Thread(target=lambda: killed.append(kill_scheduler_once(run, len(kept) + 20)))
    killer.start()
    server, result = extraction(tiny, run)
    killer.join()
    assert len(killed[0]) == 1 and len(server.restarts) == 1 and not result.lost_engines and not result.quarantined
    store, rows = Store.open(run / "store"), {row["sample_id"]: row for row in make_rows()}
    assert sorted(store.ids) == sorted(rows) and stored(run).items() >= kept.items()
    for sample in store:  # every checksum proved, every row with its own tokens
        assert sample.input_ids.tolist() == rows[sample.id]["input_ids"]
    assert not list(preflight.dump_base().glob(f"{server.nonce}*"))
    reference(tiny, store)


# ---- a server that somebody else started ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[engine.Engine]:
    with engine.Engine.start(tiny, tmp_path_factory.mktemp("theirs"), capture_layers=LAYERS, device="cpu") as server:
        yield server


def test_an_endpoint_is_proved_and_shares_the_work(tmp_path: Path, tiny: Path, server: engine.Engine) -> None:
    with fleet.start(0, [f"{server.url}={server.dump_dir}"], tiny, tmp_path) as (endpoint,):
        assert endpoint.fingerprint == server.fingerprint  # so what both dump may be mixed
        assert {"engine.nonce", "engine.target", "engine.log-probabilities", "engine.layer of r_2"} <= {c.name for c in endpoint.checks}
        rows = make_rows(60)
        result = extract.extract([server, endpoint], rows, tmp_path / "store", tiny, shard_mb=1, tokens_in_flight=2000)
        assert result.samples == 60 and len(Store.open(tmp_path / "store")) == 60
        extract.probe(endpoint, Store.open(tmp_path / "store"), tmp_path / "probes.safetensors", 2)
    server.require_alive()  # it is not ours to stop
    reference(tiny, Store.open(tmp_path / "store"))


def test_an_endpoint_that_is_not_what_was_said_is_refused(tmp_path: Path, tiny: Path, server: engine.Engine) -> None:
    def refused(spec: str, why: str, target: Path = tiny) -> None:
        with pytest.raises(Eagle3Error, match=why), fleet.start(0, [spec], target, tmp_path):
            pass

    refused("node7:30000", "wanted: an address")
    refused(f"{server.url}={tmp_path}/nowhere", "not on this machine")
    refused(f"{server.url}={tmp_path}", "0 handshakes")
    refused(f"http://127.0.0.1:{preflight.free_port()}={server.dump_dir}", "does not answer")
    refused(f"{server.url}={server.dump_dir}", "check engine.target", tiny_target(tmp_path / "other", seed=1))
    stranger = tmp_path / "dumps"
    stranger.mkdir()
    (stranger / "handshake-0.json").write_text(json.dumps(server.handshake | {"nonce": "f" * 16}))
    refused(f"{server.url}={stranger}", "check engine.nonce")


def test_engines_of_one_machine_take_gpus_behind_one_another() -> None:
    settings = {"device": "cuda", "extra_args": ["--tp-size", "4"], "port": 30000}
    assert fleet.on_gpus(0, settings) == settings
    assert fleet.on_gpus(1, settings) == {"device": "cuda", "extra_args": ["--tp-size", "4", "--base-gpu-id", "4"], "port": 0}
    with pytest.raises(Eagle3Error, match="at least one engine"), fleet.start(0, [], Path("x"), Path("y")):
        pass


def reference(tiny: Path, store: Store) -> None:
    """States before, between and after the deaths are the target's own, by transformers in float32."""
    model = targets.load_model(tiny)
    for i in torch.linspace(0, len(store) - 1, 6).long().tolist():
        sample = store.read(i)
        with torch.inference_mode():
            states = model(input_ids=sample.input_ids[None], output_hidden_states=True).hidden_states
        for s, k in enumerate([*LAYERS, -1]):
            error = (sample.hidden[:, s].float() - states[k][0]).norm(dim=-1) / states[k][0].norm(dim=-1)
            assert float(error.median()) < 0.05
