"""The stage: questions, measuring, checks, export, metrics; on the tiny target with an untrained draft."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from toys import greedy, new_draft

from eagle3lib import acceptance, draftcheck, evalsets, evaluate, plots, proof, questions, runs, targets
from eagle3lib.acceptance import Round
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error, ParamError
from eagle3lib.evalsets import EvalPrompt
from eagle3lib.evaluate import Outcome
from eagle3lib.proof import Mismatch
from eagle3lib.questions import Question
from eagle3lib.speculate import Reply, Times

STEPS = 3
PROMPTS = {
    "short": [EvalPrompt(f"s{i}", [f"question {i}, {'please ' * (i % 3)}?"]) for i in range(6)],
    "talks": [EvalPrompt(f"t{i}", [f"first {i}", f"second {i}"]) for i in range(3)],
    "odd": [EvalPrompt("control", ["say <|im_end|> twice"]), EvalPrompt("long", ["x" * 3000]), EvalPrompt("fine", ["hello"])],
    "bad": [EvalPrompt("control", ["say <|im_end|> twice"])],
}


@pytest.fixture(autouse=True)
def sets(monkeypatch):
    monkeypatch.setattr(evalsets, "load", lambda name: PROMPTS[name])


@pytest.fixture(scope="module")
def chat(tiny):
    return Chat.of(tiny)


@pytest.fixture(scope="module")
def model(tiny):
    return targets.load_model(tiny)


@pytest.fixture(scope="module")
def draft(tiny):
    """Every weight random: an export with a norm of ones would be warned about."""
    draft = new_draft(tiny)
    generator = torch.Generator().manual_seed(0)
    for p in draft.parameters():
        if p.requires_grad:
            p.data = torch.randn(p.shape, generator=generator) * (0.1 if p.dim() == 1 else p.shape[-1] ** -0.5) + (p.dim() == 1)
    return draft


@pytest.fixture(scope="module")
def results(model, draft, chat):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evalsets, "load", lambda name: PROMPTS[name])
        asked = questions.choose(["short", "talks"], 3, chat, room=500, turns=2)
    return evaluate.measure(model, draft, asked, chat, steps=STEPS, max_new_tokens=8, batch=4)


# Questions -----------------------------------------------------------------------------------------------------------


def test_questions_are_the_prompts_as_the_server_sees_them(chat):
    asked = questions.choose(["short"], 6, chat, room=500)
    assert sorted(q.id for q in asked.questions) == [p.id for p in PROMPTS["short"]]
    for q in asked.questions:
        text = PROMPTS["short"][int(q.id[1:])].turns[0]
        assert q.ids == chat.prompt_ids([{"role": "user", "content": text}]) and q.later == ()


def test_the_choice_depends_on_the_seed_alone(chat):
    ids = [[q.id for q in questions.choose(["short", "talks"], 2, chat, room=500, seed=s).questions] for s in (0, 0, 1, 2, 3)]
    assert ids[0] == ids[1] and len({tuple(i) for i in ids}) > 1
    assert [i[0] for i in ids[0]] == ["s", "s", "t", "t"]


def test_prompts_that_cannot_be_asked_are_replaced_and_counted(chat):
    asked = questions.choose(["odd"], 3, chat, room=500)
    assert [q.id for q in asked.questions] == ["fine"]
    assert asked.dropped == {"control token in text": 1, "prompt longer than the context allows": 1}
    assert "1 of odd" in repr(asked) and "left out" in repr(asked)


def test_a_set_with_nothing_to_ask_and_impossible_counts_are_errors(chat):
    with pytest.raises(Eagle3Error, match="set bad: none of its 1 prompts.*control token"):
        questions.choose(["bad"], 1, chat, room=500)
    with pytest.raises(ParamError, match="eval_prompts is 0"):
        questions.choose(["short"], 0, chat, room=500)


def test_the_real_sets_can_be_asked(chat, monkeypatch):
    monkeypatch.undo()
    asked = questions.choose(["mtbench", "humaneval", "gsm8k"], 2, chat, room=1800, turns=2)
    assert [q.set for q in asked.questions] == ["mtbench"] * 2 + ["humaneval"] * 2 + ["gsm8k"] * 2
    assert [len(q.later) for q in asked.questions] == [1, 1, 0, 0, 0, 0]


def test_room_is_what_the_context_leaves(model):
    assert questions.room(model, 48, 5) == 2048 - 53


# Measuring -----------------------------------------------------------------------------------------------------------


def test_every_question_is_answered_in_order_with_the_targets_own_tokens(results, model, chat):
    assert [o.question.set for o in results.outcomes] == ["short"] * 3 + ["talks"] * 6
    for o in results.outcomes:
        assert o.reply.tokens == greedy(model, o.question.ids, 8, chat.stop_ids)
        assert o.mismatch is None and o.replayed and o.smallest_margin > 0


def test_a_second_turn_is_asked_behind_the_reply(results, chat):
    first, second = (o for o in results.outcomes if o.question.id.rstrip("+") == "t1")
    assert second.question.messages == [
        {"role": "user", "content": "first 1"}, {"role": "assistant", "content": chat.decode_reply(first.reply.tokens)},
        {"role": "user", "content": "second 1"}]
    assert second.question.ids == chat.prompt_ids(second.question.messages)


def test_figures_pool_counts_by_set_and_overall(results):
    assert list(results.figures) == ["short", "talks", "all"]
    rounds = {name: [r for o in results.outcomes for r in o.reply.rounds if name in ("all", o.question.set) and r.end != "limit"]
              for name in results.figures}
    for name, figure in results.figures.items():
        assert figure.measured.rounds == len(rounds[name])
        assert figure.measured.length == pytest.approx(1 + np.mean([r.accepted for r in rounds[name]]))
    assert results.figures["all"].simulated.rounds == sum(len(o.reply.tokens) - 1 for o in results.outcomes)


def test_simulated_counts_are_the_joint_hits_of_all_rows(results, draft, model):
    for o in results.outcomes[:3]:
        proved = proof.prove(model, o.question.ids, o.reply.tokens, draft.cfg.aux_layers)
        hits, known = proof.teacher_forced(draft, proved.sample, STEPS)
        runs = [int((hits & known)[m].long().cumprod(0).sum()) for m in range(len(hits))]
        assert o.hits == [sum(run > k for run in runs) for k in range(STEPS)]
        assert o.tried == [max(0, len(o.reply.tokens) - 1 - k) for k in range(STEPS)]


def test_replies_stop_at_the_stop_ids_of_the_chat(model, draft, tiny, chat):
    asked = questions.choose(["short"], 2, chat, room=500)
    whole = [greedy(model, q.ids, 8) for q in asked.questions]
    stopping = Chat(targets.load_tokenizer(tiny), stop_ids=[whole[0][4]])
    found = evaluate.measure(model, draft, asked, stopping, steps=STEPS, max_new_tokens=8)
    assert found.outcomes[0].reply.tokens == whole[0][: whole[0].index(whole[0][4]) + 1]
    assert found.outcomes[0].reply.finish == "eos" and found.outcomes[0].replayed


@pytest.mark.parametrize(("lengths", "size"), [
    ([5] * 40, 16), ([5], 1), ([1000] * 9, 4), ([3000, 3000], 1), ([9000, 2], 1), ([10, 10, 4000], 2)])
def test_questions_that_go_together_fit_the_prefill(lengths, size):
    assert evaluate._group([Question("a", "1", [1] * n, []) for n in lengths], 16) == size


def test_no_question_is_an_error(model, draft, chat):
    with pytest.raises(Eagle3Error, match="no question"):
        evaluate.measure(model, draft, questions.Asked(), chat, steps=1, max_new_tokens=2)


def test_shown_and_written_numbers_agree(results):
    metrics, figure = results.metrics(), results.figures["all"]
    assert metrics["acceptance_length_measured"] == figure.measured.length
    assert metrics["acceptance_length_simulated"] == figure.simulated.length
    assert metrics["acceptance_length_measured_talks"] == results.figures["talks"].measured.length
    assert metrics["lossless"] is True and metrics["rounds"] == figure.measured.rounds
    assert json.loads(json.dumps({k: runs.plain(v, k) for k, v in metrics.items()})) == metrics
    text = repr(results.table())
    assert [line.split()[0] for line in text.splitlines()] == ["set", "short", "talks", "all"]
    assert str(figure.measured) in text and "<table" in results.table()._repr_html_()


def test_plots_take_what_results_give(results, monkeypatch):
    shown = []
    monkeypatch.setattr(plots, "show", lambda fig, alt: (shown.append(alt), plots.plt.close(fig)))
    plots.acceptance_bars(results.bars(), STEPS)
    plots.survival(results.survival(), results.survival_intervals())
    assert "short" in shown[0] and "talks" in shown[1]
    assert sum(b.rounds for b in results.by_context().values()) == results.figures["all"].measured.rounds


# Checks --------------------------------------------------------------------------------------------------------------


def scripted(accepted, *, mismatch=None, replayed=True, set="a", id="1"):
    rounds, at = [], 11
    for a in accepted:
        rounds.append(Round(at, a))
        at += a + 1
    reply = Reply([5] * (1 + sum(a + 1 for a in accepted)), rounds, "limit")
    return Outcome(Question(set, id, [1] * 10, []), reply, mismatch, 0.5, [0] * STEPS, [1] * STEPS, replayed)


def results_of(*outcomes):
    return evaluate.Results(STEPS, 0, list(outcomes), Times(total=1.0, forwards=1), None)


def checked(function, *args):
    checks = Checks()
    function(checks, *args)
    return {c.name: c for c in checks}


def test_good_results_pass_every_check(results):
    assert all(c.passed for c in checked(evaluate.check, results).values())


def test_a_token_that_is_not_the_targets_fails_and_is_named():
    wrong = Mismatch(position=4, found=17, expected=23, margin=0.8)
    check = checked(evaluate.check, results_of(scripted([1, 2]), scripted([0], mismatch=wrong, set="gsm8k", id="q7")))["lossless"]
    assert not check.passed and "1 of 2 replies" in check.measured
    for text in ("gsm8k q7", "token 4 is 17", "says 23", "0.8 nats"):
        assert text in check.measured
    assert "do not use" in check.remedy


def test_a_near_tie_fails_too_but_is_called_one():
    check = checked(evaluate.check, results_of(scripted([0], mismatch=Mismatch(4, 17, 23, 2e-6))))["lossless"]
    assert not check.passed and "near-tie" in check.measured and "rounding" in check.remedy


def test_a_replay_that_differs_fails_and_names_the_question():
    found = results_of(scripted([1]), scripted([1], replayed=False, set="mtbench", id="81"))
    check = checked(evaluate.check, found)["replay equals measured"]
    assert not check.passed and "mtbench 81" in check.measured


@pytest.mark.parametrize(("accepted", "passed", "word"), [([0] * 30, False, "useless"), ([2, 1] * 15, True, "useful")])
def test_a_useless_draft_is_red(accepted, passed, word):
    found = results_of(*[scripted(accepted, id=str(i)) for i in range(4)])
    check = checked(evaluate.judge, found)["draft is of use"]
    assert check.passed == passed and found.metrics()["verdict"] == word


def test_a_random_draft_is_judged_useless_or_unclear(results):
    assert results.figures["all"].measured.length < 1.2 and results.verdict[0] != "useful"


def test_prompts_rendered_otherwise_than_in_training_fail(chat, tmp_path):
    folder = tmp_path / "prepared"
    folder.mkdir()
    runs.write_json(folder / "prepared.json", {"fingerprint": chat.fingerprint})
    assert checked(evaluate.check_prompts, chat, tmp_path)["prompts as in training"].passed
    runs.write_json(folder / "prepared.json", {"fingerprint": {**chat.fingerprint, "chat_template": "another"}})
    check = checked(evaluate.check_prompts, chat, tmp_path)["prompts as in training"]
    assert not check.passed and "chat_template: trained with another" in check.measured


# Export --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_export_is_complete_and_computes_the_same(results, draft, tiny, tmp_path, dtype):
    exported = evaluate.export_draft(draft, tmp_path / "draft", tiny, results, dtype=dtype)
    assert [c.passed for c in checked(exported.check).values()] == [True, True]
    assert draftcheck.check_draft(tmp_path / "draft", tiny) == exported.problems == []
    assert exported.metrics()["export_bytes"] == sum(p.stat().st_size for p in (tmp_path / "draft").iterdir())
    card = (tmp_path / "draft" / "README.md").read_text()
    assert str(results.figures["talks"].measured) in card and targets.fingerprint(tiny)["weights"] in card


def test_a_wrong_export_fails_its_checks(results, draft, tiny, tmp_path):
    exported = evaluate.export_draft(draft, tmp_path / "draft", tiny, results)
    off = replace(exported, trip=replace(exported.trip, difference=0.01))
    assert [c.passed for c in checked(off.check).values()] == [True, False]
    unread = replace(exported, trip=replace(exported.trip, unread=["fc.bias"]))
    assert "fc.bias" in checked(unread.check)["export computes the same"].measured
    broken = replace(exported, problems=[draftcheck.Problem("fc.weight", "missing")])
    assert "fc.weight: missing" in checked(broken.check)["export is complete"].measured


def test_an_example_marks_the_drafted_tokens():
    view = evaluate.example(scripted([2, 0, 1]), lambda ids: "t" * len(ids) + " ")
    assert view.text.endswith("t \u27e6tt \u27e7t t \u27e6t \u27e7t ") and "3 of 7 tokens were drafted" in view.text
    assert view.html.count("<span") == 2 and "3 target forwards instead of 6" in view.html


def test_definitions_are_there_to_print():
    assert "measured" in acceptance.DEFINITIONS and "simulated" in acceptance.DEFINITIONS
