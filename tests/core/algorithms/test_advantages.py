"""Advantages: properties that hold for any rewards, and the numbers of every building block."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.catalogue import GENERAL, recipe
from cotune.algorithms.comparing import EPS, above, centred, leave_one_out, standardized
from cotune.algorithms.samples import Sample
from cotune.algorithms.step import AdvantageState
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import AverageOfRoles, StandardizedTasks, advantages


def sample(reward: float, task: str = "q", rollout: str = "e", tokens: int = 1, n: int = 0, role: str = "a") -> Sample:
    return Sample(
        id=f"{rollout}{n}.0",
        task=task,
        rollout=rollout,
        role=role,
        turn=n,
        step=n,
        branch=rollout,
        prompt="p",
        policy=PolicyRef("p"),
        tokens=tokens,
        rewards={"local": reward},
        outcome={"team": reward},
    )


def test_standardized_divides_by_the_deviation_of_the_population_or_of_the_sample():
    rewards = np.array([1.0, 0.0, 0.0, 1.0])
    assert standardized(rewards, ddof=1) == pytest.approx(np.array([1, -1, -1, 1]) * 0.5 / (1 / np.sqrt(3) + EPS))
    assert standardized(rewards, ddof=0).tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-5)


def test_standardized_counts_a_reward_as_often_as_its_weight_says():
    # three tokens of reward 1, one of 0: mean 3/4, variance 3/16
    found = standardized(np.array([1.0, 0.0]), ddof=0, weights=np.array([3.0, 1.0]))
    assert found.tolist() == pytest.approx([0.25 / 0.4330127, -0.75 / 0.4330127], abs=1e-5)


def test_centred_and_leave_one_out():
    assert centred(np.array([3.0, 0.0, 0.0])).tolist() == [2.0, -1.0, -1.0]
    assert leave_one_out(np.array([3.0, 0.0, 1.0])).tolist() == [2.5, -2.0, -0.5]


def test_rounding_is_no_difference():
    assert above(np.array([0.1 + 0.2, 1.0]), 0.3).tolist() == [0.0, 0.7]
    for compare in (centred, leave_one_out):
        assert compare(np.array([0.1 + 0.2, 0.3])).tolist() == [0.0, 0.0]
    assert standardized(np.array([0.1 + 0.2, 0.3]), ddof=1).tolist() == [0.0, 0.0]


def test_an_episode_counts_once_however_many_calls_it_has():
    # episodes: e0 with three calls of reward 1, e1 with one of 0: mean 1/2, not 3/4
    samples = [sample(1.0, rollout="e0", n=i) for i in range(3)] + [sample(0.0, rollout="e1")]
    assert advantages(samples, recipe("dr_grpo"))[0].tolist() == [0.5, 0.5, 0.5, -0.5]


def test_a_moving_average_is_updated_and_then_subtracted():
    method = AverageOfRoles().replaced(decay=0.75)
    values, state = advantages([sample(10.0)], method)
    # b = 0.75 * 0 + 0.25 * 10 = 2.5, A = 10 - 2.5; the reverse order would give 10
    assert values.tolist() == [7.5]
    assert state.ema == {"a": 2.5}
    values, state = advantages([sample(10.0)], method, state)
    assert values.tolist() == [5.625]
    assert state.ema == {"a": 4.375}


def test_a_moving_average_takes_the_mean_of_a_step_and_keeps_keys_apart():
    step = [sample(4.0), sample(0.0, rollout="f"), sample(8.0, role="b")]
    values, state = advantages(step, AverageOfRoles())
    assert values.tolist() == [3.0, -1.0, 4.0]
    assert state.ema == {"a": 1.0, "b": 4.0}


def test_state_is_not_changed_in_place():
    before = AdvantageState({"a": 2.0})
    advantages([sample(1.0)], AverageOfRoles(), before)
    assert before.ema == {"a": 2.0}


def test_no_samples():
    values, state = advantages([], recipe("at_grpo"))
    assert values.shape == (0,)
    assert state.ema == {}


# --- properties ---------------------------------------------------------------------------------------------------

REWARD = st.integers(-40, 40).map(lambda n: n / 8)
STEP = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), REWARD, st.integers(1, 9)), min_size=1, max_size=30)
COMPARING = [*(recipe(method.name) for method in GENERAL), StandardizedTasks(), StandardizedTasks().replaced(ddof=0)]


def step(rows, shift: float = 0.0, factor: float = 1.0) -> list[Sample]:
    """Samples of a step: the reward is that of the rollout, so that terminal and own-turn agree."""
    return [
        sample(factor * reward + shift, task=f"q{task}", rollout=f"q{task}e{rollout}", tokens=tokens, n=i)
        for i, (task, rollout, reward, tokens) in enumerate(rows)
    ]


def branches(rows) -> list[Sample]:
    """The same samples, with the task as the branch and one turn: all rewards of a task are siblings."""
    return [
        Sample(**{**{f: getattr(s, f) for f in Sample.__struct_fields__}, "branch": s.task, "turn": 0}) for s in rows
    ]


@given(STEP, st.sampled_from(COMPARING))
def test_mean_zero_within_a_group(rows, method):
    samples = branches(step(rows))
    values, _ = advantages(samples, method)
    for task in {s.task for s in samples}:
        inside = [i for i, s in enumerate(samples) if s.task == task]
        weight = np.ones(len(inside))
        if method.unit == "trajectory":
            rollouts = [samples[i].rollout for i in inside]
            weight = np.array([1 / rollouts.count(r) for r in rollouts])
        assert abs(float(weight @ values[inside])) < 1e-6 * max(1.0, weight.sum())


@given(STEP, st.sampled_from(COMPARING), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(rows, method, random):
    samples = step(rows)
    order = list(range(len(samples)))
    random.shuffle(order)
    straight, _ = advantages(samples, method)
    shuffled, _ = advantages([samples[i] for i in order], method)
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-9)


@given(STEP, st.sampled_from(COMPARING), st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rows, method, shift):
    straight, _ = advantages(step(rows), method)
    shifted, _ = advantages(step(rows, shift=float(shift)), method)
    np.testing.assert_allclose(shifted, straight, atol=1e-6)


@given(STEP, st.sampled_from(COMPARING), st.sampled_from([0.25, 3.0, 64.0]))
def test_a_factor_scales_advantages_where_nothing_divides_by_a_deviation_and_else_cancels(rows, method, factor):
    straight, _ = advantages(step(rows), method)
    scaled, _ = advantages(step(rows, factor=factor), method)
    divides = method.name not in ("dr_grpo", "rloo")
    # Advantages that are divided by a deviation change a little: a small number is added to it.
    np.testing.assert_allclose(scaled, straight * (1.0 if divides else factor), rtol=1e-3, atol=1e-6)


@given(st.lists(REWARD, min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_one(rewards):
    n = len(rewards)
    others = leave_one_out(np.array(rewards))
    np.testing.assert_allclose(others, centred(np.array(rewards)) * n / (n - 1), atol=1e-9)
    direct = [r - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(others, direct if len(set(rewards)) > 1 else np.zeros(n), atol=1e-9)


@given(REWARD, st.sampled_from(COMPARING))
def test_a_group_of_one_has_no_advantage(reward, method):
    assert advantages([sample(reward)], method)[0].tolist() == [0.0]


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from(COMPARING))
def test_equal_rewards_have_no_advantage(reward, n, method):
    samples = branches([sample(reward, rollout=f"e{i}", n=i) for i in range(n)])
    assert advantages(samples, method)[0].tolist() == [0.0] * n
