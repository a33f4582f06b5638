"""Find the recipe of a run from its folder, or the usual one for records without a run, and apply it to recorded
episodes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

import msgspec
import numpy as np

from cotune.algorithms.catalogue import RECIPES, is_own, recipe
from cotune.algorithms.collect import Collected, collect
from cotune.algorithms.groups import Group, build_groups
from cotune.algorithms.method import Method, Unread
from cotune.algorithms.policy_recipes import Recipes, attributed_each, prepare_each
from cotune.algorithms.prepare import Prepared, StepContext
from cotune.algorithms.recipes import USUAL
from cotune.algorithms.samples import Floats, Sample
from cotune.config.methods import KlTo, changed_settings, dotted_name
from cotune.config.policy import PolicyConfig
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError, GroupError, RunError
from cotune.records.plans import PlanKind
from cotune.records.policies import TRAINED, swapped_roles
from cotune.records.structs import Episode
from cotune.storage.checkpoints import newest_checkpoint, read_policies
from cotune.storage.outcomes import failure_reward
from cotune.storage.protocol import Store
from cotune.storage.run_layout import RunLayout, is_run, read_run


class Regrouped(msgspec.Struct, frozen=True, kw_only=True):
    """Recorded episodes under a recipe: candidates with advantages, groups with their weighted rewards [n].

    `prepared` is None if the recipe cannot be applied; `problems` then has the reason. `left_out` counts by reason the
    candidates that `collect` and `prepare_each` leave out. `candidates` is the number of all candidates.
    """

    collected: Collected
    prepared: Prepared | None
    groups: tuple[tuple[Group, Floats], ...]
    left_out: Mapping[str, int]
    candidates: int
    problems: tuple[str, ...]


def regroup(
    store: Store,
    episodes: Iterable[Episode],
    recipes: Recipes,
    config: TrainConfig,
    roles: Mapping[str, str] | None = None,
    step: int | None = None,
) -> Regrouped:
    """Group the candidates of recorded episodes and compute their advantages, as in training step `step`.

    `roles` are the trained roles with the policies that play them in this step (`trained_roles`); None for all roles,
    played as configured.
    """

    def recipe_of_role(role: str) -> Method:
        if roles is None:
            return recipes.of_role(role)
        return recipes.of(roles.get(role, ""))

    collected = collect(
        store,
        episodes,
        plan=recipes.run.plan,
        roles=roles,
        on_failure=failure_reward(config.on_failure),
        method_of=recipe_of_role,
    )
    samples = collected.samples
    left_out = Counter(collected.left_out)
    candidates = len(samples) + left_out.total()
    frozen_policies: set[str] = set()
    if step is not None:
        frozen_policies = {sample.policy.name for sample in samples if not config.trains(sample.policy.name, step)}
    try:
        context = StepContext(frozen=frozen_policies)
        prepared = prepare_each(samples, recipes, context=context, others=collected.others)
    except GroupError as error:
        return Regrouped(
            collected=collected,
            prepared=None,
            groups=(),
            left_out=left_out,
            candidates=candidates,
            problems=(str(error),),
        )
    prepared = _hide_unread_advantages(prepared, recipes)
    left_out.update(prepared.left_out)
    return Regrouped(
        collected=collected,
        prepared=prepared,
        groups=_groups_with_rewards(collected, recipes),
        left_out=left_out,
        candidates=candidates,
        problems=prepared.warnings,
    )


def _hide_unread_advantages(prepared: Prepared, recipes: Recipes) -> Prepared:
    """Replace the advantages of samples whose recipe is a class of the user by NaN, with a warning.

    A command that shows a run does not load these classes. `Unread` stands for them, with other advantages.
    """
    unread_recipes = [recipe.name for recipe in recipes.every if recipe.unread]
    if not unread_recipes:
        return prepared
    is_unread = [recipes.of(sample.policy.name).unread for sample in prepared.samples]
    advantages = np.where(np.array(is_unread, np.bool_), np.nan, prepared.advantages)
    warning = (
        f"Your code for {', '.join(unread_recipes)} is not run here: the advantages are not shown, and the rewards are "
        "plain sums in the default groups of the plan."
    )
    return msgspec.structs.replace(prepared, advantages=advantages, warnings=(*prepared.warnings, warning))


def _groups_with_rewards(collected: Collected, recipes: Recipes) -> tuple[tuple[Group, Floats], ...]:
    """All groups with the rewards of their samples, [n], also the groups that training leaves out."""
    reward_of: dict[str, float] = {}
    comparable: list[Sample] = []
    for sample, reward in zip(collected.samples, attributed_each(collected, recipes).tolist(), strict=True):
        if not math.isnan(reward) and not sample.continues:  # calls after a fork have no group
            reward_of[sample.id] = reward
            comparable.append(sample)
    groups: list[tuple[Group, Floats]] = []
    for part, method, indices in recipes.split(comparable):
        for group in build_groups([comparable[i] for i in indices], method, part).groups:
            groups.append((group, np.array([reward_of[sample.id] for sample in group.samples])))
    return tuple(groups)


def recipes_of(store: Store) -> tuple[Recipes, str]:
    """The recipes that the records were made with, and a text that names them.

    They are the recipes of the run that the records belong to. Records without a run get the default recipe of the plan
    that they look like.
    """
    config = config_of(store)
    plan: PlanKind = "independent"
    if config.plan.kind:
        plan = config.plan.kind
    elif store.figures().has_scored_candidates():
        # An application may request several candidates under any plan, but only a tree plan scores all of them.
        plan = "tree"
    recipes = policy_recipes(config, plan, run_code=False)
    source = "as the run was configured" if _is_of_run(store.folder) else "as the records suggest"
    return recipes, f"plan {plan}, {recipes.names}, {source}"


def policy_recipes(config: TrainConfig, plan: PlanKind, *, run_code: bool = True) -> Recipes:
    """The recipe of a run, and the recipes of the policies that have their own.

    Without `run_code`, `Unread` replaces classes of the user. Raises ConfigError, which names a field as in the
    configuration.
    """

    def resolve(name: str, settings: Mapping[str, Any], policy: str) -> Method:
        if is_own(name) and not run_code:
            return Unread(name, plan)
        return _resolve_recipe(name, plan, settings, policy)

    name_of_run = config.recipe or USUAL[plan]
    recipe_of_policy: dict[str, Method] = {}
    policy_of_role: dict[str, str] = {}
    for policy in config.policy:
        name, settings = _recipe_settings(config, policy)
        has_own_recipe = policy.recipe or changed_settings(policy.rewards, policy.loss)
        if has_own_recipe:
            recipe_of_policy[policy.name] = resolve(name or name_of_run, settings, policy.name)
        policy_of_role |= dict.fromkeys(policy.roles, policy.name)
    recipe_of_run = resolve(name_of_run, changed_settings(config.rewards, config.loss), policy="")
    return Recipes(run=recipe_of_run, own=recipe_of_policy, roles=policy_of_role)


def _resolve_recipe(name: str, plan: PlanKind, settings: Mapping[str, Any], policy: str) -> Method:
    """A recipe with changed settings, for one `policy`, or for the run if `policy` is empty.

    Raises ConfigError, which names the field as the user wrote it: in [rewards] or [loss], or in the table of the
    policy.
    """
    try:
        method = recipe(name, plan=plan, **settings)
    except ConfigError as error:
        raise _error_of_configuration(error, name, plan, settings, policy) from None
    # The code that opens a teacher or shows a run reads `kl_to` from the configuration, without the user's class. So a
    # class of the user and the configuration must agree.
    kl_to = method.loss.kl_to
    if is_own(name) and kl_to != settings.get("kl_to", "untrained"):
        field = "policy.recipe" if policy else "recipe"
        table = "policy.loss" if policy else "loss"
        fault = f"has a loss with kl_to = {kl_to!r}, which the configuration must say too"
        raise ConfigError(field, name, fault, f'Set kl_to = "{kl_to}" in [{table}].')
    return method


def _error_of_configuration(
    error: ConfigError, name: str, plan: PlanKind, settings: Mapping[str, Any], policy: str
) -> ConfigError:
    """The error of `recipe`, which names an attribute of the recipe, as an error about a field of the configuration."""
    owner = f"of policy {policy} " if policy else ""
    if error.field in settings:
        field = dotted_name(error.field)
        if policy:
            field = f"policy.{field}"
        return ConfigError(field, error.value, f"{owner}{error.fault}", error.remedy)
    if not policy:
        return error
    # No table sets the faulty field: the policy's recipe does not fit the plan of the run.
    fault = f"{owner}cannot be used here: {error.field} = {error.value!r} {error.fault}"
    remedy = f"All policies of a run have its plan, which is {plan}. Name another recipe, or --plan."
    return ConfigError("policy.recipe", name, fault, remedy)


def _recipe_settings(config: TrainConfig, policy_table: PolicyConfig | None) -> tuple[str | None, Mapping[str, Any]]:
    """The recipe of a [[policy]] table, or of the run if `policy_table` is None, and its changed settings. The run's
    changes apply too, unless the table names another recipe.
    """
    of_run = changed_settings(config.rewards, config.loss)
    if policy_table is None:
        return config.recipe, of_run
    of_policy = changed_settings(policy_table.rewards, policy_table.loss)
    if policy_table.recipe:
        return policy_table.recipe, of_policy
    return config.recipe, {**of_run, **of_policy}


def taught_by(config: TrainConfig, policy_table: PolicyConfig | None = None) -> KlTo:
    """The model that a policy learns from, under any plan (the setting `kl_to`).

    It is "teacher", "self" (the policy itself, which sees more), or "untrained" if the policy learns only from rewards.
    `policy_table` is the [[policy]] table of the policy, None for a policy without one.
    """
    name, settings = _recipe_settings(config, policy_table)
    if "kl_to" in settings:
        kl_to: KlTo = settings["kl_to"]
        return kl_to
    if name is not None and name in RECIPES:
        return RECIPES[name].loss.kl_to
    return "untrained"


def all_taught(config: TrainConfig) -> bool:
    """Whether every trained policy learns from a teacher or itself, so that rewards do not count."""
    sources = [taught_by(config, policy) for policy in config.policy if policy.trained]
    if not sources:  # no table names a trained policy, so the run's recipe trains them all
        sources = [taught_by(config)]
    return "untrained" not in sources


def trained_roles(store: Store, step: int | None) -> dict[str, str] | None:
    """The roles that the run trains in a step, each with the policy that plays it then; None (all) for records without
    a run or a step, or before the first checkpoint."""
    folder = store.folder
    if step is None or not _is_of_run(folder):
        return None
    checkpoint = newest_checkpoint(RunLayout(folder).checkpoints)
    if checkpoint is None:
        return None
    try:
        policies = read_policies(checkpoint)
        swap = config_of(store).routing.swap
    except RunError:  # a damaged checkpoint or configuration does not keep the records from being shown
        return None
    roles: dict[str, str] = {}
    for policy in policies:
        if policy.kind in TRAINED:
            roles |= dict.fromkeys(policy.roles, policy.name)
    return swapped_roles(roles, swap, step)


def config_of(store: Store) -> TrainConfig:
    """The configuration of the run that the records belong to; the defaults if they do not belong to a run."""
    folder = store.folder
    return read_run(folder).config if _is_of_run(folder) else TrainConfig()


def _is_of_run(folder: Path | None) -> TypeGuard[Path]:
    return folder is not None and is_run(folder)
