"""A stand-in for SGLang's launcher whose faults can be scripted: `python fake_server.py FAULT <the real command line>`.

It computes the tiny Llama of tests/tiny.py in numpy, so without a fault (FAULT "none") it passes every proof of readiness by
honest means, and each test changes exactly one thing. Standard library, numpy and safetensors only.
"""

from __future__ import annotations

import json
import mmap
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

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


# ---- the model ----


class Llama:
    """float32, one prompt at a time, no cache: hidden states r_0 .. r_L and the one after the final norm."""

    def __init__(self, folder: Path):
        self.config = json.loads((folder / "config.json").read_text())
        self.weights = {name: w.astype(np.float32) for file in folder.glob("*.safetensors") for name, w in load_file(file).items()}

    def streams(self, ids: list[int]) -> list[np.ndarray]:
        r = [self.weights["model.embed_tokens.weight"][ids]]
        for k in range(self.config["num_hidden_layers"]):
            h = r[-1] + self.attention(k, self.norm(r[-1], f"model.layers.{k}.input_layernorm"))
            r.append(h + self.mlp(k, self.norm(h, f"model.layers.{k}.post_attention_layernorm")))
        return [*r, self.norm(r[-1], "model.norm")]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def project(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self.weights[f"{name}.weight"].T

    def mlp(self, k: int, x: np.ndarray) -> np.ndarray:
        gate, up = (self.project(x, f"model.layers.{k}.mlp.{part}_proj") for part in ("gate", "up"))
        return self.project(gate / (1 + np.exp(-gate)) * up, f"model.layers.{k}.mlp.down_proj")

    def attention(self, k: int, x: np.ndarray) -> np.ndarray:
        c, n = self.config, len(x)
        heads, kv, name = c["num_attention_heads"], c["num_key_value_heads"], f"model.layers.{k}.self_attn"
        q, key, value = (self.project(x, f"{name}.{p}_proj").reshape(n, h, -1).swapaxes(0, 1) for p, h in (("q", heads), ("k", kv), ("v", kv)))
        q, key = rotate(q, self.theta()), rotate(key, self.theta())
        key, value = (np.repeat(t, heads // kv, axis=0) for t in (key, value))
        scores = q @ key.swapaxes(1, 2) / q.shape[-1] ** 0.5 + np.triu(np.full((n, n), -np.inf, np.float32), 1)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return self.project((weights / weights.sum(-1, keepdims=True) @ value).swapaxes(0, 1).reshape(n, -1), f"{name}.o_proj")

    def theta(self) -> float:
        return self.config.get("rope_theta") or self.config["rope_parameters"]["rope_theta"]

    def logprobs(self, last: np.ndarray) -> np.ndarray:
        logits = self.project(last, "lm_head")
        top = logits.max(-1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


def rotate(x: np.ndarray, theta: float) -> np.ndarray:
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1], dtype=np.float32)[:, None] * theta ** (-np.arange(half, dtype=np.float32) / half)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


# ---- the plugin's part ----


def handshake() -> None:
    if DUMP is None or FAULT == "no handshake":
        return
    if FAULT == "torn handshake":
        (DUMP / "handshake-0.json").write_text('{"nonce": "0123')
        return
    if FAULT == "handshake of another kind":
        (DUMP / "handshake-0.json").write_text("[]")
        return
    hello = {"nonce": ENV["SGLANG_HS_NONCE"], "pid": os.getpid(), "rank": 0, "tp_size": 1, "layers": LAYERS,
             "hidden_size": int(ENV["SGLANG_HS_HIDDEN_SIZE"]), "dtype": ARGS["dtype"], "sglang": "0.5.14", "torch": "2.14.1"}
    hello |= {"other layers": {"layers": [k + 1 for k in LAYERS]}, "other dtype": {"dtype": "float16"}, "other writer": {"pid": 1},
              "other hidden size": {"hidden_size": 128}, "stale handshake": {"nonce": "fedcba9876543210"}, "other version": {"sglang": "0.4.9"},
              "other ranks": {"tp_size": 8}, "writer not said": {"pid": None},
              "refusal": {"error": "Refused: the model would capture [3, 5, 6]"}}.get(FAULT, {})
    (DUMP / "handshake-0.json").write_text(json.dumps(hello))
    if FAULT == "two writers":
        (DUMP / "handshake-1.json").write_text(json.dumps(hello))


def dump(rid: str, ids: list[int], streams: list[np.ndarray]) -> None:
    if DUMP is None or FAULT == "no dump" or not rid.startswith(ENV["SGLANG_HS_NONCE"]):
        return
    hidden = np.stack([*(streams[k] for k in LAYERS), streams[-1]], 1)
    part = DUMP / f".{rid}.part"
    save_file({"hidden": hidden, "input_ids": np.array(ids)}, part,
              {"nonce": ENV["SGLANG_HS_NONCE"], "rid": rid, "start": "0", "layers": ENV["SGLANG_HS_LAYERS"]})
    os.rename(part, DUMP / f"{rid}.0.safetensors")


def shared_memory() -> mmap.mmap:
    """A file as engines leave them in shared memory when they are killed."""
    with open(f"/dev/shm/psm_eagle3test_{os.getpid()}", "w+b") as file:
        file.truncate(4096)
        return mmap.mmap(file.fileno(), 4096)


# ---- the server ----


def top(row: np.ndarray, k: int) -> list[list[object]]:
    return [[float(row[i]), int(i), None] for i in np.argsort(-row, kind="stable")[:k]]


class Handler(BaseHTTPRequestHandler):
    requests = real = 0

    def do_GET(self) -> None:
        info = {**ARGS, "version": "0.5.14", "tp_size": 1, "quantization": None, "kv_cache_dtype": "auto", "api_key": "hush"}
        info |= {"cached prefixes": {"disable_radix_cache": False}, "other chunk": {"chunked_prefill_size": 4096}}.get(FAULT, {})
        if FAULT == "info without ranks":
            info = {name: value for name, value in info.items() if name not in ("tp_size", "version")}
        name = "somebody-else" if FAULT == "other nonce" else ARGS["served_model_name"]
        model = "/models/other" if FAULT == "other model" else ARGS["model_path"]
        answers = {"/v1/models": {"data": [1 if FAULT == "models of another kind" else {"id": name}]}, "/model_info": {"model_path": model},
                   "/server_info": [info] if FAULT == "info of another kind" else info, "/health": {}}
        self.answer(503 if FAULT == "sick after the probes" and Handler.requests else 200, answers[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.requests += 1
        if self.path != "/generate":
            return self.answer(200, {})
        if FAULT == "every request fails":
            return self.answer(500, {"error": {"message": "no kernel image"}})
        if FAULT == "never answers":
            time.sleep(600)
        if FAULT == "dies at the first request" or (FAULT in ("dies once", "dies always") and self.worn_out(str(body["rid"]))):
            print("torch.OutOfMemoryError: CUDA out of memory", file=sys.stderr, flush=True)
            os._exit(7)
        many = isinstance(body["rid"], list)
        answers = [self.generate(body | {"input_ids": ids, "rid": rid}) for ids, rid in
                   (zip(body["input_ids"], body["rid"], strict=True) if many else [(body["input_ids"], body["rid"])])]
        self.answer(200, answers if many else answers[0])

    def worn_out(self, rid: str) -> bool:
        """At the sixth request that is no probe; once in a run folder, or in every server."""
        Handler.real += "-probe-" not in rid
        once = Path("died-once")
        if Handler.real < 6 or (FAULT == "dies once" and once.exists()):
            return False
        once.touch()
        return True

    def generate(self, body: dict) -> dict:
        ids, params, out = body["input_ids"], body["sampling_params"], []
        for _ in range(params["max_new_tokens"]):
            streams = MODEL.streams([*ids, *out])
            if not out:
                dump(body["rid"], ids, streams)
                prompt = MODEL.logprobs(streams[-1])
            out.append(int(MODEL.logprobs(streams[-1][-1:]).argmax()) if FAULT != "no greedy answer" else Handler.requests % 300)
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": len(ids), "completion_tokens": len(out),
                "cached_tokens": 0}
        if FAULT == "prompt cut":
            meta["prompt_tokens"] -= 1
        if body.get("return_logprob"):
            k = body["top_logprobs_num"]
            meta |= {"input_top_logprobs": [None, *(top(row, k) for row in prompt[:-1])], "output_top_logprobs": [top(prompt[-1], k)]}
        return {"output_ids": out, "meta_info": meta}

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
    if FAULT == "log full of errors":
        for n in range(2000):
            print(f"ERROR {n}: NCCL error: unhandled system error", file=sys.stderr, flush=True)
        sys.exit(3)
    if FAULT in ("hangs", "killed from outside"):
        time.sleep(600)
    HELD = shared_memory()
    MODEL = Llama(Path(str(ARGS["model_path"])))
    handshake()
    ThreadingHTTPServer(("127.0.0.1", int(ARGS["port"])), Handler).serve_forever()
