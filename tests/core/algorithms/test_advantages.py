"""Advantages: properties that hold for any rewards, and the numbers of every baseline, scale and unit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.advantages import AdvantageState, advantages
from cotune.algorithms.catalogue import RECIPES
from cotune.algorithms.published import PUBLISHED
from cotune.algorithms.recipes import Attribution, Term
from cotune.algorithms.samples import Sample
from cotune.errors import GroupError
from cotune.records.structs import PolicyRef

OWN = ("task",)


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


def of(rewards: list[float], **term) -> list[float]:
    samples = [sample(r, rollout=f"e{i}", n=i) for i, r in enumerate(rewards)]
    return advantages(samples, [Term(key=OWN, **term)])[0].tolist()


def test_mean_and_std():
    assert of([1.0, 0.0, 0.0, 1.0], ddof=1, eps=0.0) == pytest.approx([0.8660254, -0.8660254, -0.8660254, 0.8660254])
    assert of([1.0, 0.0, 0.0, 1.0], ddof=0, eps=0.0) == [1.0, -1.0, -1.0, 1.0]
    assert of([1.0, 0.0, 0.0, 1.0], ddof=0, eps=0.5) == [0.5, -0.5, -0.5, 0.5]


def test_mean_without_scale():
    assert of([3.0, 0.0, 0.0], scale="none") == [2.0, -1.0, -1.0]


def test_leave_one_out():
    assert of([3.0, 0.0, 1.0], baseline="leave_one_out", scale="none") == [2.5, -2.0, -0.5]


def test_max():
    assert of([3.0, 0.0, 1.0], baseline="max", scale="none") == [0.0, -3.0, -2.0]


def test_no_baseline_is_reinforce():
    assert of([3.0, 0.0, 1.0], baseline="none", scale="none") == [3.0, 0.0, 1.0]


def test_unit_trajectory_counts_each_rollout_once():
    # rollouts: e0 with three calls of reward 1, e1 with one of 0: mean 1/2, not 3/4
    samples = [sample(1.0, rollout="e0", n=i) for i in range(3)] + [sample(0.0, rollout="e1")]
    by_rollout = advantages(samples, [Term(key=OWN, scale="none", unit="trajectory")])[0]
    by_call = advantages(samples, [Term(key=OWN, scale="none", unit="sample")])[0]
    assert by_rollout.tolist() == [0.5, 0.5, 0.5, -0.5]
    assert by_call.tolist() == [0.25, 0.25, 0.25, -0.75]


def test_unit_token_weighs_by_length():
    # three tokens of reward 1, one of 0: mean 3/4, variance 3/16
    samples = [sample(1.0, rollout="e0", tokens=3), sample(0.0, rollout="e1", tokens=1)]
    scaled = advantages(samples, [Term(key=OWN, ddof=0, eps=0.0, unit="token")])[0]
    assert scaled.tolist() == pytest.approx([0.25 / 0.4330127, -0.75 / 0.4330127])
    alone = advantages(samples, [Term(key=OWN, baseline="leave_one_out", scale="none", unit="token")])[0]
    assert alone.tolist() == [1.0, -1.0]


def test_terms_add_up_by_weight():
    samples = [sample(3.0, rollout="e0"), sample(1.0, rollout="e1")]
    terms = [
        Term(key=OWN, scale="none", weight=2.0),
        Term(key=OWN, scale="none", baseline="none", attribution=Attribution(horizon="terminal"), weight=0.5),
    ]
    assert advantages(samples, terms)[0].tolist() == [3.5, -1.5]


def test_ema_updates_first_then_subtracts():
    term = Term(key=("role",), baseline="ema", scale="none", decay=0.75)
    values, state = advantages([sample(10.0)], [term])
    # b = 0.75 * 0 + 0.25 * 10 = 2.5, A = 10 - 2.5; the reverse order would give 10
    assert values.tolist() == [7.5]
    assert state.ema == {"0 a": 2.5}
    values, state = advantages([sample(10.0)], [term], state)
    assert values.tolist() == [5.625]
    assert state.ema == {"0 a": 4.375}


def test_ema_takes_the_mean_of_a_step_and_keeps_keys_apart():
    term = Term(key=("role",), baseline="ema", scale="none", decay=0.5)
    step = [sample(4.0), sample(0.0, rollout="f"), sample(8.0, role="b")]
    values, state = advantages(step, [term])
    assert values.tolist() == [3.0, -1.0, 4.0]
    assert state.ema == {"0 a": 1.0, "0 b": 4.0}


def test_state_is_not_changed_in_place():
    before = AdvantageState({"0 a": 2.0})
    advantages([sample(1.0)], [Term(key=("role",), baseline="ema", scale="none")], before)
    assert before.ema == {"0 a": 2.0}


def test_a_missing_reward_is_an_error_not_a_zero():
    samples = [sample(1.0), Sample(**{**{f: getattr(sample(1.0), f) for f in Sample.__struct_fields__}, "rewards": {}})]
    with pytest.raises(GroupError, match="lacks a reward"):
        advantages(samples, [Term(key=OWN)])


def test_no_samples():
    values, state = advantages([], RECIPES["at_grpo"].terms)
    assert values.shape == (0,)
    assert state.ema == {}


# --- properties ---------------------------------------------------------------------------------------------------

REWARD = st.integers(-40, 40).map(lambda n: n / 8)
STEP = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), REWARD, st.integers(1, 9)), min_size=1, max_size=30)
COMPARING = [r.terms[0] for r in RECIPES.values() if r not in PUBLISHED] + [
    Term(key=OWN, baseline="max", scale="none"),
    Term(key=OWN, baseline="leave_one_out", unit="token"),
    Term(key=OWN, unit="token", ddof=0),
    Term(key=OWN, baseline="none", scale="std"),
]


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
def test_mean_zero_within_a_group(rows, term):
    if term.baseline not in ("mean", "leave_one_out"):
        return
    samples = branches(step(rows))
    values, _ = advantages(samples, [term])
    for task in {s.task for s in samples}:
        inside = [i for i, s in enumerate(samples) if s.task == task]
        weight = np.ones(len(inside))
        if term.unit == "token":
            weight = np.array([samples[i].tokens for i in inside], float)
            if term.baseline == "leave_one_out":
                weight *= weight.sum() - weight
        elif term.unit == "trajectory":
            rollouts = [samples[i].rollout for i in inside]
            weight = np.array([1 / rollouts.count(r) for r in rollouts])
        assert abs(float(weight @ values[inside])) < 1e-6 * max(1.0, weight.sum())


@given(STEP, st.sampled_from(COMPARING), st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(rows, term, random):
    samples = step(rows)
    order = list(range(len(samples)))
    random.shuffle(order)
    straight, _ = advantages(samples, [term])
    shuffled, _ = advantages([samples[i] for i in order], [term])
    np.testing.assert_allclose(shuffled, straight[order], atol=1e-9)


@given(STEP, st.sampled_from(COMPARING), st.integers(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rows, term, shift):
    if term.baseline == "none":
        return
    straight, _ = advantages(step(rows), [term])
    shifted, _ = advantages(step(rows, shift=float(shift)), [term])
    np.testing.assert_allclose(shifted, straight, atol=1e-6)


@given(STEP, st.sampled_from(COMPARING), st.sampled_from([0.25, 3.0, 64.0]))
def test_a_factor_cancels_with_std_and_scales_without(rows, term, factor):
    term = Term(
        key=term.key, attribution=term.attribution, baseline=term.baseline, scale=term.scale, unit=term.unit, eps=0
    )
    straight, _ = advantages(step(rows), [term])
    scaled, _ = advantages(step(rows, factor=factor), [term])
    np.testing.assert_allclose(scaled, straight * (1.0 if term.scale == "std" else factor), atol=1e-6)


@given(st.lists(REWARD, min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_one(rewards):
    n = len(rewards)
    mean = np.array(of(rewards, scale="none"))
    others = np.array(of(rewards, baseline="leave_one_out", scale="none"))
    np.testing.assert_allclose(others, mean * n / (n - 1), atol=1e-9)
    direct = [r - sum(rewards[:i] + rewards[i + 1 :]) / (n - 1) for i, r in enumerate(rewards)]
    np.testing.assert_allclose(others, direct if len(set(rewards)) > 1 else np.zeros(n), atol=1e-9)


@given(REWARD, st.sampled_from(COMPARING))
def test_a_group_of_one_has_no_advantage(reward, term):
    assert advantages([sample(reward)], [term])[0].tolist() == [0.0]


@given(st.floats(-1e6, 1e6), st.integers(2, 9), st.sampled_from(COMPARING))
def test_equal_rewards_have_no_advantage(reward, n, term):
    samples = branches([sample(reward, rollout=f"e{i}", n=i) for i in range(n)])
    assert advantages(samples, [term])[0].tolist() == [0.0] * n
