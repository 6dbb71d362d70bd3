"""Serving, with a stand-in for SGLang that really drafts and verifies: its replies and counts come from the lossless loop.

SGLang cannot speculate on a CPU, so what a GPU alone can show is shown there by benchmarks/served.py. Here: what is asked of the
servers, how their figures are counted, and that each way in which serving goes wrong is named.
"""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import torch
from toys import STEPS, noisy, prompts_of

from eagle3lib import acceptance, agreement, evaluate, export, loaded, questions, served, speculate, targets
from eagle3lib.acceptance import Shape
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.client import Client, Reply
from eagle3lib.engine import Engine
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.questions import Question

NEW, CHAIN = 20, Shape(STEPS)


def asked_questions():
    return [Question("ab"[i % 2], f"q{i}", ids, []) for i, ids in enumerate(prompts_of(10, seed=2, low=3))]


class Standin:
    """In place of Engine: `start` records what was asked for; generate drafts only if it was asked to."""

    faults: set[str] = set()
    started: list[list[str]] = []
    model = draft = folder = None

    @classmethod
    def start(cls, target, run_dir, *, extra_args, **options):
        engine = cls()
        engine.arguments, engine.options = list(extra_args), options
        engine.drafting = "--speculative-algorithm" in extra_args
        cls.started.append(engine.arguments)
        words = [a for a in extra_args if a.startswith("--speculative")]
        engine.server_info = {w[2:].replace("-", "_"): extra_args[extra_args.index(w) + 1] for w in words}
        engine.server_info = {k: int(v) if v.isdigit() else v for k, v in engine.server_info.items()}
        if "other steps" in cls.faults:
            engine.server_info["speculative_num_steps"] = 1
        engine.client = engine
        return engine

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def ask(self, path, body):
        assert (path, body) == ("/weights_checker", {"action": "checksum"})
        held = loaded.expected(self.folder, "bfloat16")
        if "not loaded" in self.faults:
            held["draft.lm_head.weight"] = "0" * 16
        return {"success": True, "ranks": [{"checksums": {**held, "lm_head.weight": "1" * 16}}]}

    def generate(self, prompts, *, max_new_tokens, concurrency, stop_token_ids, progress):
        draft = copy.deepcopy(self.draft)
        if "random head" in self.faults:
            draft.lm_head.weight.data.normal_(generator=torch.Generator().manual_seed(1))
        shape = Shape(STEPS if self.drafting else 1)
        replies, _ = speculate.generate(self.model, draft, prompts, shape=shape, max_new_tokens=max_new_tokens, ends=set(stop_token_ids))
        return [self._reply(p, r) for p, r in zip(prompts, replies, strict=True)]

    def _reply(self, prompt, reply):
        counts = {}
        if self.drafting and "asleep" not in self.faults:
            counts = {"verify_steps": len(reply.rounds), "accepted_drafts": sum(r.accepted + r.beyond for r in reply.rounds)}
        tokens = list(reply.tokens)
        if self.drafting and "accepts anything" in self.faults:
            tokens[0] = (tokens[0] + 1) % 200 + 3
        if self.drafting and "runs on" in self.faults and reply.finish == "eos" and len(tokens) > 1:
            return Reply([*tokens, 77, 78], "length", len(prompt), 0, "r", **counts)
        return Reply(tokens, "stop" if reply.finish == "eos" else "length", len(prompt), 0, "r", **counts)

    @torch.no_grad()
    def logprobs(self, ids, top_k):
        return self.model(torch.tensor([ids])).logits[0].log_softmax(-1).topk(top_k)


@pytest.fixture(scope="module")
def parts(toy, tmp_path_factory):
    """(target, draft, folder of the export, results of the loop)."""
    target, _, draft = toy
    draft, folder = noisy(draft, 0.3), Path(target.config.name_or_path)
    chat = Chat(targets.load_tokenizer(folder), stop_ids=range(3, 12))
    results = evaluate.measure(target, draft, questions.Asked(asked_questions()), chat, steps=STEPS, max_new_tokens=NEW)
    exported = evaluate.export_draft(draft, tmp_path_factory.mktemp("served") / "draft", folder, results)
    return target, draft, exported, results, chat.stop_ids


@pytest.fixture
def serve(parts, monkeypatch, tmp_path):
    target, draft, exported, results, stops = parts
    monkeypatch.setattr(served, "Engine", Standin)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(Standin, "started", [])

    def go(*faults, shape=CHAIN, **options):
        for name, value in {"faults": set(faults), "model": target, "draft": draft, "folder": exported.folder}.items():
            monkeypatch.setattr(Standin, name, value)
        return served.serve(exported.folder, Path(target.config.name_or_path), results.questions, shape, tmp_path, max_new_tokens=NEW,
                            stop_ids=stops, batch=4, **options)

    return go


def checked(part):
    checks = Checks()
    part.check(checks)
    return {c.name: c for c in checks}


def test_served_figures_are_those_of_the_loop(serve, parts):
    """The stand-in counts as the loop does; a missing first token, a cut round or an end inside a round would show."""
    target, draft, exported, results, stops = parts
    serving = serve()
    replies, _ = speculate.generate(target, draft, [q.ids for q in results.questions], shape=CHAIN, max_new_tokens=NEW, ends=set(stops))
    measured = acceptance.measured([r.rounds for r in replies], STEPS)
    found = serving.figures["all"]
    assert {r.finish for r in replies} == {"eos", "limit"} and any(r.rounds[-1].beyond for r in replies if r.rounds)
    assert (found.length, found.low, found.high, found.rounds) == pytest.approx((measured.length, measured.low, measured.high, measured.rounds))
    assert list(serving.figures) == ["a", "b", "all"]
    assert serving.metrics()["acceptance_length_served"] == found.length
    assert [a.batch for a in serving.arms] == [1, 4, 1, 4] and [a.drafting for a in serving.arms] == [True, True, False, False]
    assert str(found) in repr(serving.table()) and "chain of 4" in repr(serving.table())


def test_both_servers_are_asked_for_the_same_but_the_draft(serve, parts):
    serve()
    with_draft, without = Standin.started
    assert with_draft[: len(without)] == without
    assert " ".join(with_draft[len(without) :]) == (
        f"--speculative-algorithm EAGLE3 --speculative-draft-model-path {parts[2].folder.resolve()} --speculative-num-steps 4 "
        "--speculative-eagle-topk 1 --speculative-num-draft-tokens 5")
    assert "--disable-radix-cache" in without and without[without.index("--max-running-requests") + 1] == "4"
    serve(shape=Shape(4, 3, 12), cuda_graphs=False)
    assert Standin.started[2][-6:] == "--speculative-num-steps 4 --speculative-eagle-topk 3 --speculative-num-draft-tokens 12".split()
    assert "--disable-cuda-graph" in Standin.started[3]


def test_good_serving_passes_all_but_the_clock(serve, parts):
    target, draft, exported, results, stops = parts
    serving = serve()
    assert serving.differences == serving.control == []
    checks = checked(serving)
    assert {n for n, c in checks.items() if not c.passed} <= {"served faster than without"}  # the stand-in's clock means nothing
    agreed = agreement.compare(results, serving, exported, target, draft)
    assert agreed.replay.ratio == 1.0 and all(c.passed for c in checked(agreed).values())
    assert not [c for c in agreed.listed if c.guilty and c.name != "other replies"]
    assert "served" in agreed.headline and "chain of 4" in agreed.headline


@pytest.mark.parametrize(("fault", "check"), [
    ("not loaded", "draft tensors are loaded"), ("other steps", "server drafts as asked"), ("accepts anything", "served outputs are the target's"),
    ("random head", "the served draft is alive")])
def test_each_fault_fails_the_check_that_is_for_it(serve, parts, fault, check):
    failed = checked(serve(fault))[check]
    assert not failed.passed, failed
    if fault == "accepts anything":
        assert "reply token 0" in failed.measured and "10 of 10 replies part" in failed.measured


def test_a_draft_that_computes_something_else_is_found_by_the_replay(serve, parts):
    """Checksums say nothing of layers, ids and positions; the replay does, whatever the text."""
    target, draft, exported, results, stops = parts
    agreed = agreement.compare(results, serve("random head"), exported, target, draft)
    checks = checked(agreed)
    assert not checks["served draft is the trained one"].passed and agreed.replay.ratio > 1.2
    assert "draft computes something else in the server" in checks["measured and served agree"].remedy
    assert agreed.parted and "LOOK HERE" in repr(agreed.causes())


def test_a_draft_that_slows_the_server_down_is_red(serve, parts):
    target, draft, exported, results, stops = parts
    serving = serve()
    for with_draft, passed in ((30.0, False), (5.0, True)):
        serving.arms = [replace(a, seconds=with_draft if a.drafting else 10.0) for a in serving.arms]
        check = checked(serving)["served faster than without"]
        assert check.passed is passed and f"{10 / with_draft:.2f} x at batch 1, {10 / with_draft:.2f} x at batch 4" in check.measured
        headline = agreement.Agreement(results, serving).headline
        assert headline.startswith("USEFUL" if passed else "SLOWER THAN NO DRAFT")


def test_a_server_that_does_not_speculate_at_all_is_an_error(serve):
    with pytest.raises(Eagle3Error, match="no verify step: the server does not speculate"):
        serve("asleep")


def test_without_a_gpu_it_says_so(parts):
    target, draft, exported, results, stops = parts
    serving = served.serve(exported.folder, "", results.questions, Shape(STEPS), exported.folder, max_new_tokens=NEW, stop_ids=())
    assert "no GPU here" in repr(serving.table()) and serving.figures == {} and checked(serving) == {}
    agreed = agreement.compare(results, serving, exported, target, draft)
    assert "served: not measured" in agreed.headline and checked(agreed) == {} and agreed.metrics() == {}
    assert str(results.figures["a"].measured) in repr(agreed.table()) and "nothing was served" in repr(agreed.causes())


# Counting ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "finish", "verify", "accepted", "emitted"), [
    (11, "stop", 5, 7, 10),  # the last step accepted two behind the end of turn: they are not in the reply
    (11, "length", 5, 7, 12),  # the last step was cut by the limit: it counts whole
    (11, "length", 5, 5, 10), (1, "stop", 0, 0, 0), (1, "length", 0, 0, 0)])
def test_tokens_that_verify_steps_brought(tokens, finish, verify, accepted, emitted):
    assert served.emitted(Reply([1] * tokens, finish, 4, 0, "r", verify_steps=verify, accepted_drafts=accepted)) == emitted


def test_tokens_behind_the_end_of_turn_are_cut_and_counted(serve, parts):
    """SGLang's last step may pass the token limit with an end of turn inside; the reply then goes on to the limit."""
    long = Reply([7, 8, 5, 9, 9], "length", 4, 0, "r", verify_steps=2, accepted_drafts=3)
    assert served.cut(long, {5, 6}) == replace(long, output_ids=[7, 8, 5], finish_reason="stop")
    assert served.cut(long, {6}) is long and served.emitted(served.cut(long, {5})) == 2
    ended = replace(long, output_ids=[7, 5], finish_reason="stop")
    assert served.cut(ended, {5}) is ended
    serving = serve("runs on")
    assert serving.differences == [] and serving.arm(True, lone=False).overran > 0 and serving.arm(False, lone=False).overran == 0
    check = checked(serving)["served outputs are the target's"]
    assert check.passed and "ran on behind their end of turn" in check.measured


def test_turns_of_a_conversation_are_one_draw_and_impossible_counts_are_named():
    replies = [Reply([1] * 9, "stop", 4, 0, "r", verify_steps=4, accepted_drafts=4)] * 4
    pairs = [(Question("a", name, [5], []), r) for name, r in zip(("81", "81+", "82", "82+"), replies, strict=True)]
    found = served.figure(pairs, CHAIN)
    assert (found.prompts, found.rounds, found.length) == (2, 16, 2.0)
    pairs[2] = (pairs[2][0], Reply([1] * 30, "stop", 4, 0, "r", verify_steps=2, accepted_drafts=4))
    with pytest.raises(Eagle3Error, match="a 82: 29 tokens in 2 verify steps cannot come from a chain of 4"):
        served.figure(pairs, CHAIN)


def test_the_client_reads_sglangs_counts_and_leaves_them_zero_without():
    meta = {"id": "r", "finish_reason": {"type": "stop"}, "prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}
    client = Client("http://127.0.0.1:1", 10, lambda: None)
    reply = client._reply({"output_ids": [1, 2, 3], "meta_info": {**meta, "spec_verify_ct": 2, "spec_num_correct_drafts": 4}}, [5, 6])
    assert (reply.verify_steps, reply.accepted_drafts) == (2, 4)
    plain = client._reply({"output_ids": [1, 2, 3], "meta_info": meta}, [5, 6])
    assert (plain.verify_steps, plain.accepted_drafts) == (0, 0)


class Says(BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        data = json.dumps({"success": False, "asked": body}).encode() if self.path == "/weights_checker" else b"<html>"
        self.send_response(400)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


def test_asking_a_server_anything_else():
    server = HTTPServer(("127.0.0.1", 0), Says)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    client = Client(f"http://127.0.0.1:{server.server_port}", 10, lambda: None)
    assert client.ask("/weights_checker", {"action": "checksum"}) == {"success": False, "asked": {"action": "checksum"}}
    assert client.ask("/other", {}) == {}
    server.shutdown()
    server.server_close()
    assert client.ask("/weights_checker", {}) == {}


# Differences and relations ------------------------------------------------------------------------------------------


def arm(replies, drafting=True):
    return served.Arm(drafting, 4, [Question("a", str(i), [5, 6], []) for i in range(len(replies))], replies, 1.0)


@torch.no_grad()
def test_the_first_difference_with_its_margin(toy):
    target, f, _ = toy
    own = [int(f[6])]
    own.append(int(f[own[0]]))
    standin = Standin()
    standin.model = target
    said = arm([Reply(own, "length", 2, 0, "r")], drafting=False)
    top = target(torch.tensor([[5, 6, own[0]]])).logits[0, -1].log_softmax(-1)
    second, last = int(top.topk(2).indices[1]), int(top.argmin())
    (found,) = served.differences(standin, arm([Reply([own[0], second], "length", 2, 0, "r")]), said)
    assert (found.position, found.found, found.expected) == (1, second, own[1]) and not found.near_tie
    assert found.margin == pytest.approx(float(top[own[1]] - top[second]), abs=1e-4)
    (far,) = served.differences(standin, arm([Reply([own[0], last], "length", 2, 0, "r")]), said)
    assert far.margin is None and not far.near_tie and "more than its 20 first choices" in str(far)
    assert served.differences(standin, said, said) == []
    (short,) = served.differences(standin, arm([Reply(own[:1], "stop", 2, 0, "r")]), said)
    assert (short.position, short.found, short.margin) == (1, None, None) and not short.near_tie


@pytest.mark.parametrize(("margin", "tie"), [(0.0, True), (0.9, True), (1.1, False), (None, False)])
def test_a_near_tie_is_a_small_margin(margin, tie):
    assert served.Difference("a", "1", 0, 1, 2, margin).near_tie is tie


def test_relations_of_two_figures():
    def figure(length, half, prompts=9):
        return acceptance.Acceptance(prompts, 9, 1, length, length - half, length + half, 0.0, [], [], [])

    assert agreement.relation(figure(1.2, 0.1), figure(1.25, 0.1)) == agreement.AGREE
    assert agreement.relation(figure(1.2, 0.1), figure(1.35, 0.1)) == agreement.MEET
    assert agreement.relation(figure(1.2, 0.01), figure(1.25, 0.1)) == agreement.MEET
    assert agreement.relation(figure(1.2, 0.1), figure(1.5, 0.1)) == agreement.DIFFER
    assert agreement.relation(figure(1.2, 0.0, prompts=2), figure(1.5, 0.0)) == agreement.FEW


def test_lone_prompts_come_from_all_sets():
    listed = [Question(s, f"{s}{i}", [1], []) for s in "abc" for i in range(3)]
    assert [q.id for q in served._spread(listed, 5)] == ["a0", "b0", "c0", "a1", "b1"]


@pytest.mark.parametrize(("shape", "message"), [((0,), "at least 1"), ((3, 1, 9), "verifies 4 tokens"), ((3, 2, 3), "between 4 and 11"),
                                                ((3, 2, 12), "between 4 and 11")])
def test_shapes_that_cannot_be(shape, message):
    with pytest.raises(ParamError, match=message):
        Shape(*shape)


def test_shapes_say_what_they_are():
    assert (str(Shape(3)), Shape(3).tokens) == ("chain of 3", 4)
    assert str(Shape(5, 4, 16)) == "tree of depth 5, top-4, 16 tokens"


def test_the_real_engine_takes_the_flags(toy, monkeypatch, tmp_path):
    """None of them is one that the engine sets itself."""
    monkeypatch.setattr(Engine, "_launch", lambda self: (_ for _ in ()).throw(Eagle3Error("far enough")))
    folder = export.export(toy[2], tmp_path / "draft")
    for extra in (served._arguments(8, True), served._arguments(8, False) + served._speculation(folder, Shape(3))):
        with pytest.raises(Eagle3Error, match="far enough"):
            Engine.start(Path(toy[0].config.name_or_path), tmp_path / "run", device="cuda", extra_args=extra)


PARSE = """
import argparse, sys, warnings
warnings.simplefilter("ignore")
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
args = parser.parse_args(["--model-path", "x", *sys.argv[1:]])
print(args.cuda_graph_max_bs_decode, args.max_running_requests, args.disable_radix_cache, args.speculative_algorithm, args.speculative_num_steps,
      args.speculative_eagle_topk, args.speculative_num_draft_tokens)
"""


def test_sglangs_own_parser_understands_the_flags(tmp_path):
    words = served._arguments(8, True) + served._speculation(tmp_path, Shape(5, 4, 16))
    done = subprocess.run([sys.executable, "-c", PARSE, *words], capture_output=True, text=True)
    assert done.stdout.split() == "8 8 True EAGLE3 5 4 16".split(), done.stderr[-2000:]
