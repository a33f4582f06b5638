"""Reward attribution: weights, horizons, scopes, and what counts as missing."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cotune.algorithms.attribution import Length, attribute_siblings, overlong_penalties
from cotune.algorithms.recipes import OUTCOME, Attribution
from cotune.algorithms.samples import Sample
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import Asked, attribute, lacking


def sample(
    id: str = "c.0",
    role: str = "a",
    turn: int = 0,
    rollout: str = "e",
    rewards=None,
    outcome=None,
    chosen: bool = True,
    task: str = "q",
) -> Sample:
    return Sample(
        id=id,
        task=task,
        rollout=rollout,
        role=role,
        turn=turn,
        step=turn,
        branch=rollout,
        prompt="p",
        policy=PolicyRef("p"),
        tokens=1,
        rewards=rewards or {},
        outcome=outcome or {},
        chosen=chosen,
    )


def test_own_turn_is_alpha_times_team_plus_local():
    one = sample(rewards={"team": 3.0, "local": 0.5}, outcome={"team": 100.0})
    assert attribute([one], Attribution(team_weight=2.0)).tolist() == [6.5]


def test_unlisted_components_weigh_other():
    one = sample(rewards={"format": 2.0, "correct": 1.0, "noise": 7.0})
    assert attribute([one], Attribution(weights={"format": 0.1, "correct": 0.9}, other=0.0)).tolist() == [1.1]
    assert attribute([one], Attribution()).tolist() == [10.0]


def test_terminal_takes_only_the_outcome():
    one = sample(rewards={"local": 5.0}, outcome={"team": 1.0})
    assert attribute([one], OUTCOME).tolist() == [1.0]


def test_own_turn_with_outcome_adds_only_what_the_role_lacks():
    both = sample("c.0", rewards={"local": 1.0}, outcome={"team": 4.0, "local": 50.0})
    other_role = sample("d.0", role="b", rewards={"team": 2.0}, outcome={"team": 4.0, "local": 50.0})
    assert attribute([both, other_role], Attribution(outcome=True)).tolist() == [5.0, 52.0]


def test_reward_to_go_discounts_by_turn_and_ends_with_the_outcome():
    # G2 = 3 + 8 = 11, G1 = 2 + 11 / 2 = 7.5, G0 = 1 + 7.5 / 2 = 4.75; the sibling of turn 1: 0 + 11 / 2
    path = [
        sample("c0.0", turn=0, rewards={"local": 1.0}, outcome={"team": 8.0}),
        sample("c1.0", turn=1, rewards={"local": 2.0}, outcome={"team": 8.0}),
        sample("c1.1", turn=1, rewards={"local": 0.0}, outcome={"team": 8.0}, chosen=False),
        sample("c2.0", turn=2, rewards={"local": 3.0}, outcome={"team": 8.0}),
    ]
    assert attribute(path, Attribution(), to_go=0.5).tolist() == [4.75, 7.5, 5.5, 11.0]


def test_reward_to_go_keeps_roles_and_rollouts_apart():
    path = [
        sample("c0.0", turn=0, rewards={"local": 1.0}),
        sample("c1.0", turn=1, rewards={"local": 10.0}),
        sample("d0.0", role="b", turn=0, rewards={"local": 100.0}),
        sample("e1.0", rollout="f", turn=1, rewards={"local": 1000.0}),
    ]
    assert attribute(path, Attribution(), to_go=1.0).tolist() == [11.0, 10.0, 100.0, 1000.0]


@pytest.mark.parametrize(("scope", "expected"), [("sum", [11.0, 12.0, 11.0, 5.0]), ("mean", [5.5, 6.0, 5.5, 5.0])])
def test_scope_joins_the_roles_of_a_turn_as_chosen(scope, expected):
    step = [
        sample("c.0", rewards={"local": 1.0}),
        sample("c.1", rewards={"local": 2.0}, chosen=False),
        sample("d.0", role="b", rewards={"local": 10.0}),
        sample("g.0", role="b", turn=1, rewards={"local": 5.0}),
    ]
    assert attribute(step, Attribution(), scope=scope).tolist() == expected


def test_a_component_that_siblings_carry_is_missed():
    full = sample("c.0", rewards={"team": 1.0, "local": 1.0})
    late = sample("c.1", rewards={"local": 1.0})
    other_role = sample("d.0", role="b", rewards={"local": 1.0})
    np.testing.assert_array_equal(attribute([full, late, other_role], Attribution()), [2.0, np.nan, 1.0])


def test_what_another_task_or_group_carries_is_not_missed():
    """Two kinds of tasks with outcomes of their own names; a scorer that gives a bonus in one call only."""
    solved = [sample(f"c{i}.0", rollout=f"e{i}", task="q", outcome={"solved": i}) for i in (0.0, 1.0)]
    correct = [sample(f"d{i}.0", rollout=f"f{i}", task="r", outcome={"correct": i}) for i in (0.0, 1.0)]
    assert attribute(solved + correct, OUTCOME).tolist() == [0.0, 1.0, 0.0, 1.0]
    plain, bonus = sample("c.0", rewards={"local": 1.0}), sample("d.0", turn=1, rewards={"local": 1.0, "bonus": 2.0})
    assert attribute([plain, bonus], Attribution()).tolist() == [1.0, 3.0]


def test_absent_is_what_an_optional_component_counts():
    three = [sample(f"c.{i}", rewards={"local": 1.0}) for i in range(3)]
    four = [*three, sample("c.3", rewards={"local": 1.0, "bonus": 2.0})]
    np.testing.assert_array_equal(attribute(four, Attribution()), [np.nan, np.nan, np.nan, 3.0])
    assert lacking(four, Attribution()) == {("a", "bonus")}
    assert attribute(four, Attribution(absent=0.0)).tolist() == [1.0, 1.0, 1.0, 3.0]
    assert lacking(four, Attribution(absent=0.0)) == set()
    failed = [*four, sample("c.4")]  # a scorer that failed has given nothing at all
    assert np.isnan(attribute(failed, Attribution(absent=0.0))).tolist() == [False, False, False, False, True]


def test_a_component_of_weight_zero_is_never_missed():
    full = sample("c.0", rewards={"team": 1.0, "local": 1.0})
    late = sample("c.1", rewards={"local": 1.0})
    assert attribute([full, late], Attribution(team_weight=0.0)).tolist() == [1.0, 1.0]


def test_no_reward_at_all_is_not_zero():
    assert np.isnan(attribute([sample(outcome={"team": 1.0})], Attribution())).all()
    assert np.isnan(attribute([sample(rewards={"local": 1.0})], OUTCOME)).all()


def test_a_missing_later_reward_reaches_every_earlier_return():
    path = [
        sample("c0.0", turn=0, rewards={"local": 1.0}),
        sample("c1.0", turn=1, rewards={}),
        sample("c2.0", turn=2, rewards={"local": 1.0}),
    ]
    reward = attribute(path, Attribution(), to_go=1.0)
    np.testing.assert_array_equal(np.isnan(reward), [True, True, False])


def test_the_sum_over_roles_does_not_depend_on_other_rewards_that_were_asked_for():
    samples = [
        sample("c.0", rewards={"local": 1.0}, outcome={"team": 4.0}),
        sample("d.0", role="b", outcome={"team": 4.0}),
    ]
    step = Asked().replaced(to_go=True).step(samples)
    returns = step.rewards_to_go()
    step.rewards()  # without the outcome, no reward counts for role b
    assert returns.tolist() == [5.0, 4.0]
    assert step.sum_over_roles(returns).tolist() == [9.0, 9.0]


def test_nothing_gives_nothing():
    for to_go in (None, 1.0):
        assert attribute([], Attribution(outcome=True), to_go=to_go, scope="sum").shape == (0,)


def test_overlong_answers_lose_reward_as_in_dapo():
    """Limit 10, buffer 4: nothing up to 6 tokens, then a quarter for each, all for an answer that was cut."""
    lengths = [Length(6, 10, False), Length(7, 10, False), Length(8, 10, False), Length(10, 10, False)]
    lengths += [Length(3, 10, True), Length(9, None, False)]
    fields = [dict(zip(("tokens", "limit", "truncated"), length, strict=True)) for length in lengths]
    candidates = [
        msgspec.structs.replace(sample(f"c.{i}", rewards={"local": 1.0}), **more) for i, more in enumerate(fields)
    ]
    shaped = Attribution(overlong_buffer=4, overlong_penalty=2.0)
    assert overlong_penalties(candidates, shaped).tolist() == [0.0, 0.5, 1.0, 2.0, 2.0, 0.0]
    assert attribute(candidates, shaped).tolist() == [1.0, 0.5, 0.0, -1.0, -1.0, 1.0]
    assert attribute_siblings([c.rewards for c in candidates], "a", shaped, lengths).tolist() == [
        1.0,
        0.5,
        0.0,
        -1.0,
        -1.0,
        1.0,
    ]
    assert attribute(candidates, Attribution(overlong_penalty=2.0)).tolist() == [1.0, 1.0, 1.0, 1.0, -1.0, 1.0]
    assert attribute(candidates, Attribution()).tolist() == [1.0] * 6


def test_a_timed_out_call_lowers_the_outcome_of_its_episode():
    fine, late = sample("c.0", rollout="e", outcome={"team": 1.0}), sample("d.0", rollout="f", outcome={"team": 1.0})
    late = msgspec.structs.replace(late, timed_out=True)
    assert attribute([fine, late], Attribution(own=False, outcome=True, timeout_penalty=0.25)).tolist() == [1.0, 0.75]
    assert attribute([fine, late], OUTCOME).tolist() == [1.0, 1.0]
