"""A headless Chromium and a JupyterLab for tests: both on loopback, both in folders of their own, both ended with the test."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import requests
import websocket

FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking --disable-component-update "
    "--disable-sync --disable-dev-shm-usage --hide-scrollbars --window-size=1400,1000 --remote-debugging-port=0"
).split()
LAST = Path(__file__).resolve().parents[1] / "artifacts" / "browser-gave-up.png"
PATIENCE_S = 240.0  # for anything on a loaded machine; every wait ends as soon as its condition holds


def chromium() -> str:
    """Debian's Chromium; "" where there is none."""
    return shutil.which("chromium") or ""


def wait_for(condition: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """The first true value of condition(); AssertionError that says what was waited for."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.1)
    raise AssertionError(f"waited {seconds:.0f} s for {what}")


@contextlib.contextmanager
def started(command: list[str], log: Path, env: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process whose output goes to a file; ended, at the latest killed, on the way out."""
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=env) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()


class Page:
    """One page of a browser, driven through the Chrome DevTools protocol."""

    def __init__(self, address: str):
        self._socket = websocket.create_connection(address, timeout=PATIENCE_S, suppress_origin=True)
        self._numbers = itertools.count(1)
        self.call("Page.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = self._send(method, params)
        while True:
            answer = json.loads(self._socket.recv())
            if answer.get("method") == "Page.javascriptDialogOpening":  # "leave this page?": yes
                self._send("Page.handleJavaScriptDialog", {"accept": True})
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _send(self, method: str, params: dict[str, Any]) -> int:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        return number

    def js(self, expression: str) -> Any:
        """The value of a JavaScript expression (a promise is awaited)."""
        said = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, f"{expression}: {said['exceptionDetails']}"
        return said["result"].get("value")

    def wait(self, expression: str, seconds: float = PATIENCE_S) -> Any:
        try:
            return wait_for(lambda: self.js(expression), expression, seconds)
        except AssertionError:
            self.screenshot(LAST)
            raise

    def goto(self, address: str) -> None:
        self.call("Page.navigate", url="about:blank")
        self.wait("location.href == 'about:blank'")
        self.call("Page.navigate", url=address)
        self.wait(f"document.readyState == 'complete' && location.href.startsWith({json.dumps(address.split('?')[0])})")

    def click(self, selector: str, text: str) -> None:
        """A real mouse click on the first visible element with this text."""
        find = (
            f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.offsetParent && e.textContent.trim() == {json.dumps(text)})"
            ".map(e => e.getBoundingClientRect()).map(r => [r.x + r.width / 2, r.y + r.height / 2])[0]"
        )
        x, y = self.wait(find)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=27 if key == "Escape" else 0)

    def screenshot(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))
        return path

    def close(self) -> None:
        self._socket.close()


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A page of a fresh Chromium."""
    profile = folder / "profile"
    command = [chromium(), *FLAGS, f"--user-data-dir={profile}", "about:blank"]
    env = {**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder / "config"), "XDG_CACHE_HOME": str(folder / "cache")}
    with started(command, folder / "chromium.log", env) as process:
        port_file = profile / "DevToolsActivePort"
        wait_for(lambda: process.poll() is not None or (port_file.exists() and port_file.read_text().count("\n")), "Chromium's debugging port")
        assert process.poll() is None, (folder / "chromium.log").read_text()[-2000:]
        port = port_file.read_text().split()[0]
        pages = wait_for(lambda: [p for p in requests.get(f"http://127.0.0.1:{port}/json/list", timeout=30).json() if p["type"] == "page"], "a page")
        page = Page(pages[0]["webSocketDebuggerUrl"])
        with contextlib.closing(page):
            yield page


@contextlib.contextmanager
def lab(root: Path, folder: Path) -> Iterator[Callable[[str], str]]:
    """A JupyterLab on `root`; yields a function from a file's name to its address, token included. Its settings are its own."""
    settings = folder / "settings" / "@jupyterlab"
    for name, value in (
        ("notebook-extension/tracker", {"windowingMode": "none"}),  # cells out of sight stay in the page, so that they can be looked at
        ("apputils-extension/notification", {"fetchNews": "false", "checkForUpdates": False}),
    ):
        path = settings / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(value))
    token = secrets.token_hex(16)
    own = {name: str(folder / name.lower()) for name in ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")}
    own |= {"JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"), "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"), "JUPYTER_TOKEN": token}
    options = ["--no-browser", "--allow-root", "--ServerApp.ip=127.0.0.1", "--ServerApp.port=0", f"--ServerApp.root_dir={root}"]
    kept = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    with started([sys.executable, "-m", "jupyter", "lab", *options], folder / "lab.log", {**kept, **own}) as process:
        runtime = Path(own["JUPYTER_RUNTIME_DIR"])
        wait_for(lambda: process.poll() is not None or _url(runtime), "JupyterLab")
        assert process.poll() is None, (folder / "lab.log").read_text()[-3000:]
        url = _url(runtime)
        yield lambda name: f"{url}lab/tree/{name}?reset&token={token}"


def _url(runtime: Path) -> str:
    """Where the server listens, from the file that it writes once it does."""
    for path in runtime.glob("jpserver-*.json") if runtime.is_dir() else []:
        with contextlib.suppress(ValueError, KeyError):
            return json.loads(path.read_text())["url"]
    return ""
