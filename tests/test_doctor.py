"""`python -m eagle3lib doctor`: a table of what a start needs; leftovers of ours found, and cleaned on request only."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from servers import fake_python

from eagle3lib import cli, doctor, fleet, preflight, settings
from eagle3lib.errors import ParamError

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


@pytest.fixture
def params(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE3_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    path = tmp_path / "experiment.yaml"
    path.write_text(f"target: {tiny}\nengine_device: cpu\nengine_dtype: float32\nengine_python: {fake_python(tmp_path)}\nmax_prompts: 100\n")
    return path


def ask(params: Path, *more: str) -> int:
    return cli.main(["doctor", str(params), *more])


def test_all_is_well(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask(params) == 0
    shown = capsys.readouterr().out
    assert "FAILED" not in shown and "sglang 0.5.14" in shown and "102,400 tokens (max_prompts x max_tokens) x 4 states" in shown
    assert not (params.parent / "dumps").exists() and not (params.parent / "runs").exists(), "it must not write anything"


BUSY = "held by process"
SPECULATING = '["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "x"]'
WRONG = {
    "interpreter": (["engine_python=/nowhere/python"], "it cannot be run"),
    "version": (['engine_versions=["sglang==0.4.9", "torch>1"]'], "it has sglang 0.5.14; wanted: sglang==0.4.9"),
    "requirement": (['engine_versions=["sglang is old"]'], "is no requirement"),
    "target": (["target=/nowhere"], "is not on this machine"),
    "dtype": (["engine_dtype=int8"], "dtype 'int8'"),
    "argument of ours": (['engine_args=["--port", "5"]'], "engine arguments port"),
    "secret": (['engine_args=["--api-key", "x"]'], "engine arguments api_key"),
    "password": (['engine_args=["--ssl-keyfile-password", "opensesame"]'], "engine arguments ssl_keyfile_password"),
    "graphs": (['engine_args=["--cuda-graph-backend-prefill", "full"]'], "a replayed CUDA graph"),
    "pipeline": (['engine_args=["--pp-size", "2"]'], "pp_size (2): a server that captures cannot have it"),
    "attention": (['engine_args=["--enable-dp-attention"]'], "enable_dp_attention (on): a server that captures cannot have it"),
    "speculation": (["engine_device=cuda", f"engine_args={SPECULATING}"], "speculation takes the aux hidden states"),
    "disk": (["max_prompts=2000000000"], "MB are needed"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_the_way_out(params: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    changes, message = WRONG[name]
    code = ask(params, *(word for change in changes for word in ("--set", change)))
    shown = "".join(capsys.readouterr())
    assert code == 1 and message in shown and "FAILED" in shown and "Traceback" not in shown


def test_a_busy_port_names_its_holder(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        assert ask(params, "--set", f"engine_port={holder.getsockname()[1]}") == 1
    assert f"held by process {psutil.Process().pid} (" in capsys.readouterr().out


def test_memory_and_shared_memory_that_do_not_suffice(params: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_gpu_free", lambda: [10**5, 10**9])
    monkeypatch.setattr(preflight, "free_bytes", lambda folder: 10**5)
    assert ask(params, "--set", "engine_device=cuda") == 1
    shown = capsys.readouterr().out
    assert "0.0 GB on each of 1 cuda devices" not in shown, "the second GPU is large enough"
    assert "engine dump folder" in shown and "FAILED shared memory" in shown
    assert ask(params, "--set", "engine_device=cuda", "--set", 'engine_args=["--tp-size", "2"]') == 1
    assert "the weights take" in capsys.readouterr().out
    assert ask(params, "--set", "engine_device=cuda", "--set", 'engine_args=["--tp", "8"]') == 1
    assert "8 GPUs are asked for (tp_size), 2 are there" in capsys.readouterr().out


def test_leftovers_are_found_and_only_ours_are_cleaned_and_only_on_request(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = params.parent / "runs" / "old"
    dump, scratch, precious = params.parent / "dumps" / "0123456789abcdef", params.parent / "eagle3-abcdefgh", params.parent / "precious"
    for folder in (run, dump, scratch, precious):
        folder.mkdir(parents=True)
    held, other = (Path(f"/dev/shm/eagle3-test-{params.stat().st_ino}-{n}") for n in "ab")
    try:
        with subprocess.Popen(SLEEP) as server, subprocess.Popen(SLEEP) as bystander:
            for path in (held, other):
                path.write_text("x")
            (scratch / preflight.SHM_NOTE).write_text(json.dumps({held.name: held.stat().st_ino, other.name: 1, "../../etc/passwd": 1}))
            record = {"nonce": dump.name, "dump_dir": str(dump), "scratch": str(scratch), "port": 1, "owner": {"pid": 1, "created": 1.0}}
            record["processes"] = [{"pid": server.pid, "created": psutil.Process(server.pid).create_time()}, {"pid": bystander.pid, "created": 1.0}]
            (run / "engine.json").write_text(json.dumps(record))
            assert ask(params) == 1
            shown = capsys.readouterr().out
            assert f"process {server.pid} (" in shown and str(dump) in shown and str(held) in shown and str(other) not in shown
            assert server.poll() is None and dump.exists() and held.exists()
            assert ask(params, "--clean") == 0
            assert server.poll() is not None and bystander.poll() is None
            bystander.kill()
        assert not dump.exists() and not scratch.exists() and not held.exists()
        assert other.exists() and precious.exists() and run.exists()
        assert ask(params) == 0
    finally:
        held.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_every_engine_of_a_run_is_seen_and_one_file_that_has_gone_hides_no_other(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [fleet.folder(params.parent / "runs" / "night", n) for n in range(3)]
    held = [Path(f"/dev/shm/eagle3-test-{params.stat().st_ino}-{n}") for n in range(3)]
    try:
        for n, (place, file) in enumerate(zip(places, held, strict=True)):
            scratch = params.parent / f"eagle3-abcdefg{n}"
            place.mkdir(parents=True, exist_ok=True)
            scratch.mkdir()
            file.write_text("x")
            noted = {"vanished": 1, "zero\0byte": 2, file.name: file.stat().st_ino, "vanished too": 3}
            (scratch / preflight.SHM_NOTE).write_text(json.dumps(noted))
            record = {"nonce": f"{n}" * 16, "scratch": str(scratch), "port": 1, "owner": {"pid": 1, "created": 1.0}, "processes": []}
            (place / "engine.json").write_text(json.dumps(record))
        assert ask(params) == 1
        shown = capsys.readouterr().out
        assert all(str(file) in shown for file in held) and "night/engines/2: " in shown
        assert ask(params, "--clean") == 0 and not any(file.exists() for file in held)
        assert ask(params) == 0
    finally:
        for file in held:
            file.unlink(missing_ok=True)


def test_a_server_in_use_is_no_leftover(params: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = params.parent / "runs" / "busy"
    run.mkdir(parents=True)
    with subprocess.Popen(SLEEP) as server:
        me = psutil.Process()
        record = {"nonce": "0" * 16, "owner": {"pid": me.pid, "created": me.create_time()}, "port": 1,
                  "processes": [{"pid": server.pid, "created": psutil.Process(server.pid).create_time()}]}
        (run / "engine.json").write_text(json.dumps(record))
        assert ask(params, "--clean") == 0
        assert f"busy is in use by process {me.pid}" in capsys.readouterr().out and server.poll() is None
        server.kill()


def test_the_forecast_counts_prepared_rows_and_old_dumps_are_listed(params: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    run = params.parent / "runs" / "earlier"
    (run / "prepared").mkdir(parents=True)
    (run / "store").mkdir()
    (run / "store" / "shard").write_bytes(bytes(2_000_000))
    (run / "run.json").write_text(json.dumps({"params_file": params.name, "status": "ok"}))
    monkeypatch.setattr("eagle3lib.prepare.load_prepared", lambda folder: {"n_tokens": [1000, 234]})
    assert ask(params) == 0
    shown = capsys.readouterr().out
    assert "1,234 tokens (prepared in earlier)" in shown
    assert "earlier/store 2.0 MB" in shown and "old" in shown


@pytest.mark.parametrize(("setting", "why"), [("engine_device=tpu", "engine device 'tpu': auto, cpu or cuda"),
                                             ("engine_port=99999", "engine port 99999"), ("engine_port=-1", "engine port -1")])
def test_a_device_or_port_that_there_is_not_is_a_parameter_error(params: Path, capsys: pytest.CaptureFixture[str], setting: str, why: str) -> None:
    assert ask(params, "--set", setting) == 2
    assert why in capsys.readouterr().err


def test_the_disk_needs_half_for_fp8_and_nothing_for_what_is_stored(params: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """102,400 tokens of 4 states of 64 numbers; their id and mask; a tenth more."""
    base = params.parent / "runs"
    asked: list[int] = []
    monkeypatch.setattr(preflight, "require_room", lambda folder, needed, *_: asked.append(needed) if folder == base else None)
    ask(params)
    ask(params, "--set", "store_dtype=float8_e4m3")
    (base / "earlier/prepared").mkdir(parents=True)
    (base / "earlier/store").mkdir()
    (base / "earlier/run.json").write_text(json.dumps({"params_file": params.name, "status": "ok"}))
    monkeypatch.setattr("eagle3lib.prepare.load_prepared", lambda folder: {"n_tokens": [102_400]})
    (base / "earlier/store/shard").write_bytes(b"x" * 2**20)
    ask(params)
    assert asked == [int(102_400 * (4 * 64 * 4 + 5) * 1.1), int(102_400 * (4 * 64 + 4 * 4 + 5) * 1.1), asked[0] - 2**20]


CHAIN = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/d"}


@pytest.mark.parametrize(("numbers", "right"), [((3, 1, 4), None), ((3, 1, 8), "so 4 is the right value"), ((3, 1, 3), "so 4 is"),
                                                ((8, 10, 60), None), ((3, 2, 12), "at most 11 is the right value"), ((3, 2, 11), None),
                                                ((5, 4, 5), "at least 6 is the right value"), ((0, 1, 1), "of at least 1"), ((1, 4, 6), "at most 5")])
def test_speculative_numbers_that_contradict_one_another(numbers: tuple[int, int, int], right: str | None) -> None:
    given = CHAIN | dict(zip(settings.NUMBERS, map(str, numbers), strict=True))
    if right is None:
        return settings.require_sensible_speculation(given, "cuda")
    with pytest.raises(ParamError, match=right):
        settings.require_sensible_speculation(given, "cuda")


@pytest.mark.parametrize(("given", "why"), [
    ({"speculative_num_steps": "3"}, "without speculative_algorithm the server ignores them"),
    (CHAIN | {"speculative_num_steps": "3"}, "without speculative_eagle_topk, speculative_num_draft_tokens"),
    ({"speculative_algorithm": "EAGLE3"}, "speculative_draft_model_path is missing"),
    (CHAIN | dict.fromkeys(settings.NUMBERS, "many"), "'many': a whole number")])
def test_speculation_that_is_half_said(given: dict[str, str], why: str) -> None:
    with pytest.raises(ParamError, match=why):
        settings.require_sensible_speculation(given, "cuda")
    with pytest.raises(ParamError, match="cannot speculate on a CPU"):
        settings.require_sensible_speculation({"speculative_algorithm": "EAGLE3"}, "cpu")


def test_nodes() -> None:
    settings.require_sensible_nodes({"nnodes": "2", "dist_init_addr": "10.0.0.1:5000", "tp_size": "16"})
    with pytest.raises(ParamError, match="dist_init_addr is missing"):
        settings.require_sensible_nodes({"nnodes": "2"})
    with pytest.raises(ParamError, match="the engine is node 0"):
        settings.require_sensible_nodes({"nnodes": "2", "dist_init_addr": "x", "node_rank": "1"})
    assert settings.parse_arguments(["--tp-size", "8", "--flag", "--x=1"]) == {"tp_size": "8", "flag": "", "x": "1"}
    with pytest.raises(ParamError, match="stands before any"):
        settings.parse_arguments(["8"])


def test_a_secret_among_the_arguments_is_not_shown(params: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_API_TOKEN", "opensesame-0123")
    ask(params, "--set", 'engine_args=["--json-model-override-args", "opensesame-0123"]')
    shown = capsys.readouterr()
    assert "--json-model-override-args [hidden" in shown.out and "opensesame" not in shown.out + shown.err


def test_it_is_quick(params: Path) -> None:
    begun = time.monotonic()
    doctor.report(params, {})
    assert time.monotonic() - begun < 10
