"""A stand-in for SGLang's launcher whose faults can be scripted: `python fake_server.py FAULT <the real command line>`.

Without a fault (FAULT "none") it passes every proof of readiness, so each test changes exactly one thing. Standard
library, numpy and safetensors only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

FAULT = sys.argv[1]
ENV = os.environ


def parse(words: list[str]) -> dict[str, object]:
    """--some-name value, or a bare --flag, as /server_info shows it."""
    args: dict[str, object] = {}
    for i, word in enumerate(words):
        if word.startswith("--"):
            value = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("--") else True
            args[word[2:].replace("-", "_")] = int(value) if isinstance(value, str) and value.isdigit() else value
    args["mem_fraction_static"] = float(args.get("mem_fraction_static", 0))
    return args


ARGS = parse(sys.argv[2:])
DUMP = Path(ENV["SGLANG_HS_DUMP_DIR"]) if "SGLANG_HS_DUMP_DIR" in ENV else None
LAYERS = [int(k) for k in ENV.get("SGLANG_HS_LAYERS", "").split(",") if k]


def handshake() -> None:
    if DUMP is None or FAULT == "no handshake":
        return
    hello = {"nonce": ENV["SGLANG_HS_NONCE"], "pid": os.getpid(), "rank": 0, "tp_size": 1, "layers": LAYERS,
             "hidden_size": int(ENV["SGLANG_HS_HIDDEN_SIZE"]), "dtype": ARGS["dtype"], "sglang": "0.5.14", "torch": "2.14.1"}
    hello |= {"other layers": {"layers": [k + 1 for k in LAYERS]}, "other dtype": {"dtype": "float16"}, "other writer": {"pid": 1},
              "refusal": {"error": "Refused: the model would capture [3, 5, 6]"}}.get(FAULT, {})
    (DUMP / "handshake-0.json").write_text(json.dumps(hello))
    if FAULT == "two writers":
        (DUMP / "handshake-1.json").write_text(json.dumps(hello))


def dump(rid: str, ids: list[int]) -> None:
    if DUMP is None or FAULT == "no dump":
        return
    hidden = np.random.default_rng(0).standard_normal((len(ids), len(LAYERS) + 1, int(ENV["SGLANG_HS_HIDDEN_SIZE"])), dtype=np.float32)
    if FAULT == "zero states":
        hidden[:, 1] = 0
    save_file({"hidden": hidden, "input_ids": np.array(ids if FAULT != "other tokens" else ids[::-1])}, DUMP / f"{rid}.0.safetensors",
              {"nonce": ENV["SGLANG_HS_NONCE"], "rid": rid, "start": "0", "layers": ENV["SGLANG_HS_LAYERS"]})


class Handler(BaseHTTPRequestHandler):
    probed = False

    def do_GET(self) -> None:
        info = {**ARGS, "version": "0.5.14", "tp_size": 1, "quantization": None, "kv_cache_dtype": "auto", "api_key": "hush"}
        info |= {"cached prefixes": {"disable_radix_cache": False}}.get(FAULT, {})
        name = "somebody-else" if FAULT == "other nonce" else ARGS["served_model_name"]
        model = "/models/other" if FAULT == "other model" else ARGS["model_path"]
        answers = {"/v1/models": {"data": [{"id": name}]}, "/model_info": {"model_path": model}, "/server_info": info, "/health": {}}
        self.answer(503 if FAULT == "sick after the probe" and Handler.probed else 200, answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.probed = True
        if FAULT == "every request fails" or self.path != "/generate":
            return self.answer(500, {"error": {"message": "no kernel image"}})
        if FAULT == "dies at the first request":
            print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr, flush=True)
            os._exit(7)
        dump(body["rid"], body["input_ids"])
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": len(body["input_ids"]), "completion_tokens": 1,
                "cached_tokens": 0}
        self.answer(200, {"output_ids": [1], "meta_info": meta})

    def answer(self, code: int, content: object) -> None:
        data = b"<html>it works</html>" if FAULT == "no JSON" else json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    if FAULT == "dies at once":
        sys.exit("ImportError: libcudart.so.13: cannot open shared object file")
    if FAULT == "hangs":
        time.sleep(600)
    handshake()
    ThreadingHTTPServer(("127.0.0.1", int(ARGS["port"])), Handler).serve_forever()
