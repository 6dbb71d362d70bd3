"""The engine against real SGLang on the tiny Llama (three starts), and against scripted faults (no SGLang).

The real server runs in an interpreter that does not have this project: a bare venv that borrows the installed packages.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import venv
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from eagle3lib import capture, preflight, targets
from eagle3lib import engine as engine_module
from eagle3lib.engine import Engine, Settings
from eagle3lib.errors import Eagle3Error, ParamError

LAYERS, CHUNK = [2, 4, 5], 128
HERE = Path(__file__).parent
START_S = 180.0  # a start takes 12 s on two idle cores


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
    proved = {f"engine.{name}" for name in ("socket", "nonce", "model", "arguments", "handshake", "capture", "probe", "dump", "health")}
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


# ---- without the capture; death of the server ----


def test_without_the_capture_the_plugin_changes_nothing_and_a_death_is_noticed(engine: Engine, tiny: Path, tmp_path: Path) -> None:
    rows = rows_of(12, 25, 140)
    with Engine.start(tiny, tmp_path, device="cpu", dtype="float32", chunked_prefill_size=CHUNK, start_timeout_s=START_S) as plain:
        log = plain.log_path.read_text()
        assert "HS_DUMP" not in log and "Applied" not in log  # no hook was put in
        assert plain.dump_dir is None
        texts = [e.generate(rows, max_new_tokens=8, progress=None) for e in (plain, engine)]
        assert [r.output_ids for r in texts[0]] == [r.output_ids for r in texts[1]]
        with pytest.raises(Eagle3Error, match="does not capture"):
            plain.rid("x")
        scheduler = next(p for p in psutil.Process(plain.pid).children() if "sglang::scheduler" in p.cmdline()[0])
        scheduler.kill()
        begun = time.monotonic()
        with pytest.raises(Eagle3Error, match=r"(is dead|ended with exit code).*Log: ") as death:
            plain.generate(rows, max_new_tokens=8, progress=None)
        assert time.monotonic() - begun < 2 and "  | " in str(death.value)
    assert not psutil.pid_exists(plain.pid)
    assert json.loads((tmp_path / "engine.json").read_text())["state"] == "stopped"


# ---- nothing outlives us ----

CLIENT = """
import sys
from pathlib import Path
from eagle3lib.engine import Engine
engine = Engine.start(Path(sys.argv[1]), Path(sys.argv[2]), capture_layers=[2, 4, 5], device="cpu")
print("ready", engine.port, flush=True)
sys.stdin.read()
"""


def gone(processes: list[psutil.Process], seconds: float) -> bool:
    """All of them have ended within so many seconds (a zombie has ended)."""
    return until(lambda: not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes), seconds)


def until(holds: Callable[[], object], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_kill_9_of_the_client_leaves_no_process_no_socket_no_shared_memory(tiny: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(HERE.parent), "SGLANG_HS_DUMP_DIR": str(tmp_path / "dumps"), "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", CLIENT, str(tiny), str(tmp_path / "run")], env=environment, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as client:
        port = int(client.stdout.readline().split()[1])
        family = psutil.Process(client.pid).children(recursive=True)
        maps = "".join(Path(f"/proc/{p.pid}/maps").read_text() for p in family)
        mapped = {int(line.split()[4]) for line in maps.splitlines() if "/dev/shm/" in line}
        ours = [path for path in Path("/dev/shm").iterdir() if path.stat().st_ino in mapped]
        assert len(family) >= 4 and preflight.holders(port) and ours  # warden, launcher, scheduler, detokenizer
        assert len(list((tmp_path / "dumps").iterdir())) == 1
        client.kill()
    assert gone(family, 10)
    assert not preflight.holders(port)
    assert not list((tmp_path / "dumps").iterdir()) and not list(tmp_path.glob("eagle3-*"))
    assert not [path for path in ours if path.exists()]
    assert not preflight.leftover(tmp_path / "run")


STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if len(sys.argv) == 1:
    subprocess.Popen([sys.executable, sys.argv[0], "child"], start_new_session=True)
time.sleep(60)
"""


@pytest.mark.parametrize("ending", ["close", "stop", "terminate", "kill", "server dies"])
def test_the_warden_ends_everything_that_descends_from_the_server(tmp_path: Path, ending: str) -> None:
    """The server and its child ignore SIGTERM; the child has left the process group."""
    script, folder = tmp_path / "stubborn.py", tmp_path / "dump"
    script.write_text(STUBBORN)
    folder.mkdir()
    order = {"owner": os.getpid(), "command": [sys.executable, str(script)], "cwd": str(tmp_path), "log": str(tmp_path / "log"),
             "remove": [str(folder)]}
    warden = subprocess.Popen([sys.executable, str(engine_module.WARDEN)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    warden.stdin.write(json.dumps(order).encode() + b"\n")
    server = psutil.Process(json.loads(warden.stdout.readline())["pid"])
    assert until(server.children, 20)
    family = server.children()
    time.sleep(0.3)
    act = {"close": warden.stdin.close, "stop": lambda: warden.stdin.write(b"stop\n"), "terminate": warden.terminate, "kill": warden.kill,
           "server dies": server.kill}
    act[ending]()
    if ending == "kill":  # the kernel ends the server; its child is SGLang's own affair, which watches its parent
        assert gone([server], 5)
        family[0].kill()
    else:
        assert gone([server, *family], 10)
        assert until(lambda: not folder.exists(), 5)
    if ending == "server dies":
        assert json.loads(warden.stdout.readline()) == {"exit": -signal.SIGKILL}
    warden.wait(10)
    warden.stdin.close()
    warden.stdout.close()


# ---- faults before the start ----


def test_a_busy_port_names_its_holder(tiny: Path, tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(Eagle3Error, match=rf"engine port {port}: address already in use, held by process {os.getpid()} \(.*s old"):
            Engine.start(tiny, tmp_path, device="cpu", port=port)


def test_an_interpreter_without_sglang_is_named(tiny: Path, tmp_path: Path) -> None:
    venv.EnvBuilder(symlinks=True).create(tmp_path / "venv")
    bare = tmp_path / "venv" / "bin" / "python"
    message = rf"{bare}: it has no module sglang.launch_server \(found: python 3.*sglang absent.*wanted: SGLang 0.5.14"
    with pytest.raises(Eagle3Error, match=message):
        Engine.start(tiny, tmp_path, device="cpu", python=str(bare))
    with pytest.raises(Eagle3Error, match="cannot be run"):
        Engine.start(tiny, tmp_path, device="cpu", python=str(tmp_path / "nothing"))


@pytest.mark.parametrize(("options", "why"), [
    ({"capture_layers": [2, 4, 8]}, "between 1 and 7"), ({"capture_layers": [5, 4, 2]}, "ascending"), ({"capture_layers": []}, "ascending"),
    ({"dtype": "int8"}, "dtype 'int8'"), ({"extra_args": ["--port=5"]}, "arguments port"), ({"extra_args": ["--api-key", "x"]}, "api_key")])
def test_parameters_without_sense_are_refused(tiny: Path, tmp_path: Path, options: dict, why: str) -> None:
    with pytest.raises(ParamError, match=why):
        Engine.start(tiny, tmp_path, device="cpu", **options)


def test_no_room_for_the_dump_is_said_before_the_start(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(Eagle3Error, match="MB are needed"):
        Engine.start(tiny, tmp_path, capture_layers=LAYERS, device="cpu", max_total_tokens=10**12)


def test_secrets_do_not_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", "/somewhere")
    environment = preflight.engine_environment({})
    assert "HF_TOKEN" not in environment and "SGLANG_HS_DUMP_DIR" not in environment
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(preflight.PLUGIN_DIR)


# ---- faults of the start, with a scripted server in SGLang's place ----


@pytest.fixture
def faulty(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start a server with one fault; whatever comes of it, nothing of it may be left."""
    monkeypatch.setenv("SGLANG_HS_DUMP_DIR", str(tmp_path / "dumps"))
    monkeypatch.setattr("eagle3lib.client.BACK_OFF_S", 0.05)
    real = Settings.command.fget
    started: list[Engine] = []

    def start(fault: str, timeout_s: float = 20) -> Engine:
        fake = [sys.executable, str(HERE / "fake_server.py"), fault]
        monkeypatch.setattr(Settings, "command", property(lambda self: [*fake, *real(self)[3:]]))
        monkeypatch.setattr(Engine, "_launch", lambda self, launch=Engine._launch: (started.append(self), launch(self)))
        return Engine.start(tiny, tmp_path / "run", capture_layers=LAYERS, device="cpu", dtype="float32", start_timeout_s=timeout_s)

    yield start
    for engine in started:
        engine.stop()
        assert gone(engine._processes, 5) and not preflight.holders(engine.port)
    assert not list((tmp_path / "dumps").iterdir())


def test_the_scripted_server_without_a_fault_is_accepted(faulty) -> None:
    assert faulty("none").handshake["layers"] == LAYERS


START_FAULTS = {
    "no JSON": r"/v1/models answered with something that is no JSON",
    "other nonce": r"check engine.nonce: measured \['somebody-else'\]",
    "other model": r"check engine.model: measured /models/other",
    "cached prefixes": r"check engine.arguments: measured \{'disable_radix_cache': False\}, limit \{'disable_radix_cache': True\}",
    "no handshake": r"check engine.handshake: measured 0 writing ranks",
    "two writers": r"check engine.handshake: measured 2 writing ranks",
    "other layers": r"check engine.capture: measured \{'layers': \[3, 5, 6\]\}, limit \{'layers': \[2, 4, 5\]\}",
    "other dtype": r"check engine.capture: measured \{'dtype': 'float16'\}",
    "other writer": r"check engine.writer: measured process 1,",
    "refusal": r"capture refused by the plugin.*would capture \[3, 5, 6\]",
    "every request fails": r"failed 3 times; last: HTTP 500: no kernel image",
    "no dump": r"check engine.dump: .*rows 0 to 11 of 12 are missing",
    "zero states": r"check engine.dump: .*r_4 at row 0 has one single value",
    "other tokens": r"check engine.dump: .*the states are another request's",
    "sick after the probe": r"check engine.health: measured HTTP 503",
    "dies at once": r"ended with exit code 1 .*last error in its log: ImportError: libcudart.so.13",
    "dies at the first request": r"ended with exit code 7 .*last error in its log: torch.OutOfMemoryError: CUDA out of memory",
    "hangs": r"still importing SGLang \d+ s after the start, which is past start_timeout_s",
}


@pytest.mark.parametrize("fault", START_FAULTS)
def test_a_server_that_is_not_ours_not_ready_or_not_capturing_is_refused_by_name(faulty, monkeypatch, fault: str) -> None:
    if fault == "no dump":
        monkeypatch.setitem(capture.read_dump.__kwdefaults__, "timeout_s", 0.5)
    with pytest.raises(Eagle3Error, match=START_FAULTS[fault]):
        faulty(fault, timeout_s=3 if fault == "hangs" else 20)


def test_a_foreign_server_that_says_yes_to_everything_is_never_accepted(faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """It took the port after our look at it; our own process hangs. Its word is not even asked for."""
    monkeypatch.setattr(preflight, "require_port_free", lambda port: None)
    port = preflight.free_port()
    monkeypatch.setattr(preflight, "free_port", lambda: port)
    command = [sys.executable, str(HERE / "fake_server.py"), "none", "--port", str(port), "--served-model-name", "x", "--model-path", "x"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_HS_")}
    with subprocess.Popen(command, env=environment) as foreign:
        try:
            assert until(lambda: preflight.holders(port), 20)
            with pytest.raises(Eagle3Error, match=rf"check engine.socket: measured process {foreign.pid} \(.*fake_server.py none"):
                faulty("hangs")
        finally:
            foreign.kill()


def test_a_second_server_of_the_same_run_is_refused(faulty) -> None:
    first = faulty("none")
    with pytest.raises(Eagle3Error, match=r"another server of this run is alive: process \d+ .*port"):
        faulty("none")
    first.require_alive()


def test_what_a_killed_run_left_is_cleaned_and_nothing_else(tmp_path: Path) -> None:
    ours, other = tmp_path / "0123456789abcdef", tmp_path / "precious"
    for folder in (ours, other):
        folder.mkdir()
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    with subprocess.Popen(sleep) as process, subprocess.Popen(sleep) as bystander:
        alive = {"pid": process.pid, "created": psutil.Process(process.pid).create_time()}
        reused = {"pid": bystander.pid, "created": 1.0}  # another process had this number when it was noted
        record = {"nonce": ours.name, "dump_dir": str(ours), "processes": [alive, reused]}
        (tmp_path / "engine.json").write_text(json.dumps(record))
        assert preflight.leftover(tmp_path)["alive"] == [process.pid]
        assert preflight.clean_leftover(tmp_path) == [f"ended process {process.pid}", f"deleted {ours}"]
        assert process.poll() is not None and bystander.poll() is None
        bystander.kill()
    assert not ours.exists() and preflight.leftover(tmp_path) == {}
    (tmp_path / "engine.json").write_text(json.dumps(record | {"dump_dir": str(other), "processes": []}))
    preflight.clean_leftover(tmp_path)
    assert other.exists()  # its name is not that run's nonce
