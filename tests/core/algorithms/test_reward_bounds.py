"""Bounds of the reward of an evaluation, from the bounds that scorers declare and the recipe's weights."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.goal import Goal, goal_of, rewards_by_goal
from cotune.algorithms.reward_bounds import reward_bounds
from tests.core.algorithms.test_goal import FAILED, played

EPISODES = [
    played(0, {"team": 1.0}, ("coder", {"local": 4.0}), ("user", {"local": -1.0})),
    played(1, {"team": 0.0}, ("coder", {"local": 2.0}), ("user", {"local": 0.0})),
]
DECLARED = {"coder": (0.0, 10.0), "user": (-1.0, 0.0)}


def bounds(
    name: str = "at_grpo",
    episodes: Any = EPISODES,
    declared: Any = DECLARED,
    on_failure: str = "lowest",
    roles: Any = None,
    **settings: Any,
) -> tuple[float, float] | None:
    goal = replace(goal_of(recipe(name, **settings), on_failure, roles), bounds=declared)
    return reward_bounds(episodes, goal)


def test_the_reward_of_roles_lies_within_the_bounds_of_all() -> None:
    assert bounds() == (-1.0, 10.0)
    assert bounds(roles=["user"]) == (-1.0, 0.0)
    assert bounds(roles=["coder"]) == (0.0, 10.0)


def test_weights_stretch_and_turn_bounds() -> None:
    assert bounds(roles=["coder"], weights={"local": -0.5}) == (-5.0, 0.0)


def test_components_add_up() -> None:
    two = [played(0, {}, ("coder", {"local": 4.0, "style": 1.0})), played(1, {}, ("coder", {"local": 1.0}))]
    assert bounds(episodes=two) == (0.0, 20.0)
    above = {"coder": (1.0, 10.0)}
    assert bounds(episodes=two, declared=above) == (1.0, 20.0), "style is missing in one answer and adds nothing there"


def test_outcomes_count_as_shares_and_failures_as_they_do_in_training() -> None:
    goal = replace(goal_of(recipe("at_grpo", plan="independent"), "lowest"), bounds={"coder": (1.0, 10.0)})
    alone = [played(0, {"team": 1.0}, ("coder", {"local": 4.0})), played(1, {"team": 0.5}, ("coder", {"local": 1.0}))]
    failed = [*alone, played(2, {}, ("coder", {"local": 1.0}), **FAILED), played(3, {}, **FAILED)]
    for on_failure, expected in (("lowest", (0.0, 11.0)), ("exclude", (1.0, 11.0)), (-2.0, (-2.0, 11.0))):
        now: Goal = replace(goal, on_failure=on_failure)
        found = reward_bounds(failed if on_failure != "exclude" else alone, now)
        assert found == expected
        for reward in rewards_by_goal(failed, now).reward:
            assert reward is None or found[0] <= reward <= found[1]
    unlimited = [played(0, {"team": 7.0}, ("coder", {"local": 4.0}))]
    assert reward_bounds(unlimited, goal) is None, "nobody says how large an outcome can be"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"declared": {}}, "no scorer declares bounds"),
        ({"declared": {"user": (-1.0, 0.0)}}, "the coder's scorer declares none, and gives more than 1"),
        ({"declared": {"coder": (0.0, 3.0), "user": (-1.0, 0.0)}}, "feedback gave more than the scorer may"),
        ({"name": "afm_rl"}, "gates multiply"),
        ({"overlong_penalty": 1.0, "overlong_buffer": 2}, "penalties are taken from the reward"),
        ({"name": "magrpo"}, "the rewards of turns add up"),
    ],
)
def test_otherwise_no_bounds_are_known(changes: dict[str, Any], why: str) -> None:
    assert bounds(**changes) is None, why
