"""Client: token ids in, token ids out, over SGLang's /generate. Bounded retries, and never a word to a dead server.

Text is never sent: what the server computes on is exactly what the caller holds. T: tokens of one prompt.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import requests
import torch

from eagle3lib.errors import Eagle3Error
from eagle3lib.progress import tqdm

ATTEMPTS = 3
BACK_OFF_S = 1.0  # before the second attempt; doubles
REQUEST_TIMEOUT_S = 600.0
STALL_S = 900.0  # no reply to any request for so long ends the work
LOOK_S = 0.5  # how often a waiting caller looks whether the server is alive


@dataclass(frozen=True)
class Reply:
    """finish_reason: "stop" (an end token, which is the last of output_ids), "length" (max_new_tokens reached) or
    "refused" (the server will not take this prompt, e.g. it is too long: `error` says why; output_ids is empty).
    rid: the request id of the attempt that succeeded (a retry gets its own, so half a dump is never mixed in)."""

    output_ids: list[int]
    finish_reason: str
    prompt_tokens: int
    cached_tokens: int
    rid: str
    error: str = ""
    verify_steps: int = 0  # of speculative decoding: target forwards after the prefill
    accepted_drafts: int = 0  # by all of them, also those behind the reply's end


@dataclass
class Client:
    """url: the server's root; vocab_size: ids at or above it would crash the server; require_alive: raises when it is dead."""

    url: str
    vocab_size: int
    require_alive: Callable[[], None]
    _local: threading.local = field(default_factory=threading.local)

    def get(self, path: str, timeout_s: float = 10.0) -> requests.Response:
        return self._session().get(self.url + path, timeout=timeout_s)

    def ask(self, path: str, body: dict[str, Any], timeout_s: float = 60.0) -> dict[str, Any]:
        """The JSON answer to a POST that is no generation, whatever its status; {} when it is no JSON object."""
        try:
            answer = self._session().post(self.url + path, json=body, timeout=timeout_s).json()
        except (requests.RequestException, ValueError):
            return {}
        return answer if isinstance(answer, dict) else {}

    def generate_all(self, prompts: list[list[int]], rids: list[str], params: dict[str, Any], concurrency: int, progress: str | None,
                     on_result: Callable[[int, Reply], None] | None) -> list[Reply]:
        """One reply a prompt, in order. At most `concurrency` requests are under way, and a new one starts only after
        on_result has dealt with an old one, so what the caller has not yet collected is bounded."""
        for index, ids in enumerate(prompts):
            self.require_valid(ids, f"prompt {index} (request {rids[index]})")
        replies: list[Reply | None] = [None] * len(prompts)
        todo = iter(range(len(prompts)))
        under_way: dict[Future[Reply], int] = {}
        pool = ThreadPoolExecutor(concurrency, thread_name_prefix="generate")
        meter = Meter(progress, len(prompts))
        try:
            while True:
                while len(under_way) < concurrency and (new := next(todo, None)) is not None:
                    under_way[pool.submit(self.generate, prompts[new], rids[new], params)] = new
                if not under_way:
                    return [reply for reply in replies if reply is not None]
                for future in self._finished(under_way, meter):
                    index = under_way.pop(future)
                    replies[index] = reply = future.result()
                    meter.count(reply)
                    if on_result:
                        on_result(index, reply)
        except BaseException:
            with contextlib.suppress(Eagle3Error):
                self.require_alive()  # a dead server heeds nothing, and its launcher would let us wait
                self.abort_all()
            raise
        finally:
            meter.close()
            pool.shutdown(wait=False, cancel_futures=True)

    def _finished(self, under_way: dict[Future[Reply], int], meter: Meter) -> set[Future[Reply]]:
        """Wait for at least one reply; look after the server meanwhile."""
        while True:
            done, _ = wait(under_way, timeout=LOOK_S, return_when=FIRST_COMPLETED)
            if done:
                return done
            self.require_alive()
            if meter.silent_s > STALL_S:
                raise Eagle3Error(f"engine: no reply to any of {len(under_way)} requests for {STALL_S:.0f} s; the server is alive but "
                                  "stuck. See the engine log; restart the stage, with a lower concurrency if memory was short.")

    def generate(self, ids: list[int], rid: str, params: dict[str, Any], **more: Any) -> Reply:
        answer = self.post(ids, rid, params, **more)
        return self._reply(answer, ids)

    def prefill(self, prompts: list[list[int]], rids: list[str]) -> list[Reply]:
        """Let the server read these prompts in one HTTP request: one reply each, in order, when the last of them is done.

        A hundred short prompts cost the server's front end little more than one. Refused as a whole when one of them is."""
        for ids, rid in zip(prompts, rids, strict=True):
            self.require_valid(ids, f"request {rid}")
        answers = self.post(prompts, rids, {"temperature": 0, "max_new_tokens": 1}, STALL_S)
        if isinstance(answers, dict):
            return [Reply([], "refused", len(ids), 0, rid, answers["error"]) for ids, rid in zip(prompts, answers["rid"], strict=True)]
        if len(answers) != len(prompts):
            raise Eagle3Error(f"engine: {len(answers)} answers to {len(prompts)} prompts in one request (first {rids[0]}). See the engine log.")
        return [self._reply(answer, ids) for answer, ids in zip(answers, prompts, strict=True)]

    def post(self, ids: list[Any], rid: str | list[str], params: dict[str, Any], timeout_s: float = REQUEST_TIMEOUT_S,
             **more: Any) -> Any:
        """The server's answer as it came, or {"error": why, "rid": ...} when it refuses this very prompt (HTTP 400).

        ids, rid: one prompt and its request id, or a list of each; then the answer is a list."""
        for attempt in range(ATTEMPTS):
            again = f"-retry{attempt}" if attempt else ""
            name = rid + again if isinstance(rid, str) else [one + again for one in rid]
            try:
                response = self._session().post(f"{self.url}/generate", timeout=timeout_s,
                                                json={"input_ids": ids, "rid": name, "sampling_params": params, **more})
                if response.status_code == 200:
                    return response.json()
                if response.status_code == 400:
                    return {"error": _message(response), "rid": name}
                trouble = f"HTTP {response.status_code}: {_message(response)}"
            except requests.RequestException as error:
                trouble = f"{type(error).__name__}: {error}"
                if isinstance(error, requests.ReadTimeout) and not isinstance(rid, str):
                    break  # a batch that a stuck server has kept for so long: again would take as long
            self._pause(BACK_OFF_S * 2**attempt)
        raise Eagle3Error(f"engine: request {rid if isinstance(rid, str) else rid[0]} ({len(ids)} {'tokens' if isinstance(rid, str) else 'prompts'}) "
                          f"failed {attempt + 1} times; last: {trouble}. See the engine log.")

    def _pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.require_alive()
            time.sleep(min(LOOK_S, seconds))

    def _reply(self, answer: dict[str, Any], ids: list[int]) -> Reply:
        if "error" in answer:
            return Reply([], "refused", len(ids), 0, answer["rid"], answer["error"])
        meta, output_ids = answer["meta_info"], answer["output_ids"]
        reason = meta["finish_reason"]["type"]
        if meta["prompt_tokens"] != len(ids) or meta["completion_tokens"] != len(output_ids) or reason not in ("stop", "length"):
            raise Eagle3Error(f"engine: request {meta['id']} of {len(ids)} tokens came back with {meta['prompt_tokens']} prompt tokens, "
                              f"{len(output_ids)} of {meta['completion_tokens']} output ids and finish reason {meta['finish_reason']}: "
                              "not what was asked. See the engine log.")
        return Reply(output_ids, reason, meta["prompt_tokens"], meta["cached_tokens"], meta["id"],
                     verify_steps=meta.get("spec_verify_ct", 0), accepted_drafts=meta.get("spec_num_correct_drafts", 0))

    def logprobs(self, ids: list[int], rid: str, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The engine's own top-k log-probabilities [T, k] float32 and token ids [T, k] int64; row t predicts token t+1."""
        self.require_valid(ids, f"request {rid}")
        answer = self.post(ids, rid, {"temperature": 0, "max_new_tokens": 1},
                           return_logprob=True, logprob_start_len=0, top_logprobs_num=top_k)
        if "error" in answer:
            raise Eagle3Error(f"engine: request {answer['rid']} of {len(ids)} tokens was refused: {answer['error']}")
        meta = answer["meta_info"]
        # Input entry t is what position t-1 predicts, so entry 0 is empty; what the last position predicts is the output's.
        rows = [*meta["input_top_logprobs"][1:], meta["output_top_logprobs"][0]]
        if len(rows) != len(ids) or any(len(row) != top_k for row in rows):
            raise Eagle3Error(f"engine: request {rid}: log-probabilities for {len(rows)} positions, {len(ids)} x {top_k} were asked for.")
        values, tokens = ([[entry[part] for entry in row] for row in rows] for part in (0, 1))
        return torch.tensor(values), torch.tensor(tokens)

    def require_valid(self, ids: list[int], what: str) -> None:
        """One id outside the vocabulary ends the whole server (an index error in the embedding), so it is never sent."""
        if not ids:
            raise Eagle3Error(f"{what}: it has no tokens; leave empty rows out.")
        if min(ids) < 0 or max(ids) >= self.vocab_size:
            raise Eagle3Error(f"{what}: token ids {min(ids)} to {max(ids)}, but the target's vocabulary is 0 to {self.vocab_size - 1}. "
                              "Were these rows prepared with another tokenizer?")

    def abort_all(self) -> None:
        """Tell the server to drop what is under way, so that waiting threads end. Best effort."""
        try:
            self._session().post(f"{self.url}/abort_request", json={"abort_all": True}, timeout=5)
        except requests.RequestException:
            pass

    def _session(self) -> requests.Session:
        if not hasattr(self._local, "session"):
            self._local.session = requests.Session()
            self._local.session.trust_env = False  # a proxy must never come between us and the loopback interface
        return self._local.session


class Meter:
    """Progress in requests, with tokens/s and time left; also knows for how long nothing has come."""

    def __init__(self, label: str | None, total: int):
        self.bar = tqdm(total=total, desc=label, unit="req", mininterval=1, disable=label is None)
        self.begun = self.last = time.monotonic()
        self.prompt_tokens = self.output_tokens = 0

    @property
    def silent_s(self) -> float:
        return time.monotonic() - self.last

    def count(self, reply: Reply) -> None:
        self.last = time.monotonic()
        self.prompt_tokens += reply.prompt_tokens
        self.output_tokens += len(reply.output_ids)
        seconds = max(self.last - self.begun, 1e-9)
        rates = [f"{tokens / seconds:,.0f} tok/s" for tokens in (self.prompt_tokens, self.output_tokens)]
        self.bar.set_postfix_str(f"{rates[0]} in, {rates[1]} out", refresh=False)
        self.bar.update()

    def close(self) -> None:
        self.bar.close()


def _message(response: requests.Response) -> str:
    """The server's own words, from whichever of its error shapes."""
    try:
        body = response.json()
        error = body.get("error", body.get("detail", body)) if isinstance(body, dict) else body
        return str(error.get("message", error) if isinstance(error, dict) else error)[:300]
    except ValueError:
        return response.text[:300]
