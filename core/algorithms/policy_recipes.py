"""The recipe of each policy: the run's, or one of its own. Policies with the same recipe are compared and weighed
together, other policies by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from cotune.algorithms.collect import Collected
from cotune.algorithms.groups import Group
from cotune.algorithms.method import Method
from cotune.algorithms.own import rewards_of
from cotune.algorithms.prepare import Prepared, Reached, RoleStats, StepContext, prepare
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Floats, Sample
from cotune.algorithms.step import AdvantageState
from cotune.errors import ConfigError


def by_equal(recipes: Iterable[tuple[Method, str]]) -> list[tuple[Method, list[str]]]:
    """Join pairs of a recipe and a name that have equal recipes: each different recipe with all of its names.

    The recipes are in order of first appearance. A pair with an empty name adds its recipe, but no name.
    """
    # No dictionary: a user's class may be comparable without being hashable.
    different: list[Method] = []
    names: list[list[str]] = []
    for recipe, name in recipes:
        if recipe not in different:
            different.append(recipe)
            names.append([])
        if name:
            names[different.index(recipe)].append(name)
    return list(zip(different, names, strict=True))


class RecipePart(NamedTuple):
    """The samples of a step that one recipe trains."""

    name: str
    """The names of the policies that name the recipe, joined by "+"; "" for the run's recipe."""
    recipe: Method
    indices: list[int]
    """The indices of the samples in the step."""


class Recipes(msgspec.Struct, frozen=True, kw_only=True):
    """The recipe of each policy: `own` has the policies with a recipe of their own, and `run` is the recipe of all
    others. `roles` has the policy of each role that a [[policy]] table names."""

    run: Method
    own: Mapping[str, Method] = {}
    roles: Mapping[str, str] = {}

    def of(self, policy: str) -> Method:
        """The recipe that a policy is trained by."""
        return self.own.get(policy, self.run)

    def of_role(self, role: str) -> Method:
        """The recipe of the policy that plays a role according to the configuration."""
        return self.of(self.roles.get(role, ""))

    @property
    def every(self) -> list[Method]:
        """Each different recipe once, the run's first."""
        return [recipe for recipe, _ in self.parts]

    @property
    def names(self) -> str:
        """The names of the recipes as text: `recipe at_grpo, dr_mas for writer`, with the policies that do not use the
        run's recipe."""
        (of_run, _), *others = self.parts
        texts = [f"recipe {of_run.name}"]
        texts += [f"{recipe.name} for {', '.join(policies)}" for recipe, policies in others]
        return ", ".join(texts)

    @property
    def joins_calls(self) -> bool:
        """Whether any recipe adds rewards of other calls of the episode to the reward of a candidate."""
        return any(recipe.joins_calls for recipe in (self.run, *self.own.values()))

    def attributions(self, players: Mapping[str, str]) -> dict[str, Attribution]:
        """The attribution of each role whose policy has a recipe of its own. `players` are the policies by role."""
        return {role: self.own[name].attribution for role, name in players.items() if name in self.own}

    def by_recipe(self, roles: Iterable[str]) -> list[tuple[Method, list[str]]]:
        """The different recipes of `roles`, each with its roles."""
        return by_equal((self.of_role(role), role) for role in roles)

    def trainable_roles(self, roles_with_scorer: Iterable[str]) -> list[str] | None:
        """The roles that can be trained; None if all can.

        Under a tree plan, candidates are compared by the rewards of their role's scorer. Only a role whose policy
        learns from a teacher can do without one.
        """
        if self.run.plan != "tree" or not any(recipe.takes_rewards for recipe in self.every):
            return None
        taught_roles = [role for role in self.roles if not self.of_role(role).takes_rewards]
        return list(dict.fromkeys([*roles_with_scorer, *taught_roles]))

    @property
    def parts(self) -> list[tuple[Method, list[str]]]:
        """Each recipe with the policies that name it, the run's first. Policies that name none have the run's."""
        named = [(recipe, policy) for policy, recipe in self.own.items()]
        return by_equal([(self.run, ""), *named])

    def split(self, samples: Sequence[Sample]) -> list[RecipePart]:
        """Divide the samples by the recipe that trains them: a part for each recipe, also without samples."""
        (run_recipe, run_policies), *other_recipes = self.parts
        run_part = RecipePart("", run_recipe, [])
        parts = [run_part]
        part_of_policy = dict.fromkeys(run_policies, run_part)
        for recipe, policies in other_recipes:
            part = RecipePart("+".join(policies), recipe, [])
            parts.append(part)
            part_of_policy |= dict.fromkeys(policies, part)

        for i, sample in enumerate(samples):
            # The run's recipe also trains the policies that no [[policy]] table names.
            part_of_policy.get(sample.policy.name, run_part).indices.append(i)
        return parts


def check_together(recipes: Recipes) -> None:
    """Raise ConfigError for a recipe that needs the advantages of all roles while other roles have another recipe."""
    if len(recipes.every) == 1:
        return
    for recipe, policies in recipes.parts:
        if recipe.needs_all_roles:
            owner = f"of policy {', '.join(policies)} " if policies else ""
            fault = f"{owner}needs the advantages of the other roles, whose policies have another recipe"
            remedy = "Use it for all policies: set only the run's `recipe`, and none in [[policy]] tables."
            raise ConfigError("policy.recipe", recipe.name, fault, remedy)


def attributed_each(collected: Collected, recipes: Recipes) -> Floats:
    """The reward of each collected sample by the recipe of its policy, [n]; NaN if it is unknown."""
    rewards = np.full(len(collected.samples), np.nan)
    for _, recipe, indices in recipes.split(collected.samples):
        samples = [collected.samples[i] for i in indices]
        # Some recipes add the rewards of an episode's other answers to the reward of a sample. So these answers are
        # part of the step, after the samples, although their rewards are not among the result.
        other_answers = _other_answers(collected.samples, samples, recipe, collected.others)
        rewards_with_others = rewards_of(recipe, recipe.step([*samples, *other_answers]))
        rewards[indices] = rewards_with_others[: len(samples)]
    return rewards


def prepare_each(
    samples: Sequence[Sample],
    recipes: Recipes,
    state: AdvantageState | None = None,
    *,
    context: StepContext | None = None,
    others: Sequence[Sample] = (),
) -> Prepared:
    """Call `prepare` once for each recipe, with the samples of the policies that have it, and join the results.

    Each policy gets the advantages that it would get if the run trained only the policies with its recipe.
    """
    parts: list[Prepared] = []
    state = state or AdvantageState()
    for part_name, recipe, indices in recipes.split(samples):
        is_run_recipe = part_name == ""
        # Recipes without samples are skipped, but not the run's: a step without any sample needs one result, too.
        if not indices and not is_run_recipe:
            continue
        samples_of_recipe = [samples[i] for i in indices]
        other_answers = _other_answers(samples, samples_of_recipe, recipe, others)
        prepared = prepare(samples_of_recipe, recipe, state, context=context, others=other_answers, part=part_name)
        parts.append(prepared)
        state = prepared.state
    return parts[0] if len(parts) == 1 else _join_parts(parts)


def _join_parts(parts: Sequence[Prepared]) -> Prepared:
    """Join the results of `prepare` for the parts of one step."""
    samples: list[Sample] = []
    trained: list[Sample] = []
    groups: list[Group] = []
    left_out: Counter[str] = Counter()
    roles: dict[str, RoleStats] = {}
    reached: dict[str, Reached] = {}
    warnings: dict[str, None] = {}  # a dictionary, so that each warning occurs once and in order
    rewards = 0.0
    rewarded = 0
    for part in parts:
        samples += part.samples
        trained += part.trained
        groups += part.groups
        left_out += Counter(part.left_out)
        roles |= part.roles
        reached |= part.reached
        warnings |= dict.fromkeys(part.warnings)
        if part.reward is not None:
            # Parts are weighted by their candidates, so that the mean is over candidates and not over recipes.
            rewards += part.reward * part.rewarded
        rewarded += part.rewarded
    return Prepared(
        samples=tuple(samples),
        advantages=np.concatenate([part.advantages for part in parts]),
        trained=tuple(trained),
        groups=tuple(groups),
        left_out=dict(left_out),
        roles=roles,
        reward=rewards / rewarded if rewarded else None,
        rewarded=rewarded,
        reached=reached,
        warnings=tuple(warnings),
        state=parts[-1].state,
    )


def _other_answers(
    samples: Sequence[Sample],
    samples_of_recipe: Sequence[Sample],
    recipe: Method,
    untrained_answers: Sequence[Sample],
) -> Sequence[Sample]:
    """The answers of other calls of an episode, if the recipe adds their rewards to the rewards of its samples.

    They are the chosen answers among the samples of other recipes, and `untrained_answers` (`Collected.others`).
    """
    if not recipe.joins_calls:
        return ()
    if len(samples_of_recipe) == len(samples):  # no other recipe has samples
        return untrained_answers
    ids = {sample.id for sample in samples_of_recipe}
    episodes = {sample.rollout for sample in samples_of_recipe}
    answers_of_other_recipes = [sample for sample in samples if sample.chosen and sample.id not in ids]
    return [answer for answer in [*untrained_answers, *answers_of_other_recipes] if answer.rollout in episodes]
