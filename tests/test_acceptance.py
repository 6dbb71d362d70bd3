"""Scripted rounds with textbook answers: acceptance length, rate, survival, censoring, intervals."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lib import acceptance
from eagle3lib.acceptance import Round


def rounds(*accepted: int, end: str = "") -> list[Round]:
    listed = [Round(10 + i, a) for i, a in enumerate(accepted)]
    return listed if not end else [*listed[:-1], listed[-1]._replace(end=end)]


def test_scripted_rounds_give_the_textbook_figures():
    # K = 3; six rounds: 0 1 3 | 2 3 0. Tokens 1+2+4+3+4+1 = 15 in 6 rounds.
    figure = acceptance.measured([rounds(0, 1, 3), rounds(2, 3, 0)], steps=3)
    assert figure.length == pytest.approx(15 / 6)
    assert figure.rate == pytest.approx(9 / 18)
    assert figure.survival == pytest.approx([4 / 6, 3 / 6, 2 / 6])
    assert (figure.prompts, figure.rounds, figure.steps, figure.censored) == (2, 6, 3, 0)


def test_length_is_tokens_per_round_not_a_product_of_averages():
    # Marginal rate of each position is one half; the joint survival of position 2 is one half too, not one quarter.
    figure = acceptance.measured([rounds(0, 2, 0, 2)], steps=2)
    assert figure.survival == pytest.approx([0.5, 0.5])
    assert figure.length == pytest.approx(2.0)


def test_bounds_of_the_length():
    assert acceptance.measured([rounds(0, 0, 0)], steps=5).length == 1.0
    assert acceptance.measured([rounds(5, 5, 5)], steps=5).length == 6.0


def test_a_round_cut_by_the_limit_counts_whole():
    figure = acceptance.measured([[Round(10, 3), Round(14, 3), Round(18, 0, "limit", beyond=2)]], steps=3)
    assert (figure.length, figure.rounds, figure.censored) == (pytest.approx((4 + 4 + 3) / 3), 3, 1)


def test_short_replies_estimate_the_same_length_as_long_ones():
    """Cut rounds are long ones more often than not: left out or counted as cut, short replies would read lower."""
    rng, truth, whole, emitted = np.random.default_rng(2), 1 + (0 + 0 + 1 + 5) / 4, [], []
    for _ in range(4000):
        listed, tokens = [], 0
        while tokens < 10:
            accepted = int(rng.choice([0, 0, 1, 5]))
            beyond = max(0, tokens + accepted + 1 - 10)
            listed.append(Round(tokens, accepted - beyond, "limit" if beyond else "", beyond))
            tokens += accepted + 1
        whole.append(listed)
        emitted.append([r._replace(beyond=0) for r in listed])
    figure = acceptance.measured(whole, 5)
    assert figure.low <= truth <= figure.high and figure.high - figure.low < 0.1
    assert acceptance.measured(emitted, 5).high < truth - 0.1
    left_out = [[r for r in prompt if r.end != "limit"] for prompt in whole]
    assert acceptance.measured(left_out, 5).high < truth - 0.1


def test_totals_give_what_rounds_give():
    listed = [rounds(0, 1, 3), rounds(2, 3, 0, 0), rounds(1)]
    figure, totals = acceptance.measured(listed, 3), acceptance.counted([7, 9, 2], [3, 4, 1], 3)
    assert (totals.length, totals.low, totals.high, totals.rate) == pytest.approx((figure.length, figure.low, figure.high, figure.rate))
    assert (totals.prompts, totals.rounds, totals.steps) == (3, 8, 3)


@pytest.mark.parametrize("tokens", [2, 13])
def test_totals_that_cannot_be_are_refused(tokens):
    with pytest.raises(ValueError, match=r"prompt 1: .* outside 1\.\.4 a round"):
        acceptance.counted([3, tokens], [3, 3], 3)


def test_a_round_ended_by_the_reply_counts_what_it_emitted():
    figure = acceptance.measured([rounds(3, 1, end="eos")], steps=3)
    assert figure.length == pytest.approx((4 + 2) / 2)


def test_long_replies_weigh_by_their_rounds():
    figure = acceptance.measured([rounds(0), rounds(2, 2, 2)], steps=2)
    assert figure.length == pytest.approx(10 / 4)  # not the mean of the two prompts' means, (1 + 3) / 2


def test_counts_and_rounds_agree():
    listed = [rounds(0, 1, 3), rounds(2, 3, 0, 0)]
    counts = acceptance.from_counts(np.array([[2, 1, 1], [2, 2, 1]]), np.array([[3] * 3, [4] * 3]))
    assert acceptance.measured(listed, steps=3) == counts


def test_each_position_has_its_own_number_of_tries():
    # A teacher-forced row near the end of a reply is supervised at early positions only.
    figure = acceptance.from_counts(np.array([[4, 2]]), np.array([[8, 5]]))
    assert figure.length == pytest.approx(1 + 4 / 8 + 2 / 5)


def test_interval_holds_the_figure_and_is_reproducible():
    rng = np.random.default_rng(1)
    listed = [rounds(*rng.integers(0, 4, size=20)) for _ in range(30)]
    first, again = acceptance.measured(listed, 3, seed=7), acceptance.measured(listed, 3, seed=7)
    assert first == again
    assert first.low < first.length < first.high
    assert all(a < b < c for a, b, c in zip(first.survival_low, first.survival, first.survival_high, strict=True))


def test_interval_covers_the_truth_and_resamples_prompts_not_rounds():
    """Prompts differ (some always hit, some never): an interval over rounds would be far too narrow."""
    rng, covered = np.random.default_rng(0), 0
    for trial in range(60):
        sample = [rounds(*([2] * 10 if rng.random() < 0.5 else [0] * 10)) for _ in range(20)]
        figure = acceptance.measured(sample, 2, seed=trial)
        covered += figure.low <= 2.0 <= figure.high
    assert covered >= 50  # 95 % of 60 is 57; over rounds it would be about 27


def test_identical_prompts_have_an_interval_of_no_width():
    figure = acceptance.measured([rounds(1, 0)] * 5, steps=2)
    assert figure.low == figure.length == figure.high == 1.5


@pytest.mark.parametrize("accepted", [0, 1, 3])
@pytest.mark.parametrize("empty", [0, 3])
def test_one_prompt_says_nothing_about_others(accepted, empty):
    """However many rounds it has, and however many prompts without a round stand beside it."""
    figure = acceptance.measured([rounds(*[accepted] * 50), *[[]] * empty], steps=3)
    totals = acceptance.counted([50 * (accepted + 1), *[0] * empty], [50, *[0] * empty], 3)
    for one in (figure, totals):
        assert (one.low, one.length, one.high) == (1.0, accepted + 1.0, 4.0) and acceptance.verdict(one)[0] == "unclear"
    assert (figure.survival_low, figure.survival_high) == ([0.0] * 3, [1.0] * 3)


def test_no_rounds_is_said_and_not_a_crash():
    figure = acceptance.measured([[]], steps=2)
    assert figure.rounds == 0 and acceptance.verdict(figure)[0] == "unclear"
    assert np.isnan(acceptance.measured([], steps=2).low)


@pytest.mark.parametrize("wrong", [-1, 4])
def test_impossible_counts_are_refused(wrong):
    with pytest.raises(ValueError, match=r"outside 0\.\.3"):
        acceptance.measured([rounds(1, wrong)], steps=3)


@pytest.mark.parametrize(("hits", "tried"), [([[3, 1]], [[2, 2]]), ([[1, 2]], [[3, 3]])])
def test_impossible_joint_hits_are_refused(hits, tried):
    with pytest.raises(ValueError, match="joint hits"):
        acceptance.from_counts(np.array(hits), np.array(tried))


def test_buckets_of_context_length():
    listed = [[Round(5, 0), Round(15, 2)], [Round(16, 1), Round(40, 2)]]
    buckets = acceptance.by_context(listed, 2, edges=[10, 20, 100])
    assert {name: (b.rounds, b.length) for name, b in buckets.items()} == {"0-9": (1, 1.0), "10-19": (2, 2.5), "20-99": (1, 3.0)}


@pytest.mark.parametrize(("accepted", "word"), [([0] * 40, "useless"), ([1, 2, 1, 2], "useful")])
def test_verdict(accepted, word):
    assert acceptance.verdict(acceptance.measured([rounds(*accepted)] * 4, 3))[0] == word


def test_verdict_of_a_wide_interval_is_unclear():
    figure = acceptance.measured([rounds(0, 0, 0)] * 9 + [rounds(3, 3, 3)], 3)
    assert figure.low <= acceptance.USELESS_LENGTH < figure.high
    assert acceptance.verdict(figure)[0] == "unclear"


def test_definitions_name_what_matters():
    for word in ("chain", "tree", "served", "vocabulary", "first miss", "joint", "token limit", "K+1", "bootstrap"):
        assert word in acceptance.DEFINITIONS
