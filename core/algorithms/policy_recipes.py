"""The recipe of each policy: that of the run, or one of its own. Policies with the same recipe are compared and weighed
together, others by themselves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec
import numpy as np

from cotune.algorithms.collect import Collected, RoleRules
from cotune.algorithms.method import Method
from cotune.algorithms.own import rewards_of
from cotune.algorithms.prepare import Prepared, StepContext, prepare
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Floats, Sample
from cotune.algorithms.step import AdvantageState
from cotune.errors import ConfigError


def by_equal(recipes: Iterable[tuple[Method, str]]) -> list[tuple[Method, list[str]]]:
    """The different ones of named recipes in order of first appearance, each with the names that it has; an empty name
    is none."""
    found: list[tuple[Method, list[str]]] = []
    for recipe, name in recipes:
        names = next((names for other, names in found if other == recipe), None)
        if names is None:
            found.append((recipe, names := []))
        names += filter(None, [name])
    return found


class Recipes(msgspec.Struct, frozen=True, kw_only=True):
    """`run` is the recipe of all policies but those in `own`; `roles` names the policy of each role of the [[policy]]
    tables."""

    run: Method
    own: Mapping[str, Method] = {}
    roles: Mapping[str, str] = {}

    def of(self, policy: str) -> Method:
        """The recipe that a policy is trained by."""
        return self.own.get(policy, self.run)

    def of_role(self, role: str) -> Method:
        """The recipe of the policy that plays a role, as the configuration has it."""
        return self.of(self.roles.get(role, ""))

    @property
    def every(self) -> list[Method]:
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

    def by_recipe(self, roles: Iterable[str]) -> list[tuple[Method, list[str]]]:
        """The different recipes of `roles`, each with those that have it."""
        return by_equal((self.of_role(role), role) for role in roles)

    def able(self, scorers: Iterable[str]) -> list[str] | None:
        """The roles that can be trained, None for all: under a tree plan those with a scorer, and those whose policies
        take no rewards."""
        if self.run.plan != "tree" or not any(recipe.takes_rewards for recipe in self.every):
            return None
        return list(dict.fromkeys([*scorers, *(role for role in self.roles if not self.of_role(role).takes_rewards)]))

    @property
    def parts(self) -> list[tuple[Method, list[str]]]:
        """Each recipe with the policies that name it; that of the run has all others too."""
        return by_equal([(self.run, ""), *((recipe, name) for name, recipe in self.own.items())])

    def split(self, samples: Sequence[Sample]) -> list[tuple[str, Method, list[int]]]:
        """Samples by recipe: a name of the part ("" for that of the run), the recipe, and places in `samples`."""
        parts = self.parts
        number = {name: i for i, (_, policies) in enumerate(parts) for name in policies}
        places: list[list[int]] = [[] for _ in parts]
        for i, sample in enumerate(samples):
            places[number.get(sample.policy.name, 0)].append(i)
        return [("+".join(policies) if i else "", recipe, places[i]) for i, (recipe, policies) in enumerate(parts)]


def collecting_rules(recipes: Recipes, method_of: Callable[[str], Method | None]) -> RoleRules:
    """What `collect` must know about the methods of a run; `method_of` gives the method of a role, None for a role that
    is not trained."""

    def trains_branches(role: str) -> bool:
        method = method_of(role)
        return method is not None and method.trains_branches

    def takes_rewards(role: str) -> bool:
        method = method_of(role)
        return method is None or method.takes_rewards

    def by_seat(role: str) -> bool:
        method = method_of(role)
        return method is not None and method.by_seat

    return RoleRules(continuations=trains_branches, rewarded=takes_rewards, seats=by_seat, others=recipes.joins_calls)


def check_together(recipes: Recipes) -> None:
    """Raises ConfigError for a recipe that needs the advantages of the other roles, where these have another one."""
    if len(recipes.every) > 1:
        for recipe, policies in recipes.parts:
            if recipe.needs_all_roles:
                of = f"of policy {', '.join(policies)} " if policies else ""
                fault = f"{of}needs the advantages of the other roles, whose policies have another recipe"
                raise ConfigError("policy.recipe", recipe.name, fault, "Give it to all policies: set `recipe` alone.")


def attributed_each(collected: Collected, recipes: Recipes) -> Floats:
    """[n] reward of each sample by its policy's recipe, with those of other calls that have a part in it."""
    reward = np.full(len(collected.samples), np.nan)
    for _, recipe, places in recipes.split(collected.samples):
        own = [collected.samples[i] for i in places]
        around = list(_around(collected.samples, own, recipe, collected.others))
        reward[places] = rewards_of(recipe, recipe.step([*own, *around]))[: len(own)]
    return reward


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
    found: list[Prepared] = []
    state = state or AdvantageState()
    for part, recipe, places in recipes.split(samples):
        own = [samples[i] for i in places]
        if not own and part:
            continue
        around = _around(samples, own, recipe, others)
        prepared = prepare(own, recipe, state, context=context, others=around, part=part)
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
    samples: Sequence[Sample], own: Sequence[Sample], recipe: Method, others: Sequence[Sample]
) -> Sequence[Sample]:
    """The chosen answers of other calls of the episodes of `own`, where the recipe takes their rewards in."""
    if not recipe.joins_calls:
        return ()
    if len(own) == len(samples):
        return others
    mine, rollouts = {sample.id for sample in own}, {sample.rollout for sample in own}
    among = [sample for sample in samples if sample.chosen and sample.id not in mine]
    return [sample for sample in [*others, *among] if sample.rollout in rollouts]
