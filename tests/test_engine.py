"""The engine against real SGLang on the tiny Llama (three starts): the capture, generation, switching, a death.

The real server runs in an interpreter that does not have this project: a bare venv that borrows the installed packages.
Faults are in tests/faults, restarts on a scripted server in test_restart.py, what is left behind in test_outlive.py.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from servers import CHUNK, LAYERS, START_S

from eagle3lib import targets
from eagle3lib.engine import Engine
from eagle3lib.errors import Eagle3Error


def rows_of(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Token ids of the tiny target; the first `shared` of them are the same in every row."""
    generator = torch.Generator().manual_seed(7)
    head = torch.randint(3, 259, (shared,), generator=generator).tolist()
    return [head + torch.randint(3, 259, (n - shared,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def other_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter that sees SGLang but not this project."""
    home = tmp_path_factory.mktemp("engine-env") / "venv"
    venv.EnvBuilder(symlinks=True).create(home)
    packages = next(home.glob("lib/python3*/site-packages"))
    installed = [p for p in sys.path if p.endswith("site-packages")]
    (packages / "borrowed.pth").write_text("\n".join(installed))
    python = str(home / "bin" / "python")
    outcome = subprocess.run([python, "-c", "import eagle3lib"], cwd=home, env={"PATH": os.environ["PATH"]}, capture_output=True)
    assert outcome.returncode != 0, "the engine's interpreter must not see this project"
    return python


@pytest.fixture(scope="module")
def engine(tiny: Path, tmp_path_factory: pytest.TempPathFactory, other_python: str) -> Iterator[Engine]:
    """A capturing server in float32, with a small prefill chunk."""
    with Engine.start(tiny, tmp_path_factory.mktemp("run"), capture_layers=LAYERS, device="cpu", dtype="float32", python=other_python,
                      chunked_prefill_size=CHUNK, start_timeout_s=START_S) as running:
        yield running


@pytest.fixture(scope="module")
def reference(tiny: Path) -> torch.nn.Module:
    return targets.load_model(tiny)


def dumps_of(engine: Engine, rows: list[list[int]], name: str, concurrency: int) -> list[torch.Tensor]:
    found: dict[int, torch.Tensor] = {}

    def collect(index: int, reply: object) -> None:
        found[index] = engine.read_dump(reply.rid, rows[index]).clone()
        engine.delete_dump(reply.rid)

    engine.generate(rows, rids=[engine.rid(f"{name}-{i}") for i in range(len(rows))], max_new_tokens=1, concurrency=concurrency,
                    progress=None, on_result=collect)
    return [found[i] for i in range(len(rows))]


def error_by_row(found_TH: torch.Tensor, wanted_TH: torch.Tensor) -> float:
    """Median over tokens of |found - wanted| / |wanted|: one token of huge norm cannot hide the others."""
    return float(((found_TH - wanted_TH).norm(dim=-1) / wanted_TH.norm(dim=-1)).median())


# ---- the capture, on real SGLang ----


def test_a_batch_with_shared_prefixes_dumps_what_each_row_dumps_alone(engine: Engine) -> None:
    rows = rows_of(40, 41, 57, 90, 120, 33, 300, 64, shared=32)
    together = dumps_of(engine, rows, "together", concurrency=8)
    assert max(map(int, re.findall(r"Prefill batch, #new-seq: (\d+)", engine.log_path.read_text()))) > 1, "no batch was formed"
    alone = dumps_of(engine, rows, "alone", concurrency=1)
    for row, a, b in zip(rows, together, alone, strict=True):
        assert a.shape == (len(row), len(LAYERS) + 1, 64)
        # float32 sums in another order: 1e-5 of the row's size, where another row or layer differs by its whole size
        assert ((a - b).norm(dim=-1) <= 1e-5 * b.norm(dim=-1)).all()


def test_a_prompt_longer_than_the_prefill_chunk_comes_out_whole_and_right(engine: Engine, reference: torch.nn.Module) -> None:
    row = rows_of(3 * CHUNK + 17)[0]
    hidden = dumps_of(engine, [row], "long", concurrency=1)[0]
    with torch.no_grad():
        r = reference(torch.tensor([row]), output_hidden_states=True).hidden_states  # r[k] = r_k for k < L, r[L] after the norm
    depth = len(r) - 1
    for stream, k in enumerate([*LAYERS, depth]):
        right = error_by_row(hidden[:, stream], r[k][0])
        neighbours = min(error_by_row(hidden[:, stream], r[j][0]) for j in (k - 1, k + 1) if j <= depth)
        assert right < 1e-4 and neighbours > 0.05, (k, right, neighbours)


def test_the_engines_own_logprobs_are_lm_head_of_the_last_hidden_state(engine: Engine, tiny: Path) -> None:
    row = rows_of(200)[0]
    rid = engine.rid("logprobs")
    values, ids = engine.logprobs(row, top_k=5, rid=rid)
    assert values.shape == ids.shape == (200, 5)
    last_TH = engine.read_dump(rid, row)[:, -1]
    ours = torch.log_softmax(last_TH @ targets.head_weights(tiny)[0].T, -1).gather(1, ids)
    assert float((ours - values).abs().max()) < 1e-4
    assert torch.equal((last_TH @ targets.head_weights(tiny)[0].T).argmax(-1), ids[:, 0])
    engine.delete_dump(rid)


def test_nobody_elses_request_is_dumped(engine: Engine) -> None:
    engine.generate(rows_of(20, 30), max_new_tokens=2, progress=None)
    engine.generate(rows_of(20), rids=["0123456789abcdef-stranger"], max_new_tokens=1, progress=None)
    time.sleep(0.3)
    assert [p.name for p in engine.dump_dir.iterdir()] == ["handshake-0.json"]


def test_the_handshake_tells_what_the_server_is(engine: Engine, other_python: str) -> None:
    hello = engine.handshake
    assert (hello["layers"], hello["hidden_size"], hello["dtype"], hello["tp_size"]) == (LAYERS, 64, "float32", 1)
    assert hello["python"] == other_python and hello["nonce"] == engine.nonce
    lines = [line for line in engine.log_path.read_text().splitlines() if "HS_DUMP" in line]
    assert len(lines) == 1 and engine.nonce in lines[0] and str(LAYERS) in lines[0]
    assert engine.fingerprint["capture_layers"] == LAYERS and engine.fingerprint["engine"] == "sglang 0.5.14"
    assert engine.nonce not in json.dumps(engine.fingerprint)
    proved = {f"engine.{name}" for name in ("socket", "nonce", "model", "arguments", "handshake", "capture", "probe", "dump", "health",
                                            "same again", "greedy token", "log-probabilities", "long prompt", "known prefix", "in a batch",
                                            "layer of r_2", "layer of r_4", "layer of r_5", "layer of last")}
    assert not engine.checks.failed and proved <= {c.name for c in engine.checks}


# ---- generation ----


def test_greedy_replies_are_the_targets_own(engine: Engine, reference: torch.nn.Module) -> None:
    rows = rows_of(12, 25, 140)
    for row, reply in zip(rows, engine.generate(rows, max_new_tokens=8, concurrency=3, progress=None), strict=True):
        wanted = reference.generate(torch.tensor([row]), max_new_tokens=8, do_sample=False)[0, len(row):].tolist()
        assert reply.output_ids == wanted and reply.prompt_tokens == len(row) and reply.cached_tokens == 0
        assert reply.finish_reason == ("stop" if wanted[-1] == 2 else "length")


def test_a_stop_token_ends_the_reply_and_is_part_of_it(engine: Engine) -> None:
    row = rows_of(12)
    free = engine.generate(row, max_new_tokens=8, progress=None)[0].output_ids
    cut = free.index(free[4])
    stopped = engine.generate(row, max_new_tokens=8, stop_token_ids=[free[4]], progress=None)[0]
    assert stopped.output_ids == free[: cut + 1] and stopped.finish_reason == "stop"


def test_a_prompt_that_is_too_long_is_a_refused_reply_and_the_others_go_on(engine: Engine) -> None:
    replies = engine.generate(rows_of(3000, 10), max_new_tokens=2, progress=None)
    assert replies[0].finish_reason == "refused" and "longer than the model's context" in replies[0].error
    assert len(replies[1].output_ids) == 2


@pytest.mark.parametrize(("row", "why"), [([5, 320], "vocabulary is 0 to 319"), ([-1], "vocabulary"), ([], "no tokens")])
def test_ids_that_would_crash_the_server_are_never_sent(engine: Engine, row: list[int], why: str) -> None:
    with pytest.raises(Eagle3Error, match=why):
        engine.generate([row], max_new_tokens=1, progress=None)


def test_an_error_in_the_callers_own_code_ends_the_work_and_leaves_the_server_usable(engine: Engine) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        engine.generate(rows_of(*[20] * 12), max_new_tokens=200, concurrency=2, progress=None, on_result=fail)
    assert len(engine.generate(rows_of(10), max_new_tokens=2, progress=None)[0].output_ids) == 2


# ---- without the capture; switching; death of the server ----


def test_without_the_capture_the_plugin_changes_nothing_and_a_switch_is_one_call(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    rows = rows_of(12, 25, 140)
    with Engine.start(tiny, tmp_path, device="cpu", dtype="float32", chunked_prefill_size=CHUNK, start_timeout_s=START_S,
                      max_restarts=0) as server:
        log = server.log_path.read_text()
        assert "HS_DUMP" not in log and "Applied" not in log  # no hook was put in
        assert server.dump_dir is None
        texts = [e.generate(rows, max_new_tokens=8, progress=None) for e in (server, engine)]
        assert [r.output_ids for r in texts[0]] == [r.output_ids for r in texts[1]]
        with pytest.raises(Eagle3Error, match="does not capture"):
            server.rid("x")
        before = psutil.Process(server.pid)
        server.switch(LAYERS)
        assert not before.is_running() and server.pid != before.pid
        assert dumps_of(server, rows, "switched", 3)[2].shape == (140, len(LAYERS) + 1, 64)
        kill_the_scheduler(server, rows)
    assert not psutil.pid_exists(server.pid)
    assert json.loads((tmp_path / "engine.json").read_text())["state"] == "stopped"


def kill_the_scheduler(server: Engine, rows: list[list[int]]) -> None:
    scheduler = next(p for p in psutil.Process(server.pid).children() if "sglang::scheduler" in p.cmdline()[0])
    scheduler.kill()
    begun = time.monotonic()
    with pytest.raises(Eagle3Error, match=r"(is dead|ended with exit code).*Log: ") as death:
        server.generate(rows, max_new_tokens=8, progress=None)
    assert time.monotonic() - begun < 2 and "  | " in str(death.value)
