"""Nothing outlives us: however we end, no process, socket, shared memory or folder of a server stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_notebook
from servers import HERE, Witness, fake_python, gone, until
from workbooks import workbook

from eagle3lib import engine as engine_module
from eagle3lib import preflight
from eagle3lib.engine import Engine

CLIENT = """
import sys
from pathlib import Path
from eagle3lib.engine import Engine
engine = Engine.start(Path(sys.argv[1]), Path(sys.argv[2]), capture_layers=[2, 4, 5], device="cpu")
print("ready", engine.port, flush=True)
sys.stdin.read()
"""


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


# ---- a cell of a notebook starts a server, and then: ----

CELL = """
import time
from pathlib import Path
from eagle3lib.engine import Engine
server = Engine.start(Path({target!r}), stage.dir, capture_layers=[2, 4, 5], device="cpu", dtype="float32", python={python!r},
                      chunked_prefill_size=128)
Path({ready!r}).write_text("ready")
{then}
"""
WAIT = "time.sleep(60)"
ENDS = {  # what the cell does next, what is done from outside, exit code of the runner
    "normal end": ("server.stop()", None, 0),
    "end without stop": ("pass", None, 0),
    "exception in the cell": ("raise ZeroDivisionError('x')", None, 1),
    "Ctrl-C": (WAIT, lambda runner, _: runner.send_signal(signal.SIGINT), 130),
    "SIGTERM of the runner": (WAIT, lambda runner, _: runner.terminate(), 130),
    "kill -9 of the runner": (WAIT, lambda runner, _: runner.kill(), -9),
    "kill -9 of the kernel": (WAIT, lambda _, kernel: kernel.kill(), 1),
}


@pytest.mark.parametrize("end", ENDS)
def test_however_a_notebook_ends_nothing_of_its_server_is_left(tiny: Path, tmp_path: Path, end: str) -> None:
    then, act, code = ENDS[end]
    witness, ready = Witness(tmp_path), tmp_path / "ready"
    cell = CELL.format(target=str(tiny), python=fake_python(tmp_path), ready=str(ready), then=then)
    workbook(tmp_path / "notebooks", bodies={"prepare": cell})
    (tmp_path / "params.yaml").write_text("seed: 1\n")
    environment = {**os.environ, **witness.environment, "PYTHONPATH": str(HERE.parent), "EAGLE3_RUNS": str(tmp_path / "runs"),
                   "EAGLE3_NOTEBOOKS": str(tmp_path / "notebooks")}
    only = ["--only", "prepare", "--run-id", "r"] if act is None and code == 0 else []
    (tmp_path / "runs" / "r").mkdir(parents=True)
    with subprocess.Popen([sys.executable, "-m", "eagle3lib", "run", str(tmp_path / "params.yaml"), *only], env=environment,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as runner:
        shared, ports = [], set()
        if act is not None:
            assert until(ready.exists, 90), "no server"
            shared, ports = witness.shared_memory(), witness.ports()
            assert shared and ports and len(list(witness.dumps.iterdir())) == 1
            kernel = next(p for p in witness.processes() if "ipykernel_launcher" in " ".join(p.cmdline()))
            act(runner, kernel)
        shown = runner.communicate(timeout=120)[0]
    assert ready.exists() and runner.returncode == code, shown
    witness.require_nothing(15, shared, ports)


def test_shutting_a_kernel_down_as_jupyterlab_does_ends_its_server(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also shows what a cell looks like that starts a server: the phase, and on failure one red line and the end of the log."""
    witness = Witness(tmp_path)
    environment = {**os.environ, **witness.environment, "PYTHONPATH": str(HERE.parent)}
    source = f"import types; stage = types.SimpleNamespace(dir={str(tmp_path / 'run')!r})" + CELL
    bad, good = (source.format(target=str(tiny), python=fake_python(tmp_path, fault), ready=str(tmp_path / "ready"), then="pass")
                 for fault in ("dies at the first request", "none"))
    notebook = new_notebook(cells=[new_code_cell(bad), new_code_cell(good)], metadata={"kernelspec": {"name": "python3", "display_name": "x"}})
    client = NotebookClient(notebook, allow_errors=True, timeout=120)
    with client.setup_kernel(env=environment, cwd=str(tmp_path)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        shared, ports = witness.shared_memory(), witness.ports()
        assert shared and len(ports) >= 1
    witness.require_nothing(15, shared)
    failed, started = notebook.cells
    error = next(o for o in failed.outputs if o["output_type"] == "error")
    assert "\x1b[31m" in error["traceback"][0] and "exit code 7" in error["traceback"][0] and "CUDA out of memory" in error["traceback"][0]
    assert error["traceback"][-1].startswith("  | ") and not any("Traceback" in line for line in error["traceback"])
    text = "".join(o["text"] for o in started.outputs if o["output_type"] == "stream")
    assert "engine: importing SGLang" in text and "capturing layers [2, 4, 5]" in text and "File " not in text


def test_what_a_killed_warden_left_is_cleaned_by_the_next_start(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    witness = Witness(tmp_path)
    for name, value in witness.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(witness.tmp))
    options = {"capture_layers": [2, 4, 5], "device": "cpu", "dtype": "float32", "chunked_prefill_size": 128, "python": fake_python(tmp_path)}
    first = Engine.start(tiny, tmp_path / "run", **options)
    shared, port = witness.shared_memory(), first.port
    note = first._scratch / preflight.SHM_NOTE
    assert shared and until(note.exists, 5)
    first._warden.kill()
    first._warden.wait()
    assert until(lambda: not preflight.holders(port), 5), "the kernel ends the server with its warden"
    assert all(path.exists() for path in shared) and first.dump_dir.exists()
    left = preflight.leftover(tmp_path / "run")
    assert not left["alive"] and set(shared) <= set(left["files"]) and first.dump_dir in left["files"]
    with Engine.start(tiny, tmp_path / "run", **options) as second:
        assert not any(path.exists() for path in shared) and not first.dump_dir.exists() and not note.exists()
        assert second.dump_dir.exists()
    witness.require_nothing(shared=shared)
    first._warden.stdin.close()
    first._warden.stdout.close()
    first._warden = None


# ---- the warden by itself ----

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
