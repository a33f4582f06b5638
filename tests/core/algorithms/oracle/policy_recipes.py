"""The recipe of each policy: that of the run, or one of its own. Policies with the same recipe are compared and weighed
together, others by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.samples import Sample
from cotune.errors import ConfigError
from tests.core.algorithms.oracle.advantages import AdvantageState
from tests.core.algorithms.oracle.prepare import Prepared, prepare
from tests.core.algorithms.oracle.recipes import Attribution, Recipe


def by_equal(recipes: Iterable[tuple[Recipe, str]]) -> list[tuple[Recipe, list[str]]]:
    """The different ones of named recipes in order of first appearance, each with the names that it has; an empty name
    is none."""
    found: list[tuple[Recipe, list[str]]] = []
    for recipe, name in recipes:
        names = next((names for other, names in found if other == recipe), None)
        if names is None:
            found.append((recipe, names := []))
        names += filter(None, [name])
    return found


class Recipes(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is the recipe of all policies but those in `own`; `roles` names the policy of each role of the [[policy]]
    tables."""

    run: Recipe
    own: Mapping[str, Recipe] = {}
    roles: Mapping[str, str] = {}

    def of(self, policy: str) -> Recipe:
        """The recipe that a policy is trained by."""
        return self.own.get(policy, self.run)

    def of_role(self, role: str) -> Recipe:
        """The recipe of the policy that plays a role, as the configuration has it."""
        return self.of(self.roles.get(role, ""))

    @property
    def every(self) -> list[Recipe]:
        """The different recipes, that of the run first."""
        return [recipe for recipe, _ in self.parts]

    @property
    def names(self) -> str:
        """The recipes by name, with the policies of those that are not the run's."""
        first, *rest = self.parts
        return ", ".join([f"recipe {first[0].name}", *(f"{r.name} for {', '.join(of)}" for r, of in rest)])

    @property
    def joins_calls(self) -> bool:
        """Whether any takes rewards of other calls of an episode into those of a candidate."""
        return any(recipe.joins_calls for recipe in self.every)

    def attributions(self, players: Mapping[str, str]) -> dict[str, Attribution]:
        """What the candidates of each role are compared by where that is not the run's; `players` are the policies by
        role."""
        return {role: self.own[name].attribution for role, name in players.items() if name in self.own}

    def by_recipe(self, roles: Iterable[str]) -> list[tuple[Recipe, list[str]]]:
        """The different recipes of `roles`, each with those that have it."""
        return by_equal((self.of_role(role), role) for role in roles)

    def able(self, scorers: Iterable[str]) -> list[str] | None:
        """The roles that can be trained, None for all: under a tree plan those with a scorer, and those whose policies
        take no rewards."""
        if self.run.plan != "tree" or not any(recipe.takes_rewards for recipe in self.every):
            return None
        return list(dict.fromkeys([*scorers, *(role for role in self.roles if not self.of_role(role).takes_rewards)]))

    @property
    def parts(self) -> list[tuple[Recipe, list[str]]]:
        """Each recipe with the policies that name it; that of the run has all others too."""
        return by_equal([(self.run, ""), *((recipe, name) for name, recipe in self.own.items())])

    def split(self, samples: Sequence[Sample]) -> list[tuple[str, Recipe, list[int]]]:
        """Samples by recipe: a name of the part ("" for that of the run), the recipe, and places in `samples`."""
        parts = self.parts
        number = {name: i for i, (_, policies) in enumerate(parts) for name in policies}
        places: list[list[int]] = [[] for _ in parts]
        for i, sample in enumerate(samples):
            places[number.get(sample.policy.name, 0)].append(i)
        return [("+".join(policies) if i else "", recipe, places[i]) for i, (recipe, policies) in enumerate(parts)]


def check_together(recipes: Recipes) -> None:
    """Raises ConfigError for a recipe that needs the advantages of the other roles, where these have another one."""
    if len(recipes.every) > 1:
        for recipe, policies in recipes.parts:
            if recipe.shaping.opponent:
                of = f"of policy {', '.join(policies)} " if policies else ""
                fault = f"{of}needs the advantages of the other roles, whose policies have another recipe"
                remedy = "Use it for all policies: set only the run's `recipe`, and none in [[policy]] tables."
                raise ConfigError("policy.recipe", recipe.name, fault, remedy)


def prepare_each(
    samples: Sequence[Sample],
    recipes: Recipes,
    state: AdvantageState | None = None,
    *,
    consumed: Container[str] = (),
    decays: Collection[str] = (),
    frozen: Collection[str] = (),
    others: Sequence[Sample] = (),
    task_weights: Mapping[str, float] | None = None,
) -> Prepared:
    """`prepare` for the policies of each recipe by themselves, as if these were the only ones that are trained: with
    two recipes each policy has the advantages of a run that trains it alone. What is returned is of all of them."""
    found: list[Prepared] = []
    state = state or AdvantageState()
    for part, recipe, places in recipes.split(samples):
        own = [samples[i] for i in places]
        if not own and part:
            continue
        around = _around(samples, own, recipe, others)
        prepared = prepare(
            own,
            recipe,
            state,
            consumed=consumed,
            decays=decays,
            frozen=frozen,
            others=around,
            part=part,
            task_weights=task_weights,
        )
        found.append(prepared)
        state = prepared.state
    if len(found) == 1:
        return found[0]
    rewarded = sum(one.rewarded for one in found)
    return Prepared(
        samples=tuple(sample for one in found for sample in one.samples),
        advantages=np.concatenate([one.advantages for one in found]),
        trained=tuple(sample for one in found for sample in one.trained),
        groups=tuple(group for one in found for group in one.groups),
        left_out=dict(sum((Counter(one.left_out) for one in found), Counter())),
        roles={role: stats for one in found for role, stats in one.roles.items()},
        reward=sum(one.reward * one.rewarded for one in found if one.reward is not None) / rewarded
        if rewarded
        else None,
        rewarded=rewarded,
        reached={name: how for one in found for name, how in one.reached.items()},
        warnings=tuple(dict.fromkeys(text for one in found for text in one.warnings)),
        state=state,
    )


def _around(
    samples: Sequence[Sample], own: Sequence[Sample], recipe: Recipe, others: Sequence[Sample]
) -> Sequence[Sample]:
    """The chosen answers of other calls of the episodes of `own`, where the recipe takes their rewards in."""
    if not recipe.joins_calls:
        return ()
    if len(own) == len(samples):
        return others
    mine, rollouts = {sample.id for sample in own}, {sample.rollout for sample in own}
    among = [sample for sample in samples if sample.chosen and sample.id not in mine]
    return [sample for sample in [*others, *among] if sample.rollout in rollouts]
