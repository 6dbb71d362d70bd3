"""Readiness: why we believe that the server is ours, ready, and capturing. One named check for each reason.

"Health says yes" is not among the reasons: a stale or foreign server says yes too. The order is from the outside in: the
process lives, its socket is *its*, it knows our nonce, it serves what we asked, the plugin inside it said so, and real
requests came through and left dumps that check out (see probes). A failed check ends the start with its name.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import requests

from eagle3lib import capture, preflight, probes, redact
from eagle3lib.errors import CheckFailed, Eagle3Error
from eagle3lib.probes import require
from eagle3lib.progress import tqdm

if TYPE_CHECKING:
    from eagle3lib.engine import Engine

LOOK_S = 0.2
SLOWEST_LOOK_S = 30.0  # for one of the small requests below
FASTEST_LOAD = 20e9  # bytes/s; no disk, page cache and bus of today load weights faster
FASTEST_START_S = 2.0  # importing SGLang alone takes longer
# What the log shows last says what the server is doing; the latest phase first.
PHASES = (("server is fired up", "opening the port"), ("KV Cache is allocated", "preparing kernels"),
          ("Load weight end", "allocating memory"), ("Load weight begin", "loading weights"),
          ("Init torch distributed", "setting up the ranks"))
SECRET_ARGS = ("api_key", "admin_api_key", "ssl_keyfile_password")


class Status:
    """One line on the screen: what the start is doing now, and for how long."""

    def __init__(self, begun: float):
        self.begun, self.text, self.shown = begun, "", 0.0
        self.bar = tqdm(bar_format="{desc}")

    def show(self, text: str) -> None:
        now = time.monotonic()
        if text != self.text or now - self.shown >= 1:
            self.bar.set_description_str(f"engine: {text}, {now - self.begun:.0f} s")
            self.text, self.shown = text, now

    def close(self) -> None:
        self.bar.close()


def prove(engine: Engine, timeout_s: float) -> None:
    """Return when every check has passed; raise CheckFailed or Eagle3Error, with the log's tail, when one has not."""
    deadline, status = engine.started + timeout_s, Status(engine.started)
    reference = probes.start_reference(engine) if engine.dump_dir else None
    try:
        _await_socket(engine, deadline, status)
        engine.adopt_children()
        engine.seconds["listening"] = round(time.monotonic() - engine.started, 1)
        status.show("proving identity and arguments")
        _prove_identity(engine, deadline)
        _prove_arguments(engine, deadline)
        if engine.dump_dir:
            _prove_handshake(engine, deadline)
        status.show("sending probes")
        _watched(engine, deadline, lambda: probes.prove(engine, reference) if reference else _prove_answers(engine))
        _prove_still(engine)
        engine.seconds["proved"] = round(time.monotonic() - engine.started, 1)
        status.show(f"ready on port {engine.port}" + (f", capturing layers {engine.settings.capture_layers}" if engine.dump_dir else ""))
    except requests.RequestException as error:
        engine.require_alive()
        what = f"while {status.text} the server stopped answering ({type(error).__name__})"
        raise Eagle3Error(f"engine not ready: {what}. Log: {engine.log_path}\n{engine.log_tail()}") from None
    finally:
        status.close()


def _in_time(engine: Engine, deadline: float, doing: str) -> None:
    engine.require_alive()
    if time.monotonic() > deadline:
        seconds = time.monotonic() - engine.started
        raise Eagle3Error(f"engine not ready: still {doing} {seconds:.0f} s after the start, which is past start_timeout_s. "
                          f"Raise it if the weights are large. Log: {engine.log_path}\n{engine.log_tail()}")


def _watched(engine: Engine, deadline: float, probing: Callable[[], None]) -> None:
    """Probe in a thread, so that a server which takes a request and never answers, or dies over it, ends at once or at the limit."""
    pool = ThreadPoolExecutor(1, thread_name_prefix="probes")
    future = pool.submit(probing)
    pool.shutdown(wait=False)
    while not wait([future], timeout=LOOK_S).done:
        _in_time(engine, deadline, "waiting for the answer to a probe")
    future.result()


# ---- our process, our socket ----


def _await_socket(engine: Engine, deadline: float, status: Status) -> None:
    while not _answers(engine.port):
        status.show(_phase(engine))
        _in_time(engine, deadline, status.text)
        time.sleep(LOOK_S)
    _prove_socket(engine)
    _say_if_implausible(engine)


def _prove_socket(engine: Engine) -> None:
    engine.require_alive()
    held = preflight.holders(engine.port)
    foreign = held - engine.own_pids()
    who = "; ".join(map(preflight.describe_process, foreign)) or (f"process tree of {engine.pid}" if held else "nobody listens")
    require(engine, "socket", bool(held) and not foreign, who,
            f"port {engine.port} held by our own processes only", "a stale or foreign server that answers in place of ours")


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _phase(engine: Engine) -> str:
    log = engine.log_tail(200)
    return next((phase for mark, phase in PHASES if mark in log), "importing SGLang")


def _say_if_implausible(engine: Engine) -> None:
    weights = sum(file.stat().st_size for file in engine.settings.target.glob("*.safetensors"))
    seconds, least = time.monotonic() - engine.started, max(FASTEST_START_S, weights / FASTEST_LOAD)
    if seconds < least:
        tqdm.write(f"engine: listening after {seconds:.1f} s with {weights / 1e9:.1f} GB of weights: implausibly fast "
                   f"(at least {least:.1f} s were expected). The checks that follow decide.")


# ---- what it says about itself ----


def _ask(engine: Engine, path: str, deadline: float) -> Any:
    """The JSON at `path`; a server that is not up yet (5xx, no connection) is asked again."""
    while True:
        try:
            response = engine.client.get(path, SLOWEST_LOOK_S)
            if response.status_code < 500:
                return response.json()
        except requests.ConnectionError:
            pass
        except ValueError:
            raise CheckFailed(f"engine not ready: {path} answered with something that is no JSON, so it is no SGLang server. "
                              f"Log: {engine.log_path}\n{engine.log_tail()}") from None
        _in_time(engine, deadline, f"waiting for {path}")
        time.sleep(LOOK_S)


def _prove_identity(engine: Engine, deadline: float) -> None:
    models = _ask(engine, "/v1/models", deadline)
    listed = models.get("data") if isinstance(models, dict) else None
    names = [model.get("id") if isinstance(model, dict) else model for model in listed] if isinstance(listed, list) else models
    require(engine, "nonce", names == [engine.nonce], names, [engine.nonce], "a server of an earlier run or of somebody else")
    info = _ask(engine, "/model_info", deadline)
    path, wanted = (info.get("model_path") if isinstance(info, dict) else info), str(engine.settings.target)
    require(engine, "model", path == wanted, path, wanted, "another model's hidden states")


def _prove_arguments(engine: Engine, deadline: float) -> None:
    info = _ask(engine, "/server_info", deadline)
    require(engine, "server info", isinstance(info, dict), type(info).__name__, "a JSON object", "a server that is no SGLang")
    engine.server_info = redact.hide({k: v for k, v in info.items() if k not in (*SECRET_ARGS, "internal_states")})
    _prove_equal(engine, "arguments", info, engine.settings.arguments, "a server that resolved our arguments to something else")


def _prove_equal(engine: Engine, name: str, found: dict[str, Any], wanted: dict[str, Any], protects: str) -> None:
    """Each value in wanted is in found; the check's record shows only those that differ."""
    wrong = {key: found.get(key, "absent") for key in wanted if found.get(key, "absent") != wanted[key]}
    require(engine, name, not wrong, wrong or f"all {len(wanted)} as asked", {key: wanted[key] for key in wrong} or "as asked", protects)


# ---- the plugin inside it ----


def _prove_handshake(engine: Engine, deadline: float) -> None:
    assert engine.dump_dir
    handshakes: list[dict[str, Any]] = []
    try:
        handshakes = capture.read_handshakes(engine.dump_dir)
    except ValueError as error:
        require(engine, "handshake", False, f"no JSON object ({error})", "1 writing rank", "a plugin that is not ours")
    except Eagle3Error as error:
        raise CheckFailed(f"engine not ready: check engine.handshake: {error} Log: {engine.log_path}\n{engine.log_tail()}") from None
    require(engine, "handshake", len(handshakes) == 1, f"{len(handshakes)} writing ranks", "1 writing rank",
            "a capture that was never active (SGLang only logs a plugin that fails)")
    engine.handshake = handshakes[0]
    wanted = {"nonce": engine.nonce, "layers": engine.settings.capture_layers, "hidden_size": engine.hidden_size,
              "dtype": engine.settings.dtype, "tp_size": engine.server_info.get("tp_size", "not said"),
              "sglang": engine.server_info.get("version", "not said")}
    _prove_equal(engine, "capture", engine.handshake, wanted, "layer ids off by one, or states of another shape or dtype")
    writer = engine.handshake.get("pid")
    require(engine, "writer", writer in engine.own_pids(), f"process {writer}", "a process of ours", "a handshake that another server left")


# ---- real requests ----


def _prove_answers(engine: Engine) -> None:
    """Without the capture: two answers, so that a single yes that flips back is not enough."""
    tokens = []
    for name in ("probe-1", "probe-2"):
        reply = engine.client.generate(probes.prompts(engine.vocab_size)[0], f"{name}-{engine.nonce}", {"temperature": 0, "max_new_tokens": 1})
        require(engine, "probe", len(reply.output_ids) == 1, reply.error or f"{len(reply.output_ids)} token", "1 token",
                "a server that is healthy but fails every request")
        tokens.append(reply.output_ids)
    require(engine, "same again", tokens[0] == tokens[1], tokens, "the same greedy token twice", "a server that is not itself: no greedy "
            "answer, or two servers behind one port")


def _prove_still(engine: Engine) -> None:
    code = engine.client.get("/health", SLOWEST_LOOK_S).status_code
    require(engine, "health", code == 200, f"HTTP {code}", "HTTP 200", "ready once, failing since")
    _prove_socket(engine)
