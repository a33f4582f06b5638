"""The recipe that a run was trained with, read from its folder, or the usual one for records by themselves; and what
it makes of recorded episodes."""

from __future__ import annotations

import contextlib
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
from cotune.algorithms.policy_recipes import Recipes, attributed_each, collecting_rules, prepare_each
from cotune.algorithms.prepare import Prepared, StepContext
from cotune.algorithms.recipes import USUAL
from cotune.algorithms.samples import Floats
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
    """What a recipe makes of recorded episodes: candidates with advantages, groups with their mixed rewards [n].

    `prepared` is None, with the reason among `problems`, where it can make nothing of them; `left_out` counts
    candidates of both stages by reason, out of `candidates`.
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
    chosen: Recipes,
    config: TrainConfig,
    roles: Mapping[str, str] | None = None,
    step: int | None = None,
) -> Regrouped:
    """Group and weigh recorded episodes as training did in `step`; `roles` as `trained_roles` gives them."""

    def of(role: str) -> Method:
        return chosen.of_role(role) if roles is None else chosen.of(roles.get(role, ""))

    collected = collect(
        store,
        episodes,
        plan=chosen.run.plan,
        roles=roles,
        on_failure=failure_reward(config.on_failure),
        rules=collecting_rules(chosen, of),
    )
    samples, left_out = collected.samples, Counter(collected.left_out)
    candidates = len(samples) + left_out.total()
    unread = [recipe.name for recipe in chosen.every if recipe.unread]
    names = {sample.policy.name for sample in samples}
    try:
        prepared = prepare_each(
            samples,
            chosen,
            context=StepContext(
                frozen={name for name in names if step is not None and not config.trains(name, step)},
            ),
            others=collected.others,
        )
    except GroupError as error:
        return Regrouped(
            collected=collected,
            prepared=None,
            groups=(),
            left_out=left_out,
            candidates=candidates,
            problems=(str(error),),
        )
    problems = prepared.warnings
    if unread:  # looking at a run runs no code of the user's
        of_unread = np.array([chosen.of(sample.policy.name).unread for sample in prepared.samples], np.bool_)
        prepared = msgspec.structs.replace(prepared, advantages=np.where(of_unread, np.nan, prepared.advantages))
        text = (
            f"Rewards and advantages are those of {', '.join(unread)}, which is not run here: the advantages are not "
            "shown, and rewards are plain sums in groups as the plan has them."
        )
        problems = (*problems, text)
    left_out.update(prepared.left_out)
    rewards = attributed_each(collected, chosen).tolist()
    reward = dict(zip((s.id for s in samples), rewards, strict=True))
    grouped = [s for s in samples if reward[s.id] == reward[s.id] and not s.continues]
    parts = [(recipe, part, [grouped[i] for i in places]) for part, recipe, places in chosen.split(grouped)]
    built = [group for recipe, part, among in parts for group in build_groups(among, recipe, part).groups]
    return Regrouped(
        collected=collected,
        prepared=prepared,
        groups=tuple((group, np.array([reward[s.id] for s in group.samples])) for group in built),
        left_out=left_out,
        candidates=candidates,
        problems=problems,
    )


def recipes_of(store: Store) -> tuple[Recipes, str]:
    """The run's recipes as its run.json tells, else the default one for the plan that the records look like."""
    config = config_of(store)
    plan = config.plan.kind or _plan_of(store)
    found = policy_recipes(config, plan, run_code=False)
    source = "as the run was configured" if _is_of_run(store.folder) else "as the records suggest"
    return found, f"plan {plan}, {found.names}, {source}"


def policy_recipes(config: TrainConfig, plan: PlanKind, *, run_code: bool = True) -> Recipes:
    """The recipe of a run, and those of its policies that have one of their own.

    Without `run_code`, `Unread` stands for classes of the user's. Raises ConfigError that names a field as it is in
    the configuration.
    """

    def resolved(name: str, settings: Mapping[str, Any], policy: str = "") -> Method:
        if is_own(name) and not run_code:
            return Unread(name, plan)
        try:
            method = recipe(name, plan=plan, **settings)
        except ConfigError as error:
            table, of = ("policy.", f"of policy {policy} ") if policy else ("", "")
            if policy and error.field not in settings:
                fault = f"{of}cannot be used here: {error.field} = {error.value!r} {error.fault}"
                remedy = f"All policies of a run have its plan, which is {plan}. Name another recipe, or --plan."
                raise ConfigError("policy.recipe", name, fault, remedy) from None
            if error.field not in settings:
                raise
            field = f"{table}{dotted_name(error.field)}"
            raise ConfigError(field, error.value, f"{of}{error.fault}", error.remedy) from None
        kl_to = method.loss.kl_to
        if is_own(name) and kl_to != settings.get("kl_to", "untrained"):
            # Teachers are opened, and runs are shown, by what the configuration says: neither loads the class.
            field, table = ("policy.recipe", "policy.loss") if policy else ("recipe", "loss")
            fault = f"has a loss with kl_to = {kl_to!r}, which the configuration must say too"
            raise ConfigError(field, name, fault, f'Set kl_to = "{kl_to}" in [{table}].')
        return method

    usual = config.recipe or USUAL[plan]
    own: dict[str, Method] = {}
    for one in config.policy:
        name, settings = _recipe_settings(config, one)
        if one.recipe or changed_settings(one.rewards, one.loss):
            own[one.name] = resolved(name or usual, settings, one.name)
    roles = {role: one.name for one in config.policy for role in one.roles}
    return Recipes(run=resolved(usual, _recipe_settings(config, None)[1]), own=own, roles=roles)


def _recipe_settings(config: TrainConfig, own: PolicyConfig | None) -> tuple[str | None, Mapping[str, Any]]:
    """The recipe that a [[policy]] table, or None the run, names, and what it changes of it: as the run does, unless
    the recipe is another one than the run's."""
    of_run = changed_settings(config.rewards, config.loss)
    if own is None:
        return config.recipe, of_run
    of_policy = changed_settings(own.rewards, own.loss)
    if own.recipe:
        return own.recipe, of_policy
    return config.recipe, {**of_run, **of_policy}


def taught_by(config: TrainConfig, own: PolicyConfig | None = None) -> KlTo:
    """Who teaches a policy, that of a [[policy]] table or any other one: a "teacher", its "self", or nobody beside the
    rewards ("untrained"), whatever the plan."""
    name, settings = _recipe_settings(config, own)
    usual = RECIPES[name].loss.kl_to if name is not None and name in RECIPES else "untrained"
    teacher: KlTo = settings.get("kl_to", usual)
    return teacher


def all_taught(config: TrainConfig) -> bool:
    """Whether every trained policy learns from a teacher or itself, so that rewards count for nothing."""
    found = [taught_by(config, own) for own in config.policy if own.trained] or [taught_by(config)]
    return "untrained" not in found


def _plan_of(store: Store) -> PlanKind:
    """Only under a tree plan are the candidates of a call scored; an application may ask for several all the same."""
    return "tree" if store.figures().has_scored_candidates() else "independent"


def trained_roles(store: Store, step: int | None) -> dict[str, str] | None:
    """The roles that the run trains in a step of training, each with the policy that plays it then; None (all) for
    records of no run or no step, or before a checkpoint."""
    folder = store.folder
    checkpoint = newest_checkpoint(RunLayout(folder).checkpoints) if _is_of_run(folder) else None
    with contextlib.suppress(RunError):  # a damaged one
        if checkpoint is not None and step is not None:
            swap = config_of(store).routing.swap
            trained = [one for one in read_policies(checkpoint) if one.kind in TRAINED]
            roles = {role: one.name for one in trained for role in one.roles}
            return swapped_roles(roles, swap, step)
    return None


def config_of(store: Store) -> TrainConfig:
    """The configuration of the run that the records belong to; the defaults where they belong to none."""
    folder = store.folder
    return read_run(folder).config if _is_of_run(folder) else TrainConfig()


def _is_of_run(folder: Path | None) -> TypeGuard[Path]:
    return folder is not None and is_run(folder)
