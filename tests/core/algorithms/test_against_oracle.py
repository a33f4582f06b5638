"""Every recipe, and pairs of recipes in one run, against the frozen code in `oracle`, on random samples."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from cotune.algorithms import goal as product_goal
from cotune.algorithms.attribution import attribute_siblings
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.learning_signal import learns_from
from cotune.algorithms.policy_recipes import Recipes, prepare_each
from cotune.algorithms.prepare import StepContext
from cotune.algorithms.samples import Sample
from cotune.errors import CotuneError
from cotune.records.structs import Episode, PolicyRef, Task
from tests.core.algorithms.oracle import attribution as old_attribution
from tests.core.algorithms.oracle import catalogue as old_catalogue
from tests.core.algorithms.oracle import goal as old_goal
from tests.core.algorithms.oracle import learning_signal as old_learning_signal
from tests.core.algorithms.oracle import policy_recipes as old_policy_recipes

RELATIVE = 1e-12
NAMES = sorted(old_catalogue.RECIPES)
TEAMS = (("main", "sub"), ("white", "black"), ("coach", "player"), ("attacker", "defender", "referee"))
ANY_PLAN = ("at_grpo", "cispo", "dapo", "gspo", "distill", "self_distill")

# Settings of recipes that users can choose. They must mean the same for every recipe.
SETTINGS: tuple[Mapping[str, Any], ...] = (
    {"team_weight": 0.5},
    {"weights": {"team": 1.0, "local": 0.25, "main/local": 0.5}},
    {"absent": 0.0},
    {"overlong_penalty": 1.0, "overlong_buffer": 6},
    {"drop_truncated": True},
    {"kl": 0.1},
    {"entropy": 0.01},
)
FILTERS: tuple[Mapping[str, Any], ...] = ({"drop_timed_out": True}, {"mean_range": (0.2, 0.8)})


def random_samples(plan: str, seed: int) -> tuple[list[Sample], list[Sample]]:
    """Samples of a step, and the other answers of its episodes, under a plan."""
    rng = random.Random(seed)
    roles = TEAMS[seed % len(TEAMS)]
    whole_numbers = rng.random() < 0.5  # so that many groups have equal rewards
    rare = rng.choice([0.0, 0.0, 0.1])  # how often a reward is missing
    components = rng.sample(["local", "judge", "format", "correct"], rng.randint(1, 3))
    of_outcome = rng.sample(["team", "format", "correct", "exploration", "answer", *roles], rng.randint(1, 4))
    failing = rng.choice([0.0, 0.2, 1.0]) if rng.random() < 0.5 else 0.0
    failure: Any = rng.choice(["lowest", -0.5])

    def value() -> float:
        return float(rng.choice([0, 0, 1])) if whole_numbers else rng.gauss(0.2, 1.0)

    def rewards(names: list[str]) -> dict[str, float]:
        return {name: value() for name in names if rng.random() >= rare}

    samples: list[Sample] = []
    others: list[Sample] = []
    for task in range(rng.randint(1, 3)):
        for number in range(rng.randint(2, 4)):
            rollout = f"e{task}{number}"
            failed = rng.random() < failing
            ended = {} if failed and rng.random() < 0.7 else rewards(of_outcome)
            timed_out = rng.random() < 0.1
            for role in roles:
                for turn in range(rng.randint(0 if plan == "independent" else 1, 3)):
                    call = f"{rollout}{role}{turn}"
                    prompt = f"{task}{role}{rng.randint(0, 1)}"
                    branch, continues = prompt, False
                    if plan == "tree":
                        prompt, branch = call, rollout
                    elif plan == "replay":
                        # The first call of each role stands for the fork; later ones continue the branch.
                        continues = role != roles[task % len(roles)] or turn > 0
                        prompt, branch = (call, call) if continues else (f"fork{task}", f"fork{task}")
                    for index in range(3 if plan == "tree" else 1):
                        sample = Sample(
                            id=f"{call}.{index}",
                            task=f"t{task}",
                            rollout=rollout,
                            role=role,
                            turn=turn,
                            step=turn,
                            branch=branch,
                            prompt=prompt,
                            policy=PolicyRef(f"p{roles.index(role) % 2}", rng.randint(0, 1)),
                            tokens=rng.randint(1, 20),
                            observation=f"{task}{rng.randint(0, 2)}",
                            entropy=rng.random(),
                            rewards=rewards(components),
                            outcome=ended,
                            failure=failure if failed else None,
                            chosen=index == 0,
                            training_step=seed,
                            limit=rng.choice([None, 20]),
                            truncated=rng.random() < 0.1,
                            timed_out=timed_out,
                            continues=continues,
                        )
                        if plan == "independent" and rng.random() < 0.1:
                            others.append(sample)
                        else:
                            samples.append(sample)
    return samples, others


def plans_of(name: str) -> tuple[str, ...]:
    if name in ANY_PLAN:
        return ("tree", "independent", "replay")
    return (old_catalogue.RECIPES[name].plan,)


def outcome_of(prepare: Any, *arguments: Any, **options: Any) -> Any:
    """What a function returns, or its error."""
    try:
        return prepare(*arguments, **options)
    except CotuneError as error:
        return str(error)


def assert_near(found: Any, expected: Any) -> None:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert found.shape == expected.shape
    size = np.max(np.abs(expected[np.isfinite(expected)]), initial=0.0)
    np.testing.assert_allclose(found, expected, rtol=RELATIVE, atol=RELATIVE * size)


def assert_same(found: Any, expected: Any) -> None:
    """Two results of `prepare`, or two errors, are the same."""
    if isinstance(expected, str) or isinstance(found, str):
        assert found == expected
        return
    assert [s.id for s in found.samples] == [s.id for s in expected.samples]
    assert_near(found.advantages, expected.advantages)
    assert [s.id for s in found.trained] == [s.id for s in expected.trained]
    shown = [
        [(group.id, group.key, [s.id for s in group.samples]) for group in one.groups] for one in (found, expected)
    ]
    assert shown[0] == shown[1]
    assert found.left_out == expected.left_out
    assert found.reached == expected.reached and found.rewarded == expected.rewarded
    assert found.warnings == expected.warnings
    assert (found.reward is None) == (expected.reward is None)
    assert_near([found.reward or 0.0], [expected.reward or 0.0])
    assert found.roles.keys() == expected.roles.keys()
    for role, stats in found.roles.items():
        names = stats.__struct_fields__
        assert_near([getattr(stats, n) for n in names], [getattr(expected.roles[role], n) for n in names])
    assert len(found.state.ema) == len(expected.state.ema)
    assert_near(sorted(found.state.ema.values()), sorted(expected.state.ema.values()))


def step_context(options: Mapping[str, Any]) -> StepContext:
    """The arguments of the frozen code as those of the present one; `others` is an argument of its own."""
    return StepContext(**{name: value for name, value in options.items() if name != "others"})


def compare(new: Recipes, old: old_policy_recipes.Recipes, plan: str, seed: int) -> bool:
    """Compare two steps, the second with the state that the first left. Returns whether anything was trained."""
    state, old_state, trained = None, None, False
    for at in (seed, seed + 1000):
        samples, others = random_samples(plan, at)
        options: dict[str, Any] = {"others": others}
        options["frozen"] = {"p0"} if at % 7 == 0 else ()
        options["task_weights"] = {"t0": 0.5, "t1": 2.0} if at % 3 == 0 else None
        expected = outcome_of(old_policy_recipes.prepare_each, samples, old, old_state, **options)
        found = outcome_of(prepare_each, samples, new, state, context=step_context(options), others=others)
        assert_same(found, expected)
        if not isinstance(expected, str):
            state, old_state, trained = found.state, expected.state, trained or bool(expected.trained)
            if expected.groups:
                options["consumed"] = {expected.groups[0].id}
                again = outcome_of(old_policy_recipes.prepare_each, samples, old, **options)
                context = step_context(options)
                assert_same(outcome_of(prepare_each, samples, new, context=context, others=others), again)
    return trained


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_gives_the_advantages_of_the_frozen_code(name: str) -> None:
    trained = False
    for plan in plans_of(name):
        for seed in range(6):
            new, old = recipe(name, plan=plan), old_catalogue.recipe(name, plan=plan)
            trained |= compare(Recipes(run=new), old_policy_recipes.Recipes(run=old), plan, seed)
    assert trained, "the random samples train nothing"


@pytest.mark.parametrize("name", NAMES)
def test_settings_mean_the_same_as_in_the_frozen_code(name: str) -> None:
    for plan in plans_of(name):
        for seed, settings in enumerate(SETTINGS):
            new, old = recipe(name, plan=plan, **settings), old_catalogue.recipe(name, plan=plan, **settings)
            compare(Recipes(run=new), old_policy_recipes.Recipes(run=old), plan, seed)
            assert new.loss == old.loss or _fields(new.loss) == _fields(old.loss)


@pytest.mark.parametrize("name", NAMES)
def test_filters_of_a_method_mean_the_same_as_in_the_frozen_code(name: str) -> None:
    for plan in plans_of(name):
        for seed, settings in enumerate(FILTERS):
            new, old = recipe(name, plan=plan), old_catalogue.recipe(name, plan=plan, **settings)
            new = new.replaced(filters=msgspec.structs.replace(new.filters, **settings))
            compare(Recipes(run=new), old_policy_recipes.Recipes(run=old), plan, seed + len(SETTINGS))


def _fields(loss: Any) -> dict[str, Any]:
    """The fields of a loss. The frozen code has two for the bounds of its mask, and does not balance roles."""
    bounds = {"mask_low", "mask_high", "mask_range"}
    values = {name: getattr(loss, name) for name in loss.__struct_fields__ if name not in bounds}
    return {"balance": "none", **values, "mask_bounds": loss.mask_bounds}


@pytest.mark.parametrize("first", NAMES)
def test_two_recipes_in_one_run_give_the_advantages_of_the_frozen_code(first: str) -> None:
    rng = random.Random(first)
    (plan, *_) = plans_of(first)
    partners = [name for name in NAMES if plan in plans_of(name)]
    for seed in range(3):
        second = rng.choice(partners)
        new = Recipes(run=recipe(first, plan=plan), own={"p1": recipe(second, plan=plan)})
        old = old_policy_recipes.Recipes(
            run=old_catalogue.recipe(first, plan=plan), own={"p1": old_catalogue.recipe(second, plan=plan)}
        )
        compare(new, old, plan, seed)


def played(module: Any, seed: int) -> list[Any]:
    """Random episodes of an evaluation."""
    samples, _ = random_samples("independent", seed)
    by_episode: dict[str, list[Sample]] = {}
    for sample in samples:
        by_episode.setdefault(sample.rollout, []).append(sample)
    episodes = []
    for id, own in by_episode.items():
        failed = own[0].failure is not None
        status: Any = {"status": "error", "blame": "policy"} if failed else {"status": "ok"}
        episode = Episode(id=id, task=Task(id=own[0].task, input={}), workflow="w", phase="eval", started=0.0, **status)
        episodes.append(module.Played(episode=episode, outcome=own[0].outcome, samples=own, last=own[-1].role))
    return episodes


@pytest.mark.parametrize("name", NAMES)
def test_evaluations_count_what_they_counted_in_the_frozen_code(name: str) -> None:
    partner = NAMES[(NAMES.index(name) + 7) % len(NAMES)]
    plan = plans_of(name)[-1]
    together = partner if plan in plans_of(partner) else name
    for seed in range(4):
        players = {role: f"p{i % 2}" for i, role in enumerate(TEAMS[seed % len(TEAMS)])}
        new = Recipes(run=recipe(name, plan=plan), own={"p1": recipe(together, plan=plan)})
        old = old_policy_recipes.Recipes(
            run=old_catalogue.recipe(name, plan=plan), own={"p1": old_catalogue.recipe(together, plan=plan)}
        )
        for on_failure in ("lowest", "exclude"):
            goals = product_goal.goal_of_policies(new, on_failure, players)
            old_goals = old_goal.goal_of_policies(old, on_failure, players)
            found = product_goal.rewards_by_goal(played(product_goal, seed), goals)
            expected = old_goal.worth(played(old_goal, seed), old_goals)
            assert [x is None for x in found.reward] == [x is None for x in expected.reward]
            assert_near([x or 0.0 for x in found.reward], [x or 0.0 for x in expected.reward])
            assert [one.keys() for one in found.by_role] == [one.keys() for one in expected.by_role]
            for one, other in zip(found.by_role, expected.by_role, strict=True):
                assert_near([one[role] for role in one], [other[role] for role in one])
            assert (found.failed, found.opposed) == (expected.failed, expected.opposed)
            assert_near([found.floor], [expected.floor])


@pytest.mark.parametrize("name", NAMES)
def test_siblings_are_chosen_and_signals_named_as_in_the_frozen_code(name: str) -> None:
    for plan in plans_of(name):
        new, old = recipe(name, plan=plan), old_catalogue.recipe(name, plan=plan)
        own, outcome = {"main": ["local", "format"], "sub": []}, ["team", "main", "correct"]
        assert learns_from(own, outcome, new) == old_learning_signal.learns_from(own, outcome, old)
        facts = (
            new.takes_rewards,
            new.by_seat,
            new.joins_calls,
            new.group_by,
            new.plan,
            new.compares,
            new.filters.align_to,
        )
        assert facts == (
            old.takes_rewards,
            old.by_seat,
            old.joins_calls,
            old.key,
            old.plan,
            old.terms[0].compares,
            old.filters.align_to,
        )
        for seed in range(3):
            components = [dict(sample.rewards) for sample in random_samples("tree", seed)[0]]
            lengths = [old_attribution.Length(7, 10, False)] * len(components)
            assert_near(
                attribute_siblings(components, "main", new.attribution, lengths),
                old_attribution.attribute_siblings(components, "main", old.attribution, lengths),
            )
