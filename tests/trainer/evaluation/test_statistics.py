from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from cotune.intervals import LEVEL, Interval, share
from cotune.trainer.evaluation.statistics import (
    mean,
    mean_reward,
    paired_difference,
    pass_at,
    sign_flip_p,
)


def bounds(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low, interval.high


def test_share_is_the_wilson_interval() -> None:
    # z = 1.959964, p = 0.8, n = 10: centre (0.8 + z^2/20) / (1 + z^2/10), half-width as in Wilson (1927)
    found = share(8, 10)
    assert found is not None and (found.mean, found.n) == (0.8, 10)
    assert bounds(found) == pytest.approx((0.490162, 0.943318), abs=1e-6)


def test_share_of_none_and_all_keeps_a_width() -> None:
    assert bounds(share(0, 10)) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert bounds(share(10, 10)) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_mean_is_the_t_interval() -> None:
    # sd = sqrt(2.5), t(0.975, 4) = 2.776445: 3 +- 2.776445 * sqrt(2.5 / 5)
    assert bounds(mean([1, 2, 3, 4, 5])) == pytest.approx((1.036757, 4.963243), abs=1e-6)


def test_nothing_is_made_up_where_there_is_too_little() -> None:
    assert share(0, 0) is None
    assert mean([]) is None
    assert mean([2.5]) == Interval(mean=2.5, low=None, high=None, n=1)
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None


def test_intervals_stay_inside_known_bounds() -> None:
    rewards = [0.0] * 9 + [-1.0]
    free = bounds(mean_reward(rewards))
    assert free[0] > -1.0 and free[1] > 0.0
    assert bounds(mean_reward(rewards, (-1.0, 0.0))) == (free[0], 0.0)
    assert bounds(mean_reward([9.0, 10.0, 1.0], (0.0, 10.0)))[1] == 10.0
    assert bounds(mean_reward([0.25] * 5, (0.2, 0.3))) == (0.2, 0.3), "shares, cut at narrower bounds"
    assert bounds(mean_reward([0.1] * 3, (0.0, 0.1)))[1] >= mean_reward([0.1] * 3).mean  # type: ignore[union-attr]
    # All seen are 0 or 1, but the reward can be negative: the interval is not cut at 0.
    assert bounds(mean_reward([0.0, 0.0, 1.0], (-1.0, 1.0)))[0] < 0.0
    assert mean_reward([], (-1.0, 1.0)) is None

    after, before = {"a": 10.0, "b": 9.0, "c": 10.0}, {"a": 0.0, "b": 0.0, "c": 5.0}
    assert bounds(paired_difference(after, before))[1] > 10.0
    assert bounds(paired_difference(after, before, bounds=(0.0, 10.0)))[1] == 10.0
    small = {"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 0.0}
    assert bounds(paired_difference(*small))[1] == 1.0, "of shares"
    assert bounds(paired_difference(*small, bounds=(-5.0, 5.0)))[1] > 1.0, "these are no shares"


def test_pairs_are_the_shared_tasks() -> None:
    after = {"a": 1.0, "b": 2.0, "c": 4.0, "only after": 100.0}
    before = {"a": 0.0, "b": 2.0, "c": 2.0, "only before": -100.0}
    # differences 1, 0, 2: sd = 1, t(0.975, 2) = 4.302653: 1 +- 4.302653 / sqrt(3); with half a 2 and half a -2 more
    # the mean of four is 0.75 and sd = 1.5, t(0.975, 3) = 3.182446: 0.75 +- 3.182446 x 1.5 / 2
    found = paired_difference(after, before)
    assert found is not None and (found.mean, found.n) == (1.0, 3)
    assert bounds(found) == pytest.approx((-1.636835, 3.484138), abs=1e-6)


def pairs(gained: int, lost: int, same: int) -> tuple[dict[str, float], dict[str, float]]:
    differences = [1.0] * gained + [-1.0] * lost + [0.0] * same
    after = {str(i): max(d, 0.0) for i, d in enumerate(differences)}
    return after, {str(i): max(-d, 0.0) for i, d in enumerate(differences)}


@pytest.mark.parametrize("gained", [0, 1, 3, 6, 9])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_sign_flip_test_of_single_samples_is_mcnemars_exact_test(gained: int, lost: int) -> None:
    differences = [1.0] * gained + [-1.0] * lost + [0.0] * 4
    expected = stats.binomtest(gained, gained + lost).pvalue if gained + lost else 1.0
    assert sign_flip_p(differences) == pytest.approx(expected)


def test_the_sign_flip_test_counts_all_signs() -> None:
    """Of 2^n ways to give each difference a sign, those whose sum is as far from 0 as it is."""
    for differences in ([0.25, 0.5, -0.125, 1.0, 0.75], [1 / 3, 2 / 3, -1 / 3, 1.0, 1.0, 2 / 3], [0.1, -0.1, 0.0]):
        sums = [sum(signs) for signs in itertools.product(*[(d, -d) for d in differences])]
        far = [abs(total) >= abs(sum(differences)) - 1e-9 for total in sums]
        assert sign_flip_p(differences) == pytest.approx(sum(far) / len(far))
    many = np.random.default_rng(0).normal(0.2, 1.0, 80)
    assert sign_flip_p(many.tolist()) == pytest.approx(sign_flip_p([*many, *[0.0] * 200]))
    assert sign_flip_p([*many, *many]) == pytest.approx(
        2 * stats.norm.sf(many.sum() / np.sqrt((many**2).sum() / 2)), rel=0.2
    )


def test_success_and_reward_are_judged_by_one_test() -> None:
    """Five tasks never show a difference, six do if all gain; whatever the size of the gain."""
    for gain in (1.0, 0.5):
        for tasks, shown in ((5, False), (6, True), (7, True)):
            found = paired_difference({str(i): gain for i in range(tasks)}, {str(i): 0.0 for i in range(tasks)})
            assert (bounds(found)[0] > 0.0) == shown


@given(st.integers(0, 60), st.integers(0, 60), st.integers(0, 60))
def test_a_paired_difference_holds_its_estimate_and_mirrors(gained: int, lost: int, same: int) -> None:
    if gained + lost + same < 2:
        return
    after, before = pairs(gained, lost, same)
    found, mirrored = paired_difference(after, before), paired_difference(before, after)
    assert found is not None and mirrored is not None
    low, high = bounds(found)
    assert -1.0 <= low <= found.mean + 1e-9 and found.mean - 1e-9 <= high <= 1.0
    assert (-mirrored.mean, *(-b for b in reversed(bounds(mirrored)))) == pytest.approx((found.mean, low, high))


def test_pass_at_k_is_the_unbiased_estimate_over_tasks() -> None:
    """Of four episodes 1, 0 and 4 succeed: 1 - C(3,2)/C(4,2) = 1/2, 0 and 1 for k = 2."""
    tried = [(4, 1), (4, 0), (4, 4)]
    assert [found.mean for k in (1, 2, 4) if (found := pass_at(k, tried))] == pytest.approx([5 / 12, 1 / 2, 2 / 3])
    assert bounds(pass_at(2, tried)) == (0.0, 1.0), "not wider than the chances there are"
    # half a 0 and half a 1 more: sd = 0.5 / sqrt(3), t(0.975, 3) = 3.182446: 0.5 +- 3.182446 x 0.288675 / 2
    assert bounds(pass_at(1, [(2, 1)] * 3)) == pytest.approx((0.040654, 0.959346), abs=1e-6)
    assert pass_at(1, []) is None


def draws(values: Sequence[float], chances: Sequence[float], n: int) -> Iterator[tuple[list[float], float]]:
    """Every sample of n values, in any order, with its probability."""
    for counts in itertools.product(range(n + 1), repeat=len(values)):
        if sum(counts) == n:
            sample = [value for value, count in zip(values, counts, strict=True) for _ in range(count)]
            yield sample, float(stats.multinomial.pmf(counts, n, chances))


@pytest.mark.parametrize("n", [2, 3, 5, 8, 12])
@pytest.mark.parametrize("unlike", [0.1, 0.5, 1.0])
def test_policies_that_are_equally_good_are_seldom_told_apart(n: int, unlike: float) -> None:
    """Exact: over all outcomes of `n` tasks, of which only one of both solves a share. The t interval is wrong in 12.5%
    of comparisons on two tasks."""
    wrong = 0.0
    for sample, chance in draws([1.0, 0.0, -1.0], [unlike / 2, 1 - unlike, unlike / 2], n):
        found = paired_difference(
            {str(i): max(d, 0.0) for i, d in enumerate(sample)}, {str(i): max(-d, 0.0) for i, d in enumerate(sample)}
        )
        low, high = bounds(found)
        wrong += chance * (low > 0 or high < 0)
    assert wrong <= 0.05


@pytest.mark.parametrize("n", [2, 3, 4, 6])
@pytest.mark.parametrize("scale", [1.0, -4.0])
def test_graded_rewards_of_equal_policies_are_seldom_told_apart(n: int, scale: float) -> None:
    """Rewards 0, 1/2 and 1, each as often on both sides; and the same where the range of rewards is not known."""
    wrong = 0.0
    for sample, chance in draws([-1.0, -0.5, 0.0, 0.5, 1.0], [1 / 9, 2 / 9, 3 / 9, 2 / 9, 1 / 9], n):
        after = {str(i): scale * max(d, 0.0) for i, d in enumerate(sample)}
        low, high = bounds(paired_difference(after, {str(i): scale * max(-d, 0.0) for i, d in enumerate(sample)}))
        wrong += chance * (low > 0 or high < 0)
    assert wrong <= 0.05


@pytest.mark.parametrize("n", [2, 3, 5, 10, 20])
@pytest.mark.parametrize("chances", [(0.1, 0.2, 0.7), (0.02, 0.0, 0.98), (0.3, 0.4, 0.3), (0.0, 0.05, 0.95)])
def test_the_interval_of_a_mean_reward_holds_the_truth(n: int, chances: tuple[float, ...]) -> None:
    """Exact: rewards 0, 1/2 and 1 with these probabilities. Student's interval holds the truth in 4% of two tasks of
    which each fails in 1 of 50."""
    truth = chances[1] / 2 + chances[2]
    held = 0.0
    for sample, chance in draws([0.0, 0.5, 1.0], chances, n):
        low, high = bounds(mean_reward(sample))
        assert -1e-9 <= low <= sum(sample) / n + 1e-9 and sum(sample) / n - 1e-9 <= high <= 1.0 + 1e-9
        held += chance * (low <= truth + 1e-9 and truth - 1e-9 <= high)
    assert held >= 0.9, "Wilson's own least, for 0.98 of five"


def test_a_difference_of_rewards_stays_within_what_there_is() -> None:
    after, before = {"a": 0.1, "b": 0.9, "c": 0.2}, {"a": 0.9, "b": 0.4, "c": 0.65}
    plain = mean([after[task] - before[task] for task in after])
    assert plain is not None and plain.low is not None and plain.low < -1.0
    low, high = bounds(paired_difference(after, before))
    assert -1.0 <= low < 0.0 < high <= 1.0


def test_the_interval_of_large_samples_is_students() -> None:
    rewards = np.random.default_rng(0).beta(2.0, 2.0, 2000).tolist()
    assert bounds(mean_reward(rewards)) == pytest.approx(bounds(mean(rewards)), abs=1e-3)


def test_a_higher_level_widens_paired_intervals() -> None:
    before = {str(n): float(n < 4) for n in range(20)}
    for after in ({str(n): float(n < 11) for n in range(20)}, {str(n): n / 20 for n in range(20)}):
        low, high = bounds(paired_difference(after, before))
        assert (low, high) == bounds(paired_difference(after, before, LEVEL))
        lower, higher = bounds(paired_difference(after, before, 0.99))
        assert lower < low and higher > high


def test_seconds_are_never_negative() -> None:
    found = mean([0.1, 0.1, 9.0], least=0.0)
    assert found is not None and found.low == 0.0 and found.high is not None and found.high > 9.0
