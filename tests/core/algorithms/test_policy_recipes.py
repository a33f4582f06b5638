"""Recipes by policy: each policy is compared and weighed as in a run that trains it alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.goal import goal_of, goal_of_policies, rewards_by_goal
from cotune.algorithms.policy_recipes import Recipes, check_together, prepare_each
from cotune.algorithms.prepare import StepContext, prepare
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.run_recipe import policy_recipes
from cotune.algorithms.samples import Sample
from cotune.config.methods import LossSettings
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.records.structs import PolicyRef
from tests.core.algorithms.small_methods import AverageOfRoles
from tests.core.algorithms.test_goal import played
from tests.core.algorithms.test_prepare import sample

DR_MAS, RLOO = recipe("dr_mas"), recipe("rloo")


def of_role(role: str, rewards: list[float], **fields: Any) -> list[Sample]:
    """One call of the role in each of so many episodes of one task."""
    return [
        sample(f"{role}{i}.0", team=x, rollout=f"e{i}", role=role, policy=PolicyRef(role, 1), **fields)
        for i, x in enumerate(rewards)
    ]


def by_id(prepared: Any) -> dict[str, float]:
    return {one.id: value for one, value in zip(prepared.samples, prepared.advantages.tolist(), strict=True)}


def test_each_policy_has_the_advantages_of_a_run_that_trains_it_alone() -> None:
    """a by dr_mas: (r - 1) / std of (0, 1, 2); b by rloo: r - the mean of the two others."""
    a, b = of_role("a", [0.0, 1.0, 2.0]), of_role("b", [0.0, 0.0, 3.0])
    found = prepare_each([*a, *b], Recipes(run=DR_MAS, own={"b": RLOO}))
    deviation = np.sqrt(2 / 3)
    wanted = {"a0.0": -1 / deviation, "a1.0": 0.0, "a2.0": 1 / deviation, "b0.0": -1.5, "b1.0": -1.5, "b2.0": 3.0}
    assert by_id(found) == pytest.approx(wanted, abs=1e-5)
    alone = [prepare(a, DR_MAS), prepare(b, RLOO)]
    assert by_id(found) == {**by_id(alone[0]), **by_id(alone[1])}
    assert found.reward == 1.0 and found.rewarded == 6 and set(found.roles) == {"a", "b"}
    assert found.roles["a"] == alone[0].roles["a"] and found.left_out == {"zero_advantage": 1}
    assert len({group.id for group in found.groups}) == 2


class AverageOfTasks(AverageOfRoles):
    group_by = ("task",)
    decay = 0.95


class FasterAverage(AverageOfTasks):
    decay = 0.5


def test_policies_of_one_recipe_stay_together_and_others_have_groups_of_their_own() -> None:
    """grpo compares all roles of a task; the ids of groups and moving averages never meet across recipes."""
    grpo, dapo = recipe("grpo"), recipe("dapo")
    every = [*of_role("a", [0.0, 1.0]), *of_role("b", [0.0, 1.0]), *of_role("c", [0.0, 1.0])]
    found = prepare_each(every, Recipes(run=grpo, own={"b": grpo, "c": dapo}))
    assert [{one.role for one in group.samples} for group in found.groups] == [{"a", "b"}, {"c"}]
    assert len({group.id for group in found.groups}) == 2
    spiral = [AverageOfTasks(), FasterAverage()]
    state = prepare_each(every, Recipes(run=spiral[0], own={"c": spiral[1]})).state
    assert state.ema == {"q": pytest.approx(0.05 * 0.5), "c q": pytest.approx(0.5 * 0.5)}


def test_a_frozen_policy_is_compared_and_not_trained_on() -> None:
    a, b = of_role("a", [0.0, 1.0, 2.0]), of_role("b", [0.0, 0.0, 3.0])
    chosen = recipe("rloo").replaced(group_by=("task", "role"))
    found = prepare_each([*a, *b], Recipes(run=chosen), context=StepContext(frozen=["b"]))
    assert {one.role for one in found.samples} == {"a"} and found.left_out == {"frozen_step": 3, "zero_advantage": 1}
    assert found.roles["b"].kept == 0 and found.roles["b"].reward == 1.0, "its figures are still told"
    assert {one.role for group in found.groups for one in group.samples} == {"a"}, "its groups are not used up"
    with_kl = prepare_each([*a, *b], Recipes(run=recipe("dr_mas", kl=0.1)), context=StepContext(frozen=["b"]))
    assert {one.role for one in with_kl.samples} == {"a"} and with_kl.left_out == {"frozen_step": 3}


def test_a_recipe_that_joins_calls_takes_the_rewards_of_other_policies_in() -> None:
    """magrpo sums up what all roles of a turn earn, whoever is trained by it."""
    own = {"e0": 1.0, "e1": 3.0}
    a = [sample(f"a{e}.0", r, rollout=e, role="a", policy=PolicyRef("a", 1)) for e, r in own.items()]
    b = [sample(f"b{e}.0", 10 * r, rollout=e, role="b", policy=PolicyRef("b", 1)) for e, r in own.items()]
    mixed = prepare_each(
        [*a, *b], Recipes(run=recipe("dr_mas").replaced(attribution=Attribution()), own={"a": recipe("magrpo")})
    )
    alone = prepare(a, recipe("magrpo"), others=b)
    assert [by_id(mixed)[one.id] for one in a] == [by_id(alone)[one.id] for one in a] == [-5.5, 5.5]


def test_the_configuration_names_what_does_not_fit() -> None:
    def resolved(plan: Any, **table: Any) -> Recipes:
        config = TrainConfig(policy=(PolicyConfig(name="p", roles=("a",), **table),), loss=LossSettings(clip_high=0.3))
        return policy_recipes(config, plan)

    found = resolved("tree", loss=LossSettings(entropy=0.1))
    assert (found.of("p").loss.clip_high, found.of_role("a").loss.entropy, found.run.loss.entropy) == (0.3, 0.1, 0.0)
    assert resolved("tree", recipe="dapo").of("p").loss.clip_high == 0.28, "the run's [loss] is for its recipe"
    assert found.names == "recipe at_grpo, at_grpo for p"
    with pytest.raises(ConfigError, match=r"policy.recipe = 'grpo' of policy p cannot be used here: plan = 'tree'"):
        resolved("tree", recipe="grpo")
    with pytest.raises(ConfigError, match=r"policy.recipe = 'c3' of policy p cannot be used here: plan.kind = 'ind"):
        resolved("independent", recipe="c3")
    with pytest.raises(ConfigError, match=r"policy.loss.clip_low = 3.0 of policy p must be between 0 and 1"):
        resolved("independent", loss=LossSettings(clip_low=3.0))
    with pytest.raises(ConfigError, match=r"policy.recipe = 'advantage_alignment' of policy p needs the advantages"):
        check_together(resolved("independent", recipe="advantage_alignment"))


def test_a_policy_that_learns_from_a_teacher_needs_no_scorer_under_a_tree() -> None:
    distill = recipe("distill", plan="tree")
    recipes = Recipes(run=recipe("at_grpo"), own={"p": distill}, roles={"planner": "p"})
    assert recipes.trainable_roles(["coder"]) == ["coder", "planner"]
    assert Recipes(run=DR_MAS).trainable_roles([]) is None
    tables = (
        PolicyConfig(name="p", roles=("planner",)),
        PolicyConfig(name="c", roles=("coder", "x"), recipe="at_grpo"),
    )
    reverse = policy_recipes(TrainConfig(recipe="distill", policy=tables), "tree")
    expected = ["coder", "planner"]
    assert reverse.trainable_roles(["coder"]) == expected, "a role that learns from rewards needs its scorer"
    assert policy_recipes(TrainConfig(recipe="distill", policy=tables[:1]), "tree").trainable_roles([]) is None
    lone = [sample("c.0", role="planner", policy=PolicyRef("p", 1))]
    assert [one.id for one in prepare_each(lone, recipes).samples] == ["c.0"]


def test_each_role_is_judged_by_what_its_policy_is_trained_on() -> None:
    weighed = recipe("dr_mas", weights={"correct": 2.0})
    recipes = Recipes(run=weighed, own={"b": recipe("dr_mas", weights={"short": 1.0})})
    episodes = [
        played(0, {"correct": 1.0, "short": 0.5}, ("a", {}), ("b", {})),
        played(1, {"correct": 0.0, "short": 1.0}, ("a", {}), ("b", {})),
        played(2, {}, ("b", {}), status="error", error="boom", blame="policy"),
    ]
    goal = goal_of_policies(recipes, "lowest", {"a": "a", "b": "b"})
    found = rewards_by_goal(episodes, goal)
    assert found.by_role == [{"a": 2.0, "b": 0.5}, {"a": 0.0, "b": 1.0}, {"b": 0.0}]
    assert found.reward == [1.25, 0.5, 0.0] and found.failed == [False, False, True] and found.floor == 0.0
    assert rewards_by_goal(episodes, goal.of_role("b")).reward == [0.5, 1.0, 0.0]
    assert goal_of_policies(Recipes(run=weighed), "lowest", {"a": "a"}) == goal_of(weighed, "lowest", ["a"])


def test_a_role_with_a_teacher_is_judged_by_the_rewards_of_the_others() -> None:
    """Minutes cost reward. A plain sum would count them as a gain of the writer."""
    weights = {"correct": 1.0, "minutes": -0.5}
    recipes = Recipes(run=recipe("dr_mas", weights=weights), own={"w": recipe("self_distill", weights=weights)})
    episodes = [
        played(0, {"correct": 0.0, "minutes": 6.0}, ("solver", {}), ("writer", {})),
        played(1, {"correct": 1.0, "minutes": 2.0}, ("solver", {}), ("writer", {})),
        played(2, {}, ("writer", {}), status="error", error="boom", blame="infrastructure"),
    ]
    goal = goal_of_policies(recipes, "lowest", {"solver": "s", "writer": "w"})
    found = rewards_by_goal(episodes, goal)
    assert found.by_role == [{"solver": -3.0, "writer": -3.0}, {"solver": 0.0, "writer": 0.0}, {}]
    assert found.reward == [-3.0, 0.0, None]
    assert rewards_by_goal(episodes, goal.of_role("writer")) == found


def test_a_role_with_a_teacher_beside_two_recipes_counts_their_mean() -> None:
    own = {"b": recipe("dr_mas", weights={"short": 1.0}), "w": recipe("self_distill")}
    recipes = Recipes(run=recipe("dr_mas", weights={"correct": 2.0}), own=own)
    episode = played(0, {"correct": 1.0, "short": 0.5}, ("a", {}), ("b", {}), ("writer", {}))
    goal = goal_of_policies(recipes, "lowest", {"writer": "w", "a": "a", "b": "b"})
    found = rewards_by_goal([episode], goal)
    assert found.by_role == [{"a": 2.0, "b": 0.5, "writer": 1.25}] and found.reward == [1.25]


@pytest.mark.parametrize(("settings", "reward"), [({"weights": {"correct": 1.0, "minutes": -0.5}}, -2.0), ({}, 7.0)])
def test_without_a_policy_that_learns_from_rewards_the_weights_of_the_run_count(settings: Any, reward: float) -> None:
    recipes = Recipes(run=recipe("distill", **settings), own={"w": recipe("self_distill")})
    goal = goal_of_policies(recipes, "lowest", {"solver": "s", "writer": "w"})
    episode = played(0, {"correct": 1.0, "minutes": 6.0}, ("solver", {}), ("writer", {}))
    assert rewards_by_goal([episode], goal).reward == [reward]


def test_players_of_one_game_are_opposed_also_if_their_recipes_differ_in_a_setting() -> None:
    recipes = Recipes(run=recipe("marshal"), own={"w": recipe("marshal", clip_high=0.3)})
    goal = goal_of_policies(recipes, "lowest", {"white": "w", "black": "b"})
    episodes = [
        played(i, {"white": won, "black": -won}, ("white", {}), ("black", {})) for i, won in enumerate([1.0, -1.0] * 4)
    ]
    assert sorted(rewards_by_goal(episodes, goal).opposed) == ["black", "white"]
    shared = [played(i, {"team": float(i)}, ("white", {}), ("black", {})) for i in range(8)]
    assert rewards_by_goal(shared, goal).opposed == ()
