"""Real draft-and-verify: lossless whatever the draft says, K+1 with a perfect draft, and equal to what training simulates."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import toys
from toys import LAYERS, greedy, new_draft, noisy, prompts_of
from transformers import LlamaForCausalLM

from eagle3lib import acceptance, export, proof, speculate, targets
from eagle3lib.acceptance import Round, Shape
from eagle3lib.draft import Draft
from eagle3lib.draftfile import DraftFile
from eagle3lib.errors import Eagle3Error
from eagle3lib.verifier import Drafts

STEPS, CHAIN = toys.STEPS, Shape(toys.STEPS)


@pytest.fixture(scope="module")
def model(tiny):
    return targets.load_model(tiny)


def consistent(reply, prompt):
    """Rounds follow each other without gap and emit exactly the reply behind its first token."""
    at = len(prompt) + 1
    for r in reply.rounds:
        assert r.context == at
        at += r.accepted + 1
    assert at == len(prompt) + len(reply.tokens)


# The whole loop ------------------------------------------------------------------------------------------------------


def test_a_perfect_draft_reaches_exactly_k_plus_one(toy):
    """If training says 100 % and this says 1, something is shifted by a row, a position or a token."""
    target, f, draft = toy
    prompts = prompts_of(8, low=3, high=10)
    replies, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=21)
    for prompt, reply in zip(prompts, replies, strict=True):
        expected = [int(f[prompt[-1]])]
        while len(expected) < 21:
            expected.append(int(f[expected[-1]]))
        assert reply.tokens == expected
    figure = acceptance.measured([r.rounds for r in replies], STEPS)
    assert (figure.length, figure.rate, figure.low) == (STEPS + 1, 1.0, STEPS + 1) and figure.rounds == 8 * 4


def test_a_random_draft_gives_about_one_and_loses_nothing(model, tiny):
    torch.manual_seed(3)
    prompts = prompts_of(5)
    replies, _ = speculate.generate(model, new_draft(tiny), prompts, shape=CHAIN, max_new_tokens=24, ends=set())
    assert [r.tokens for r in replies] == [greedy(model, p, 24) for p in prompts]
    figure = acceptance.measured([r.rounds for r in replies], STEPS)
    assert figure.length < 1.1 and acceptance.verdict(figure)[0] in ("useless", "unclear")


@pytest.mark.parametrize("seed", range(6))
def test_lossless_with_a_draft_that_is_right_now_and_then(model, monkeypatch, seed):
    """Guesses are the true continuation with random mistakes: every pattern of acceptance and rollback occurs."""
    torch.manual_seed(seed)
    prompts, steps, new = prompts_of(4, seed), 1 + seed, 30
    truth = [greedy(model, p, new + steps + 1) for p in prompts]
    script = Script(truth, steps, right=0.75)
    monkeypatch.setattr(speculate, "Drafter", script)
    replies, times = speculate.generate(model, stub_draft(), prompts, shape=Shape(steps), max_new_tokens=new, ends=set())
    assert [r.tokens for r in replies] == [t[:new] for t in truth]
    assert times.rounds == sum(len(r.rounds) for r in replies) and times.tokens == 4 * (new - 1)
    for prompt, reply in zip(prompts, replies, strict=True):
        consistent(reply, prompt)
    complete = [r.accepted + r.beyond for reply in replies for r in reply.rounds]
    assert complete and sorted(complete) == sorted(script.should_accept(replies))


@pytest.mark.parametrize("ends", [set(), {5, 70, 140, 210, 280}])
def test_the_draft_is_handed_the_states_of_a_plain_forward(model, monkeypatch, ends):
    """True rows one by one, each with the token behind it, whatever was rejected, padded or dropped on the way."""
    torch.manual_seed(1)
    prompts = prompts_of(5, seed=3)
    script = Script([greedy(model, p, 40) for p in prompts], STEPS, right=0.6)
    monkeypatch.setattr(speculate, "Drafter", script)
    replies, _ = speculate.generate(model, stub_draft(), prompts, shape=CHAIN, max_new_tokens=30, ends=ends)
    for prompt, reply, seen in zip(prompts, replies, script.seen, strict=True):
        rows = sum(len(tokens) for _, tokens in seen)
        assert len(prompt) <= rows < len(prompt) + len(reply.tokens)
        assert sum((tokens for _, tokens in seen), []) == (prompt + reply.tokens)[1 : rows + 1]
        plain = proof.prove(model, prompt, reply.tokens, LAYERS).sample.hidden[:rows, :-1].flatten(1)
        torch.testing.assert_close(torch.cat([aux for aux, _ in seen]), plain, rtol=1e-4, atol=1e-4)


class Script:
    """In place of a Drafter: guesses drawn from the true continuations, each wrong with some probability."""

    def __init__(self, truth, steps, right):
        self.truth, self.right, self.right_runs, self.done = truth, right, [[] for _ in truth], [0] * len(truth)
        self.live, self.seen = list(range(len(truth))), [[] for _ in truth]

    def __call__(self, draft, shape, temperature, generator):
        self.steps = shape.steps
        return self

    def propose(self, aux, fresh):
        steps = self.steps
        guesses = []
        for states, b, new in zip(aux, self.live, fresh, strict=True):
            self.seen[b].append((states[: len(new)], list(new)))
            self.done[b] += len(new) if self.done[b] else 1  # the first catch-up brings the prompt and one reply token
            ahead = torch.tensor(self.truth[b][self.done[b] : self.done[b] + steps])
            wrong = torch.rand(steps) > self.right
            self.right_runs[b].append(int((~wrong).long().cumprod(0).sum()))
            guesses.append(torch.where(wrong, (ahead + 1) % 320, ahead))
        return Drafts(torch.stack(guesses))

    def select(self, rows):
        self.live = [self.live[j] for j in rows]

    def should_accept(self, replies):
        """What the scripted mistakes allow, also where the limit cut."""
        return [run for b, reply in enumerate(replies) for run, _ in zip(self.right_runs[b], reply.rounds, strict=True)]


def stub_draft():
    return SimpleNamespace(cfg=SimpleNamespace(aux_layers=LAYERS), fc=SimpleNamespace(weight=torch.zeros(1)))


def test_prompts_in_a_batch_come_out_as_they_would_alone(toy):
    target, _, draft = toy
    draft, prompts = noisy(draft, 0.3), prompts_of(7, seed=2)
    together, times = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=20)
    alone = [speculate.generate(target, draft, [p], shape=CHAIN, max_new_tokens=20)[0][0] for p in prompts]
    assert together == alone
    assert times.forwards == max(len(r.rounds) for r in together)
    figure = acceptance.measured([r.rounds for r in together], STEPS)
    assert 1.2 < figure.length < STEPS + 0.8  # neither always right nor always wrong, else this shows little


def test_rejected_columns_are_squeezed_out_of_a_long_cache(model, monkeypatch):
    prompts, new = prompts_of(3, seed=4), 60
    truth = [greedy(model, p, new + STEPS + 1) for p in prompts]
    monkeypatch.setattr(speculate, "Drafter", Script(truth, STEPS, right=0.0))
    columns, squeeze = [], speculate.Verifier._squeeze
    monkeypatch.setattr(speculate.Verifier, "_squeeze", lambda self: (squeeze(self), columns.append(self.true.shape[1])))
    replies, _ = speculate.generate(model, stub_draft(), prompts, shape=CHAIN, max_new_tokens=new, ends=set())
    assert [r.tokens for r in replies] == [t[:new] for t in truth]
    assert any(b < a for a, b in zip(columns, columns[1:], strict=False)), "the cache never shrank: the test is too short"


# Ends ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", range(1, 13))
def test_an_end_of_turn_stops_the_reply_wherever_it_falls_in_a_round(toy, length):
    target, f, draft = toy
    prompt = [40, 41, 42]
    tokens = [int(f[42])]
    while len(tokens) < length:
        tokens.append(int(f[tokens[-1]]))
    (reply,), _ = speculate.generate(target, draft, [prompt], shape=CHAIN, max_new_tokens=12, ends={tokens[-1]})
    assert (reply.tokens, reply.finish) == (tokens, "eos")
    consistent(reply, prompt)
    whole, rest = divmod(length - 1, STEPS + 1)
    assert [r.accepted + 1 for r in reply.rounds] == [STEPS + 1] * whole + [rest] * (rest > 0)
    assert [r.end for r in reply.rounds] == [""] * (len(reply.rounds) - 1) + ["eos"] * (length > 1)


@pytest.mark.parametrize("limit", range(1, 13))
def test_a_round_that_the_limit_cuts_is_marked(toy, limit):
    target, _, draft = toy
    (reply,), _ = speculate.generate(target, draft, [[40, 41]], shape=CHAIN, max_new_tokens=limit, ends=set())
    assert (len(reply.tokens), reply.finish) == (limit, "limit")
    consistent(reply, [40, 41])
    cut = (limit - 1) % (STEPS + 1) != 0
    assert [r.end for r in reply.rounds] == [""] * (len(reply.rounds) - cut) + ["limit"] * cut
    assert all(r.accepted + r.beyond == STEPS for r in reply.rounds)


def test_replies_of_a_batch_end_at_different_rounds(toy):
    target, _, draft = toy
    prompts = prompts_of(6, seed=8)
    alone = [speculate.generate(target, draft, [p], shape=CHAIN, max_new_tokens=40, ends=set(range(3, 40)))[0][0] for p in prompts]
    together, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=40, ends=set(range(3, 40)))
    assert together == alone and len({len(r.rounds) for r in alone}) > 2


def test_end_ids_come_from_the_generation_config_then_the_config(model):
    assert speculate.end_ids(model) == {2}
    other = LlamaForCausalLM(replace_config(model.config, eos_token_id=[5, 6]))
    assert speculate.end_ids(other) == {5, 6}
    other.generation_config.eos_token_id = 7
    assert speculate.end_ids(other) == {7}


def replace_config(config, **changes):
    new = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(new, name, value)
    return new


# Proof ---------------------------------------------------------------------------------------------------------------


def test_proof_of_a_greedy_reply(model):
    prompt = prompts_of(1)[0]
    reply = greedy(model, prompt, 20)
    proved = proof.prove(model, prompt, reply, LAYERS)
    assert proved.mismatch is None and proved.smallest_margin > 0
    states = model(torch.tensor([prompt + reply]), output_hidden_states=True).hidden_states
    assert torch.equal(proved.sample.hidden, torch.stack([states[k][0] for k in (*LAYERS, -1)], dim=1))
    assert proved.sample.loss_mask.tolist() == [False] * len(prompt) + [True] * 20


@pytest.mark.parametrize("at", [0, 7, 19])
def test_the_first_token_that_is_not_the_targets_own_is_named(model, at):
    prompt = prompts_of(1)[0]
    reply = greedy(model, prompt, 20)
    wrong = [*reply[:at], (reply[at] + 1) % 320, *reply[at + 1 :]]
    found = proof.prove(model, prompt, wrong, LAYERS).mismatch
    logits = model(torch.tensor([prompt + wrong])).logits[0, len(prompt) + at - 1]
    assert (found.position, found.found, found.expected) == (at, wrong[at], reply[at])
    assert found.margin == pytest.approx(float(logits[reply[at]] - logits[wrong[at]]), abs=1e-4)
    assert not found.near_tie and f"reply token {at} is {wrong[at]}" in str(found) and "real difference" in str(found)


def test_a_tie_is_called_a_tie(model):
    prompt = prompts_of(1)[0]
    twin = copy.deepcopy(model)
    (first,) = greedy(twin, prompt, 1)
    other = 319 if first != 319 else 318
    with torch.no_grad():
        twin.lm_head.weight[other] = twin.lm_head.weight[first] * (1 - 1e-6)
    found = proof.prove(twin, prompt, [other], LAYERS).mismatch
    assert found.near_tie and "near-tie" in str(found) and found.margin < 1e-3


@pytest.mark.parametrize("amount", [0.0, 0.2, 0.5])
def test_teacher_forced_replay_predicts_every_round(toy, amount):
    """Simulated and measured acceptance are the same numbers when counted at the same rows."""
    target, _, draft = toy
    draft, prompts = noisy(draft, amount), prompts_of(6, seed=11)
    for ends in (set(), set(range(3, 30))):
        replies, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=23, ends=ends)
        for prompt, reply in zip(prompts, replies, strict=True):
            proved = proof.prove(target, prompt, reply.tokens, LAYERS)
            hits, known = proof.teacher_forced(draft, proved.sample, STEPS)
            assert proof.replay(hits, known, len(prompt) + 1, reply.finish) == [r._replace(beyond=0) for r in reply.rounds]
            assert len(hits) == len(reply.tokens) - 1


def test_the_exported_file_drafts_the_same_rounds(toy, tmp_path):
    """An oracle that shares no code with draft, cache, batch or loop: the folder read back, run without a cache."""
    target, _, draft = toy
    draft, prompts = noisy(draft, 0.3), prompts_of(4, seed=12)
    file = DraftFile(export.export(draft, tmp_path / "draft", dtype="float32"), draft.embed_tokens.weight)
    replies, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=20, ends=set())
    for prompt, reply in zip(prompts, replies, strict=True):
        text = prompt + reply.tokens
        aux = proof.prove(target, prompt, reply.tokens, LAYERS).sample.hidden[:, :-1].flatten(1)
        for r in reply.rounds:
            _, guesses = file.chain(aux[: r.context - 1], text[1 : r.context], STEPS)
            ahead = text[r.context : r.context + STEPS]
            expected = next((k for k, (g, t) in enumerate(zip(guesses, ahead, strict=False)) if g != t), len(ahead))
            assert r.accepted == min(expected, len(text) - r.context - 1)


def test_a_draft_served_one_position_off_is_noticed_by_the_replay(toy, monkeypatch):
    target, _, draft = toy
    draft, layer = noisy(draft, 0.2), Draft.layer
    prompts = prompts_of(6, seed=11)
    monkeypatch.setattr(Draft, "layer", lambda self, embeds, hidden, *rest: layer(self, embeds, hidden.roll(1, 1), *rest))
    replies, _ = speculate.generate(target, draft, prompts, shape=CHAIN, max_new_tokens=23, ends=set())
    proofs = [proof.prove(target, p, r.tokens, LAYERS) for p, r in zip(prompts, replies, strict=True)]
    assert all(p.mismatch is None for p in proofs)  # still lossless: only the speed is gone
    replays = [proof.replay(*proof.teacher_forced(draft, proved.sample, STEPS), len(p) + 1, r.finish)
               for p, r, proved in zip(prompts, replies, proofs, strict=True)]
    assert replays != [[r._replace(beyond=0) for r in reply.rounds] for reply in replies]


def test_replay_by_hand():
    known = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [1, 1], [1, 0]]).bool()
    hits = torch.tensor([[1, 0], [0, 0], [0, 1], [1, 1], [0, 0], [0, 0]]).bool()
    # rows 0: accepts 1, next 2: accepts 0, next 3: accepts 2 and reaches the end
    assert proof.replay(hits, known, 10, "limit") == [Round(10, 1), Round(12, 0), Round(13, 2)]
    assert proof.replay(hits, known, 10, "eos")[-1] == Round(13, 2, "eos")
    hits[2, 0], hits[5, 0] = True, True  # row 2 accepts 2, row 5 accepts all that is left
    assert proof.replay(hits, known, 10, "limit") == [Round(10, 1), Round(12, 2), Round(15, 0, "limit")]
    assert proof.replay(hits, known, 10, "eos")[-1] == Round(15, 0, "eos")


def test_where_two_accounts_of_a_reply_part():
    rounds = [Round(10, 1), Round(12, 0), Round(13, 2, "limit", beyond=1)]
    plain = [r._replace(beyond=0) for r in rounds]
    assert proof.parting(rounds, plain) is None
    assert proof.parting(rounds, [Round(10, 1), Round(12, 3), Round(16, 0)]) == (2, 0)
    assert proof.parting(rounds, [Round(10, 2), *plain[1:]]) == (0, 1)
    assert proof.parting(rounds, [Round(10, 0), Round(11, 0)]) == (0, 0)


@torch.no_grad()
def test_the_margin_of_the_drafts_own_choice(toy):
    """By the folder's independent reader, along the same chain."""
    target, f, draft = toy
    draft, text = noisy(draft, 0.3), [5, 9, 30]
    while len(text) < 12:
        text.append(int(f[text[-1]]))
    sample = proof.prove(target, text[:3], text[3:], LAYERS).sample
    aux = sample.hidden[:, :-1].flatten(1)
    for row, position in ((0, 0), (4, 0), (2, 3)):
        ids = text[1 : row + 4]
        out, past = draft.layer(draft.embed(torch.tensor([ids])), draft.fuse(aux[: row + 3])[None], torch.arange(row + 3)[None])
        for k in range(position):
            out, past = draft.layer(draft.embed(torch.tensor([[text[row + 4 + k]]])), out[:, -1:], torch.tensor([[row + 3 + k]]), past)
        top = draft.logits(out[0, -1]).topk(2).values
        assert proof.draft_margin(draft, sample, row, position) == pytest.approx(float(top[0] - top[1]), abs=1e-4)


def test_a_reply_of_one_token_has_no_rounds(model, tiny):
    proved = proof.prove(model, [5, 6], greedy(model, [5, 6], 1), LAYERS)
    hits, known = proof.teacher_forced(new_draft(tiny), proved.sample, STEPS)
    assert hits.shape == known.shape == (0, STEPS) and proof.replay(hits, known, 3, "limit") == []


# Errors and times ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "changes", "message"), [
    ([], {}, "empty prompt"), ([5], {"max_new_tokens": 0}, "at least 1"), ([5], {"temperature": -1.0}, "never below 0"),
    ([5], {"temperature": 1.0, "shape": Shape(3, 2)}, "draft a chain"),
    ([5] * 2040, {"max_new_tokens": 5}, "2040 prompt.*context of 2048")])
def test_impossible_requests_are_refused(model, tiny, prompt, changes, message):
    with pytest.raises(Eagle3Error, match=message):
        speculate.generate(model, new_draft(tiny), [prompt], **{"shape": CHAIN, "max_new_tokens": 5, **changes})


@pytest.mark.parametrize("shape", [CHAIN, Shape(4, 2, 7)], ids=str)
def test_a_reply_that_fills_the_context_to_the_last_token(model, tiny, shape):
    room = 2048 - shape.steps - 9
    prompts = [prompts_of(1, seed=5, low=room, high=room + 1)[0], [7, 8, 9]]
    replies, _ = speculate.generate(model, new_draft(tiny), prompts, shape=shape, max_new_tokens=9, ends=set())
    assert [r.tokens for r in replies] == [greedy(model, p, 9) for p in prompts]
    with pytest.raises(Eagle3Error, match="context of 2048"):
        speculate.generate(model, new_draft(tiny), [prompts[0]], shape=shape, max_new_tokens=10, ends=set())


def test_layers_that_cannot_take_tokens_back_are_refused(model, tiny, monkeypatch):
    monkeypatch.setattr(model.config, "layer_types", ["full_attention", "sliding_attention"], raising=False)
    with pytest.raises(Eagle3Error, match="sliding_attention.*SGLang"):
        speculate.generate(model, new_draft(tiny), [[5]], shape=Shape(2), max_new_tokens=2)


def test_times_add_up(model, tiny):
    _, times = speculate.generate(model, new_draft(tiny), prompts_of(2), shape=Shape(2), max_new_tokens=10, ends=set())
    assert 0 < times.draft + times.verify <= times.total - times.prefill + 1e-6
    assert 0.5 < times.efficiency <= 1.0 and times.tokens == 18
    both = replace(times)
    both.add(times)
    assert (both.tokens, both.rounds, both.total) == (36, 2 * times.rounds, 2 * times.total)
