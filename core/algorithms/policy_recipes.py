"""The recipe of each policy: the run's, or one of its own. Policies with the same recipe are compared and weighed
together, other policies by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

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

    def able(self, scorers: Iterable[str]) -> list[str] | None:
        """The roles that can be trained; None if all can.

        Under a tree plan a role needs a scorer, or a policy that takes no rewards. `scorers` are the roles that have a
        scorer.
        """
        if self.run.plan != "tree" or not any(recipe.takes_rewards for recipe in self.every):
            return None
        without_rewards = [role for role in self.roles if not self.of_role(role).takes_rewards]
        return list(dict.fromkeys([*scorers, *without_rewards]))

    @property
    def parts(self) -> list[tuple[Method, list[str]]]:
        """Each recipe with the policies that name it, the run's first. Policies that name none have the run's."""
        named = [(recipe, policy) for policy, recipe in self.own.items()]
        return by_equal([(self.run, ""), *named])

    def split(self, samples: Sequence[Sample]) -> list[tuple[str, Method, list[int]]]:
        """Divide the samples by the recipe that trains them.

        Returns for each recipe the names of its policies, joined by "+" ("" for the run's recipe), the recipe, and the
        indices of its samples.
        """
        # The first part has the run's recipe, which also trains the policies that no [[policy]] table names.
        part_of_policy: dict[str, int] = {}
        for number, (_, policies) in enumerate(self.parts):
            part_of_policy |= dict.fromkeys(policies, number)
        indices: list[list[int]] = [[] for _ in self.parts]
        for i, sample in enumerate(samples):
            indices[part_of_policy.get(sample.policy.name, 0)].append(i)

        split: list[tuple[str, Method, list[int]]] = []
        for number, (recipe, policies) in enumerate(self.parts):
            name = "+".join(policies) if number > 0 else ""
            split.append((name, recipe, indices[number]))
        return split


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
    """The reward of each sample by its policy's recipe. [n]"""
    rewards = np.full(len(collected.samples), np.nan)
    for _, recipe, indices in recipes.split(collected.samples):
        samples = [collected.samples[i] for i in indices]
        # Answers of other calls help to compute the rewards. They come last, and are cut off again.
        other_answers = _other_answers(collected.samples, samples, recipe, collected.others)
        all_rewards = rewards_of(recipe, recipe.step([*samples, *other_answers]))
        rewards[indices] = all_rewards[: len(samples)]
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
    for part, recipe, indices in recipes.split(samples):
        of_recipe = [samples[i] for i in indices]
        # Empty parts are skipped, except the run's: a step without any sample still needs one result.
        if not of_recipe and part:
            continue
        other_answers = _other_answers(samples, of_recipe, recipe, others)
        prepared = prepare(of_recipe, recipe, state, context=context, others=other_answers, part=part)
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
    samples: Sequence[Sample], of_recipe: Sequence[Sample], recipe: Method, others: Sequence[Sample]
) -> Sequence[Sample]:
    """The chosen answers of other calls in the same episodes, if the recipe adds their rewards to its samples'."""
    if not recipe.joins_calls:
        return ()
    if len(of_recipe) == len(samples):
        return others
    ids = {sample.id for sample in of_recipe}
    episodes = {sample.rollout for sample in of_recipe}
    of_other_recipes = [sample for sample in samples if sample.chosen and sample.id not in ids]
    return [sample for sample in [*others, *of_other_recipes] if sample.rollout in episodes]
