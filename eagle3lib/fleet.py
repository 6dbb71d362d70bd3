"""Several engines for one extraction: servers of ours on this machine's GPUs, and servers that the user runs elsewhere.

    with fleet.start(2, ["http://node7:30000=/shared/dumps/0123456789abcdef"], target, run_dir, device="cuda") as engines: ...

A server of the user's is named by its address and the folder, on a file system that both hosts share, into which its capture
writes. It was started by hand as docs/engines.md says, is proved as our own are, and is never stopped by us.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import requests

from eagle3lib import capture, probes, targets
from eagle3lib.checks import Checks
from eagle3lib.client import Client
from eagle3lib.engine import Engine
from eagle3lib.errors import CheckFailed, Eagle3Error, ParamError
from eagle3lib.manifest import compare
from eagle3lib.settings import Settings, local_ranks

SPEC = re.compile(r"(?P<url>https?://[^=\s/]+)/?=(?P<folder>/\S+)")
ANSWER_S = 30.0


@contextmanager
def start(count: int, urls: Sequence[str], target: Path, run_dir: Path, **settings: Any) -> Iterator[list[Any]]:
    """`count` engines of ours (settings: of Engine.start) and one for each of urls, all proved. Ours end with the block."""
    if count < 0 or count + len(urls) < 1:
        raise ParamError(f"engines: {count}, with {len(urls)} engine_urls; at least one engine in all is wanted.")
    layers = targets.capture_layers(targets.text_config(target).num_hidden_layers)
    with ExitStack() as ours:
        engines = _start_ours([(folder(run_dir, n), on_gpus(n, settings)) for n in range(count)], target, layers, ours)
        yield [*engines, *(Endpoint.connect(spec, target, layers, run_dir) for spec in urls)]


def _start_ours(asked: Sequence[tuple[Path, dict[str, Any]]], target: Path, layers: list[int], ours: ExitStack) -> list[Any]:
    """All at once; `ours` ends those that started, also when another did not."""
    engines: list[Any] = []
    started: list[Future[Engine]] = []
    with ThreadPoolExecutor(max(1, len(asked))) as pool:
        try:
            for place, settings in asked:
                started.append(pool.submit(Engine.start, target, place, capture_layers=layers, **settings))
            for future in started:
                if future.exception() is None:
                    engines.append(ours.enter_context(future.result()))
        except BaseException:  # interrupted: what a thread brings up yet is ended by that thread
            for future in started:
                future.add_done_callback(_end)
            raise
    for future in started:
        future.result()  # raises what went wrong with one of them, after the others were noted for their end
    return engines


def _end(started: Future[Engine]) -> None:
    if started.exception() is None:
        started.result().stop()


def folder(run_dir: Path, n: int) -> Path:
    """Where engine n keeps its log and its record: the first in the run's folder itself."""
    return run_dir if n == 0 else run_dir / "engines" / str(n)


def on_gpus(n: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The settings of engine n: its GPUs come behind those of the engines before it."""
    if n == 0:
        return settings
    words = list(settings.get("extra_args", ()))
    mine = ["--base-gpu-id", str(n * local_ranks(words))] if settings.get("device") != "cpu" else []
    return settings | {"extra_args": words + mine, "port": 0}


class Endpoint:
    """A capturing server that somebody else started; what extraction and probes need of an Engine."""

    def __init__(self, url: str, dump_dir: Path, target: Path, layers: list[int], run_dir: Path):
        config = targets.text_config(target)
        self.url, self.dump_dir, self.hidden_size, self.vocab_size = url, dump_dir, int(config.hidden_size), int(config.vocab_size)
        self.log_path = f"the log of {url}"
        self.client = Client(url, self.vocab_size, self.require_alive)
        self.client.abort_all = lambda: None  # type: ignore[method-assign]  # others may have requests there
        self.checks, self.seconds, self.restarts = Checks(), dict[str, float](), list[str]()
        self.handshake = self._handshake(layers)
        self.nonce, self.versions = self.handshake["nonce"], {"torch": self.handshake["torch"]}
        self.server_info = self._get("/server_info")
        chunk, most = (self.server_info.get(name) for name in ("chunked_prefill_size", "max_total_tokens"))
        self.settings = Settings(target=target, run_dir=run_dir, nonce=self.nonce, python="", device=str(self.server_info.get("device")),
                                 dtype=self.handshake["dtype"], port=0, capture_layers=layers, max_total_tokens=most,
                                 chunked_prefill_size=chunk, extra_args=[])

    @classmethod
    def connect(cls, spec: str, target: Path, layers: list[int], run_dir: Path) -> Endpoint:
        """The proved endpoint of "url=folder". Eagle3Error (ParamError, CheckFailed) says what is wrong."""
        named = SPEC.fullmatch(spec)
        if named is None:
            raise ParamError(f"engine_urls: {spec!r}; wanted: an address, '=', and the folder that its capture writes into, "
                             "as in http://node7:30000=/shared/dumps/0123456789abcdef")
        found = cls(named["url"], Path(named["folder"]), Path(target).resolve(), layers, run_dir)
        found._prove_model()
        probes.prove(found, probes.start_reference(found))  # type: ignore[arg-type]
        print(f"engine: {found.url} is proved, capturing layers {layers}")
        return found

    def _handshake(self, layers: list[int]) -> dict[str, Any]:
        if not self.dump_dir.is_dir():
            raise Eagle3Error(f"engine {self.url}: its dump folder {self.dump_dir} is not on this machine. Both must share its file system.")
        try:
            said = capture.read_handshakes(self.dump_dir)
        except ValueError as error:
            raise CheckFailed(f"engine {self.url}: a handshake in {self.dump_dir} is no JSON object ({error}). Start that server again.") from None
        if len(said) != 1:
            raise CheckFailed(f"engine {self.url}: {len(said)} handshakes in {self.dump_dir}, 1 is wanted. Is this the folder of this very server, "
                              "and was its capture on (docs/engines.md)?")
        wanted = {"layers": layers, "hidden_size": self.hidden_size}
        if wrong := {name: said[0].get(name) for name, value in wanted.items() if said[0].get(name) != value}:
            raise CheckFailed(f"engine {self.url}: it captures {wrong}, this target needs {({name: wanted[name] for name in wrong})}.")
        if missing := [name for name in ("nonce", "torch", "dtype") if not isinstance(said[0].get(name), str)]:
            raise CheckFailed(f"engine {self.url}: its handshake does not say {', '.join(missing)}. Start it with the plugin of this version.")
        return said[0]

    def _prove_model(self) -> None:
        """The address answers under the nonce of the folder, and serves these very weights."""
        names = [model.get("id") for model in self._get("/v1/models").get("data", [])]
        probes.require(self, "nonce", names == [self.nonce], names, [self.nonce], "another server than the one that writes into this folder")  # type: ignore[arg-type]
        path = Path(str(self._get("/model_info").get("model_path")))
        if not (path / "config.json").is_file():
            raise Eagle3Error(f"engine {self.url}: it serves {path}, which is not on this machine, so its weights cannot be named. "
                              "Serve the target from a folder that both hosts see.")
        other = compare(targets.fingerprint(self.settings.target), targets.fingerprint(path))
        probes.require(self, "target", not other, "; ".join(other) or "equal", "equal", "another model's hidden states")  # type: ignore[arg-type]

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer = self.client.get(path, ANSWER_S)
            found = answer.json() if answer.status_code == 200 else None
        except (requests.RequestException, ValueError) as error:
            raise Eagle3Error(f"engine {self.url}: {path} does not answer ({type(error).__name__}). Is it up, and the address right?") from None
        if not isinstance(found, dict):
            raise Eagle3Error(f"engine {self.url}: {path} answers HTTP {answer.status_code}, so it is no SGLang server.")
        return found

    @property
    def fingerprint(self) -> dict[str, Any]:
        described: dict[str, Any] = Engine._describe(self, self.server_info)  # type: ignore[arg-type]  # one definition for both
        return described

    def require_alive(self, generation: int = 0) -> None:
        self._get("/model_info")

    def log_tail(self, lines: int = 0) -> str:
        return ""

    def rid(self, name: str) -> str:
        return capture.dump_rid(self.nonce, name)

    def read_dump(self, rid: str, input_ids: list[int], timeout_s: float = capture.WAIT_S) -> Any:
        return capture.read_dump(self.dump_dir, rid, input_ids, self.handshake, timeout_s=timeout_s, look=self.require_alive)

    def delete_dump(self, rid: str) -> None:
        capture.delete_dump(self.dump_dir, rid)

    def logprobs(self, input_ids: list[int], top_k: int = 5, rid: str | None = None) -> Any:
        return self.client.logprobs(list(input_ids), rid or f"eagle3-{self.nonce}-logprobs", top_k)
