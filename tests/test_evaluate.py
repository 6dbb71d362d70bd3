"""The stage: questions, measuring, checks, export, metrics; on the tiny target with an untrained draft."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import talking
import torch
from test_questions import prepared_run
from toys import greedy, new_draft

from eagle3lib import acceptance, draftcheck, evaluate, plots, proof, questions, runs, targets
from eagle3lib import results as results_module
from eagle3lib.acceptance import Round, Shape
from eagle3lib.chat import Chat
from eagle3lib.checks import Checks
from eagle3lib.errors import Eagle3Error
from eagle3lib.proof import Mismatch
from eagle3lib.questions import Question
from eagle3lib.results import Outcome, Results
from eagle3lib.speculate import Reply, Times

STEPS = 3
@pytest.fixture(autouse=True)
def sets(monkeypatch):
    talking.packaged(monkeypatch)


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
        talking.packaged(patch)
        asked = questions.choose(["short", "talks"], 3, chat, room=500, turns=2)
    return evaluate.measure(model, draft, asked, chat, steps=STEPS, max_new_tokens=8, batch=4)


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


def test_turns_of_a_conversation_are_drawn_together(results):
    """Intervals are over conversations: six replies of three talks are three draws, not six."""
    assert results.figures["talks"].measured.prompts == results.figures["talks"].simulated.prompts == 3
    assert results.figures["all"].measured.prompts == 6


def test_every_round_is_in_one_bucket_of_context_and_of_reply_length(results):
    for found in (results.by_context((20, 40)), results.by_reply((3, 8))):
        assert sum(b.rounds for b in found.values()) == results.figures["all"].measured.rounds
    lengths = {len(o.reply.tokens) for o in results.outcomes}
    assert set(results.by_reply((3, 8))) == {"0-2" if n < 3 else "3-7" if n < 8 else "8+" for n in lengths}
    assert "context of" in repr(results.lengths()) and "reply of" in repr(results.lengths())


def test_the_same_questions_with_a_tree_and_sampled(model, draft, chat, results):
    results = replace(results, variants=[])
    evaluate.vary(model, draft, results, chat, max_new_tokens=8)  # nothing new
    assert results.variants == []
    evaluate.vary(model, draft, results, chat, max_new_tokens=8, shape=Shape(STEPS, 2, 6), batch=4)
    evaluate.vary(model, draft, results, chat, max_new_tokens=8, temperature=1.0, batch=4)
    tree, sampled = results.variants
    assert tree.differing == [] and tree.label == "tree of depth 3, top-2, 6 tokens" and sampled.label == "chain of 3 at temperature 1"
    assert list(tree.figures) == list(sampled.figures) == list(results.figures)
    assert tree.figures["all"].prompts == 6 and tree.figures["all"].length >= results.figures["all"].measured.length
    assert results.metrics()["acceptance_length_tree"] == tree.figures["all"].length
    assert tree.label in repr(results.table()) and sampled.label in repr(results.table())
    checks = checked(evaluate.check, results)
    assert checks["lossless, tree of depth 3, top-2, 6 tokens"].passed and len(checks) == 3
    spoilt = replace(results, variants=[replace(tree, differing=["short s1"])])
    check = checked(evaluate.check, spoilt)["lossless, tree of depth 3, top-2, 6 tokens"]
    assert not check.passed and "short s1" in check.measured


def test_simulated_counts_are_the_joint_hits_of_all_rows(results, draft, model):
    for o in results.outcomes[:3]:
        proved = proof.prove(model, o.question.ids, o.reply.tokens, draft.cfg.aux_layers)
        hits, known = proof.teacher_forced(draft, proved.sample, STEPS)
        runs = [int((hits & known)[m].long().cumprod(0).sum()) for m in range(len(hits))]
        assert o.hits == [sum(run > k for run in runs) for k in range(STEPS)]
        assert o.tried == [max(0, len(o.reply.tokens) - 1 - k) for k in range(STEPS)]


def test_replies_stop_at_the_stop_ids_of_the_chat(model, draft, tiny, chat):
    asked = questions.choose(["short"], 2, chat, room=500, turns=1)
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
    plots.acceptance_bars(results.bars(), str(results.shape))
    plots.acceptance_by_length(results.by_context(), results.by_reply(), str(results.shape))
    plots.survival(results.survival(), results.survival_intervals())
    assert "short" in shown[0] and "chain of 3" in shown[1] and "talks" in shown[2]
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
    return Results(Shape(STEPS), 0, list(outcomes), Times(total=1.0, forwards=1), None)


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


def test_a_replay_that_parts_at_a_near_tie_is_reported_and_passes():
    tie = replace(scripted([1], replayed=False), replay_margin=2e-5)
    check = checked(evaluate.check, results_of(scripted([1]), tie))["replay equals measured"]
    assert check.passed and "1 more part at a near-tie" in check.measured
    clear = replace(tie, replay_margin=0.3)
    assert "sure by 0.3 nats" in checked(evaluate.check, results_of(tie, clear))["replay equals measured"].measured


@pytest.mark.parametrize(("accepted", "passed", "word"), [([0] * 30, False, "useless"), ([2, 1] * 15, True, "useful")])
def test_a_useless_draft_is_red(accepted, passed, word):
    found = results_of(*[scripted(accepted, id=str(i)) for i in range(4)])
    check = checked(evaluate.judge, found)["draft is of use"]
    assert check.passed == passed and found.metrics()["verdict"] == word


def test_a_random_draft_is_judged_useless_or_unclear(results):
    assert results.figures["all"].measured.length < 1.2 and results.verdict[0] != "useful"


def test_prompts_rendered_otherwise_than_in_training_fail(chat, tmp_path):
    rows = prepared_run(tmp_path, chat)
    assert checked(evaluate.check_prompts, chat, tmp_path)["prompts as in training"].passed
    runs.write_json(tmp_path / "prepared" / "prepared.json", {"rows_kept": len(rows), "fingerprint": {**chat.fingerprint, "chat_template": "x"}})
    check = checked(evaluate.check_prompts, chat, tmp_path)["prompts as in training"]
    assert not check.passed and "chat_template: trained with x" in check.measured
    assert r"prompts end in '<|im_start|>assistant\n' in training and in '<|im_start|>assistant\n' here" in check.measured


def test_a_prompt_that_ends_otherwise_than_in_training_shows_both_tails(chat, tmp_path, monkeypatch):
    prepared_run(tmp_path, chat)
    monkeypatch.setattr(chat, "generation_prompt", [*chat.generation_prompt, *chat.tokenizer.encode("<think>")])
    check = checked(evaluate.check_prompts, chat, tmp_path)["prompts as in training"]
    assert not check.passed and "assistant\\n<think>' here" in check.measured


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
    view = results_module.example(scripted([2, 0, 1]), lambda ids: "t" * len(ids) + " ")
    assert view.text.endswith("t \u27e6tt \u27e7t t \u27e6t \u27e7t ") and "3 of 7 tokens were drafted" in view.text
    assert view.html.count("<span") == 2 and "3 target forwards instead of 6" in view.html


def test_definitions_are_there_to_print():
    assert "measured" in acceptance.DEFINITIONS and "simulated" in acceptance.DEFINITIONS
