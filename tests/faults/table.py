"""The faults: each with what is done, the check that catches it, and what the message says. docs/faults.md is this table.

`python tests/faults/table.py` writes the document anew. A message is given by its telling part; … stands for anything.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "faults.md"


class Fault(NamedTuple):
    what: str  # what is done, for the reader
    check: str  # what catches it
    says: str  # part of the message

    @property
    def pattern(self) -> str:
        return re.escape(self.says).replace("…", ".*")


BEFORE = {
    "no interpreter": Fault("`engine_python` names a file that is not there", "preflight: interpreter", "it cannot be run (FileNotFoundError"),
    "no Python": Fault("`engine_python` is a program that is no Python", "preflight: interpreter", "asked for its packages, it ended with exit code"),
    "no SGLang": Fault("the interpreter that really runs lacks SGLang", "preflight: interpreter", "it has no module sglang.launch_server"),
    "wrong version": Fault("SGLang is there in another version than the parameters ask for", "preflight: versions",
                           "it has sglang 0.5.14; wanted: sglang==0.4.9"),
    "no entry point": Fault("the plugin's folder has no entry point", "preflight: plugin", "it does not see the capture plugin's entry point"),
    "busy port": Fault("somebody listens on the port", "preflight: port", "address already in use, held by process"),
    "two of us": Fault("a server of this run is alive", "preflight: leftovers", "another server of this run is alive: process"),
    "no model": Fault("the target's folder is not there", "preflight: target", "no such model folder"),
    "no room": Fault("/dev/shm is smaller than what is under way", "preflight: room", "MB are needed"),
    "capture and speculation": Fault("speculation is asked for while capturing", "preflight: sense",
                                     "a server that captures cannot have it, because speculation takes"),
    "capture and graphs": Fault("CUDA graphs are asked for while capturing", "preflight: sense",
                                "a server that captures cannot have it, because a replayed CUDA graph"),
    "chain of wrong length": Fault("3 steps, top-k 1 and 8 draft tokens", "preflight: sense", "so 4 is the right value"),
    "layer beyond": Fault("a layer is captured that the target does not have", "preflight: sense", "between 1 and 7 are wanted"),
}

SERVER = {
    "no JSON": Fault("a web server that is no SGLang holds our port", "engine.nonce", "/v1/models answered with something that is no JSON"),
    "other nonce": Fault("the server has another nonce", "engine.nonce", "check engine.nonce: measured ['somebody-else']"),
    "other model": Fault("the server serves another model", "engine.model", "check engine.model: measured /models/other"),
    "cached prefixes": Fault("the server resolved an argument otherwise: the prefix cache is on", "engine.arguments",
                             "check engine.arguments: measured {'disable_radix_cache': False}, limit {'disable_radix_cache': True}"),
    "other chunk": Fault("the server resolved an argument otherwise: another prefill chunk", "engine.arguments",
                         "check engine.arguments: measured {'chunked_prefill_size': 4096}"),
    "no handshake": Fault("the plugin was never called", "engine.handshake", "check engine.handshake: measured 0 writing ranks"),
    "torn handshake": Fault("the handshake is cut in half", "engine.handshake", "check engine.handshake: measured no JSON"),
    "handshake of another kind": Fault("the handshake is a JSON list", "engine.handshake", "check engine.handshake: measured no JSON object"),
    "info of another kind": Fault("/server_info answers a JSON list", "engine.server info", "check engine.server info: measured list"),
    "info without ranks": Fault("/server_info says neither version nor ranks", "engine.capture",
                                "check engine.capture: measured {'tp_size': 1, 'sglang': '0.5.14'}"),
    "models of another kind": Fault("/v1/models lists numbers", "engine.nonce", "check engine.nonce: measured [1]"),
    "writer not said": Fault("the handshake does not say whose it is", "engine.writer", "check engine.writer: measured process None"),
    "two writers": Fault("two ranks write the same dumps", "engine.handshake", "check engine.handshake: measured 2 writing ranks"),
    "stale handshake": Fault("the handshake is an earlier server's", "engine.capture",
                             "check engine.capture: measured {'nonce': 'fedcba9876543210'}"),
    "other layers": Fault("the model says that it captures other layers", "engine.capture",
                          "check engine.capture: measured {'layers': [3, 5, 6]}, limit {'layers': [2, 4, 5]}"),
    "other hidden size": Fault("the model has another hidden size", "engine.capture", "check engine.capture: measured {'hidden_size': 128}"),
    "other dtype": Fault("the model runs in another dtype", "engine.capture", "check engine.capture: measured {'dtype': 'float16'}"),
    "other version": Fault("the plugin runs in another SGLang than the server says", "engine.capture",
                           "check engine.capture: measured {'sglang': '0.4.9'}"),
    "other ranks": Fault("tensor parallelism differs between plugin and server", "engine.capture", "check engine.capture: measured {'tp_size': 8}"),
    "other writer": Fault("the handshake is of a process that is not ours", "engine.writer", "check engine.writer: measured process 1,"),
    "refusal": Fault("the plugin refuses", "engine.handshake",
                     "capture refused by the plugin inside the server: Refused: the model would capture [3, 5, 6]"),
    "every request fails": Fault("healthy, but every request fails", "client: retries", "failed 3 times; last: HTTP 500: no kernel image"),
    "no greedy answer": Fault("temperature 0 gives another token each time", "engine.same again", "check engine.same again, tokens"),
    "prompt cut": Fault("the server computes on fewer tokens than were sent", "client: counts", "11 prompt tokens…not what was asked"),
    "no dump": Fault("the plugin says yes and writes nothing", "engine.dump", "check engine.dump: …rows 0 to 11 of 12 are missing"),
    "sick after the probes": Fault("one yes that then flips back", "engine.health", "check engine.health: measured HTTP 503"),
    "dies at once": Fault("the launch fails", "engine: alive", "ended with exit code 1 …last error in its log: ImportError: libcudart.so.13"),
    "dies at the first request": Fault("the first request kills the server", "engine: alive",
                                       "ended with exit code 7 …last error in its log: torch.OutOfMemoryError: CUDA out of memory"),
    "log full of errors": Fault("thousands of log lines, then death: a full pipe would block it", "engine: alive",
                                "last error in its log: ERROR 1999: NCCL error: unhandled system error"),
    "killed from outside": Fault("the server is killed while it starts", "engine: alive", "ended with exit code -9"),
    "hangs": Fault("the start hangs", "engine: start_timeout_s", "still importing SGLang 3 s after the start, which is past start_timeout_s"),
    "never answers": Fault("healthy, but a request is never answered", "engine: start_timeout_s",
                           "still waiting for the answer to a probe 3 s after the start"),
    "a foreign server answers": Fault("a stale or foreign server holds our port and says yes to everything", "engine.socket",
                                      "check engine.socket: measured process …fake_server.py none"),
}

PLUGIN = {
    "plugin raises": Fault("the plugin raises; SGLang logs it and serves on without it", "engine.handshake",
                           "check engine.handshake: measured 0 writing ranks"),
    "newer SGLang": Fault("an SGLang whose batch has other fields than the plugin knows", "engine.handshake",
                          "capture refused by the plugin inside the server: Refused: ForwardBatch has no extend_everything"),
    "prefix cache on": Fault("prefix cache really on, and the plugin does not look", "engine.dump", "check engine.dump: …rows 0 to …are missing"),
    "weights cut in half": Fault("the weights file is cut in half", "engine: alive", "last error in its log: …SafetensorError"),
}

CAPTURE = {
    "one layer early": Fault("last hidden state one layer early, normed", "engine.greedy token", "check engine.greedy token"),
    "norm never": Fault("last hidden state without the final norm", "engine.greedy token", "check engine.greedy token"),
    "norm twice": Fault("the final norm applied twice", "engine.log-probabilities", "check engine.log-probabilities"),
    "layers off by one": Fault("the model captures r_3, r_5, r_6 after saying r_2, r_4, r_5", "engine.layer", "check engine.layer of r_2"),
    "streams swapped": Fault("the captured layers in another order", "engine.layer", "check engine.layer of r_2"),
    "last chunk lost": Fault("of a prompt in several chunks only the first is dumped", "engine.dump", "rows 128 to 144 of 145 are missing"),
    "first rows lost": Fault("rows missing at the front, as behind a prefix-cache hit", "engine.dump", "rows 0 to 11 of 12 are missing"),
    "rows swapped in a batch": Fault("states of one request saved under another in a batch", "engine.in a batch", "check engine.in a batch"),
    "rows shifted": Fault("every state one row late", "engine.greedy token", "check engine.greedy token"),
    "one wrong row": Fault("one row repeated in place of the next", "engine.log-probabilities", "check engine.log-probabilities"),
    "tokens of another request": Fault("the file holds another request's tokens", "engine.dump", "the states are another request's"),
    "stale dump": Fault("an earlier server's file under this name", "engine.dump", "check engine.dump: …says {"),
    "zeros": Fault("all-zero states", "engine.dump", "r_4 at row 0 has one single value throughout"),
    "NaN": Fault("one NaN", "engine.dump", "the last hidden state at row 3 has NaN or infinite values"),
    "padded rows": Fault("padded rows dumped too", "engine.dump", "no token was sent there"),
    "cast to float16": Fault("states cast to float16", "engine.dump", "F16 for 12 tokens; expected [12, 4, 64] float32"),
    "two writers of one file": Fault("a second rank writes the same file, half of it", "engine.dump", "cannot be read"),
    "disk full": Fault("the write fails", "engine.dump", "the server could not write the rows from 0: OSError: [Errno 28]"),
    "too late": Fault("the dump comes long after the reply", "engine.dump", "rows 0 to 11 of 12 are missing"),
}

PARTS = (
    ("Before the start", "Nothing is started; `python -m eagle3lib doctor` says the same.", BEFORE),
    ("The server", "A scripted server (`tests/fake_server.py`) shows each of these, as a real one cannot be made to.", SERVER),
    ("The plugin and the model", "Real SGLang, started with the fault.", PLUGIN),
    ("The capture", "Real SGLang, a sabotaged copy of the plugin.", CAPTURE),
)


ABOUT = ("Every fault here is put in by `tests/faults` and found before any extracted row is accepted: the command ends with exit code 1 (2 where a",
         "parameter is at fault) and this message, and no process, socket or file is left. … stands for anything. A test holds this table and the",
         "suite equal; `python tests/faults/table.py` writes it anew.")


def render() -> str:
    lines = ["# Faults", "", *ABOUT, ""]
    for title, about, faults in PARTS:
        lines += [f"## {title}", "", about, "", "| fault | caught by | message |", "| --- | --- | --- |"]
        lines += [f"| {name}: {f.what} | {f.check} | {f.says} |" for name, f in faults.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    DOCUMENT.write_text(render())
