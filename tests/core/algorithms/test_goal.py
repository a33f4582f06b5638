"""What episodes of an evaluation are worth: as the recipe mixes their rewards, failed ones as `on_failure` says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.goal import Goal, Played, goal_of, rewards_by_goal
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Sample
from cotune.records.structs import Episode, PolicyRef, Task
from tests.core.algorithms.small_methods import ReturnsOfSiblings


def played(number: int, outcome: Mapping[str, float], *calls: tuple[str, Mapping[str, float]], **ended: Any) -> Played:
    """An episode of its own task, with calls of these roles and the rewards that their scorers gave."""
    id, turns = f"e{number}", dict.fromkeys((role for role, _ in calls), 0)
    samples = []
    for step, (role, rewards) in enumerate(calls):
        samples.append(
            Sample(
                id=f"{id}-{step}.0", task="", rollout=id, role=role, turn=turns[role], step=step, branch=f"{id}-{step}",
                prompt="p", policy=PolicyRef(role, 1), tokens=3, rewards=rewards,
            )
        )  # fmt: skip
        turns[role] += 1
    episode = Episode(id=id, task=Task(id=f"t{number}", input=number), workflow="w", phase="eval", **ended)
    return Played(episode=episode, outcome=outcome, samples=samples)


FAILED = {"status": "error", "error": "boom", "blame": "policy"}
WRITER = ("writer", {})


def test_without_a_recipe_the_outcome_is_summed() -> None:
    found = rewards_by_goal(
        [played(0, {"a": 1.0, "b": -0.5}, WRITER), played(1, {"a": 0.25}, WRITER), played(2, {})], Goal()
    )
    assert found.reward == [0.5, 0.25, None]


def test_the_reward_is_the_recipes_mix() -> None:
    weights = {"correct": 1.0, "minutes": -0.5, "reviewer/minutes": 0.0}
    mix = Attribution(own=False, outcome=True, weights=weights, other=0.0, gates=("format",))
    chosen = recipe("dr_mas").replaced(attribution=mix)
    episodes = [
        played(0, {"correct": 1.0, "minutes": 3.0, "format": 1.0}, WRITER, ("reviewer", {})),
        played(1, {"correct": 1.0, "minutes": 1.0, "format": 0.0}, WRITER),
    ]
    found = rewards_by_goal(episodes, goal_of(chosen, "lowest"))
    assert found.by_role == [{"writer": -0.5, "reviewer": 1.0}, {"writer": 0.0}]
    assert found.reward == [0.25, 0.0]
    alone = rewards_by_goal(episodes, goal_of(chosen, "lowest", ["reviewer"]))
    assert alone.reward == [1.0, None], "of the trained roles"


def test_scorers_and_alpha_under_a_tree_plan() -> None:
    chosen = recipe("at_grpo", team_weight=0.5)
    calls = [("coder", {"team": 1.0, "local": 0.25}), ("coder", {"team": 0.0, "local": 0.75}), ("user", {})]
    assert rewards_by_goal([played(0, {"team": 9.0}, *calls)], goal_of(chosen, "lowest")).by_role == [{"coder": 0.75}]


def test_rewards_to_go_are_the_whole_return() -> None:
    chosen = ReturnsOfSiblings().replaced(gamma=0.5)
    calls = [("coder", {"local": 1.0}), ("coder", {"local": 2.0})]
    assert rewards_by_goal([played(0, {"team": 4.0}, *calls)], goal_of(chosen, "lowest")).reward == [
        1.0 + 0.5 * (2.0 + 4.0)
    ]


@pytest.mark.parametrize(
    ("on_failure", "expected"),
    [("lowest", -2.0), ("reward:-3", -3.0), ("reward:0.5", 0.5), ("exclude", None)],
)
def test_a_failed_episode_counts_as_on_failure_says(on_failure: str, expected: float | None) -> None:
    episodes = [
        played(0, {"team": 1.0}, WRITER),
        played(1, {"team": -2.0}, WRITER),
        played(2, {}, WRITER, **FAILED),
        played(3, {}, **FAILED),  # before its first call
        played(4, {}, WRITER, status="error", error="engine", blame="infrastructure"),
        played(5, {}, WRITER, status="cancelled"),
    ]
    for goal in (goal_of(None, on_failure), goal_of(recipe("dr_mas"), on_failure)):
        assert rewards_by_goal(episodes, goal).reward == [1.0, -2.0, expected, expected, None, None]


def test_the_lowest_is_of_the_mixed_reward() -> None:
    """With a negative weight the lowest of a component may be the best of all: crashing is never that."""
    chosen = recipe("dr_mas", weights={"correct": 1.0, "minutes": -0.5})
    episodes = [
        played(0, {"correct": 1.0, "minutes": 1.0}, WRITER),
        played(1, {"correct": 0.0, "minutes": 4.0}, WRITER),
        played(2, {}, WRITER, **FAILED),
    ]
    found = rewards_by_goal(episodes, goal_of(chosen, "lowest"))
    assert (found.reward, found.failed, found.floor) == ([0.5, -2.0, -2.0], [False, False, True], -2.0)


def test_a_failed_episode_with_an_outcome_of_its_own_counts_it() -> None:
    """A failure stands for an outcome that is missing; the lowest is of the episodes that ended well."""
    shown = {"weights": {"correct": 1.0, "minutes": -0.5, "reviewer/correct": 0.0, "reviewer/minutes": 0.0}}
    for goal in (Goal(), goal_of(recipe("dr_mas", **shown), "lowest"), goal_of(recipe("grpo"), "lowest")):
        episodes = [
            played(0, {"correct": -2.0}, WRITER, ("reviewer", {})),
            played(1, {"correct": 0.5}, WRITER, ("reviewer", {}), **FAILED),
            played(2, {"correct": -9.0}, **FAILED),
            played(3, {}, WRITER, **FAILED),
        ]
        found = rewards_by_goal(episodes, goal)
        assert found.reward == [-2.0, 0.5, -9.0, -2.0] and found.failed == [False, False, False, True]
    excluded = rewards_by_goal(episodes, Goal(on_failure="exclude"))
    assert excluded.reward == [-2.0, None, None, None]


def test_where_all_failed_each_counts_nothing_gained() -> None:
    chosen = recipe("dr_mas", weights={"correct": 1.0})
    assert rewards_by_goal([played(0, {}, WRITER, **FAILED)], goal_of(chosen, "lowest")).reward == [0.0]


def game(number: int, white: float, black: float) -> Played:
    return played(number, {"white": white, "black": black}, ("white", {}), ("black", {}))


def test_one_gains_what_the_other_loses() -> None:
    spiral = goal_of(recipe("spiral"), "lowest")
    assert rewards_by_goal([game(0, 1, -1), game(1, -1, 1), game(2, 0, 0)], spiral).opposed == ("black", "white")
    halves = [game(0, 0.5, 0.5), *(game(n, n % 2, 1 - n % 2) for n in range(1, 6))]
    assert rewards_by_goal(halves, spiral).opposed == ("black", "white"), "a constant sum"
    assert rewards_by_goal(halves[:5], spiral).opposed == (), "which may be chance"
    assert rewards_by_goal([game(0, 1, -1)], spiral).opposed == ("black", "white")
    assert rewards_by_goal([game(n, 1, 1) for n in range(6)], spiral).opposed == (), "both win"
    assert rewards_by_goal([game(n, 0, 0) for n in range(6)], spiral).opposed == (), "nobody does yet"
    assert rewards_by_goal([game(0, 1, -1), game(1, 1, 0.5)], spiral).opposed == ()
    one = goal_of(recipe("spiral"), "lowest", ["white"])
    assert rewards_by_goal([game(0, 1, -1), game(1, -1, 1)], one).opposed == (), "the other is not trained"
    weights = {"attacker/broke": 1.0, "defender/broke": -1.0}
    duel = [played(n, {"broke": float(n)}, ("attacker", {}), ("defender", {})) for n in range(2)]
    assert rewards_by_goal(duel, goal_of(recipe("dr_mas", weights=weights), "lowest")).opposed == (
        "attacker",
        "defender",
    )
    assert rewards_by_goal(duel, goal_of(recipe("dr_mas"), "lowest")).opposed == (), "they share it"


def test_a_game_that_a_seat_fails_counts_for_that_seat() -> None:
    spiral = goal_of(recipe("spiral"), "lowest")
    good = [game(0, 1, -1), game(1, -1, 1)]
    failed = played(2, {}, ("white", {}), ("black", {}), **FAILED)
    found = rewards_by_goal([*good, msgspec.structs.replace(failed, last="black")], spiral)
    assert found.by_role[2] == {"black": -1.0} and found.failed == [False, False, True]
    unanswered = msgspec.structs.replace(played(2, {}, ("white", {}), **FAILED), last="black")
    assert rewards_by_goal([*good, unanswered], spiral).by_role[2] == {"black": -1.0}
    shared = rewards_by_goal(
        [*good, msgspec.structs.replace(failed, last="black")], goal_of(recipe("dr_mas"), "lowest")
    )
    assert shared.by_role[2].keys() == {"white", "black"}, "a team fails together"
