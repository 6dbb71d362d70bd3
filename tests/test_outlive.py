"""Nothing outlives us: however we end, no process, socket, shared memory or folder of a server stays."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from servers import HERE, gone, until

from eagle3lib import engine as engine_module
from eagle3lib import preflight

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
