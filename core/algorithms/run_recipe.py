"""The recipe that a run was trained with, read from its folder, or the usual one for records by themselves; and what
it makes of recorded episodes."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping

import msgspec
import numpy as np

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import Collected, attributed, collect
from cotune.algorithms.groups import Group, build_groups
from cotune.algorithms.prepare import Prepared, prepare
from cotune.algorithms.recipes import USUAL, Recipe
from cotune.algorithms.samples import Floats
from cotune.errors import GroupError, RunError
from cotune.records.plans import PlanKind
from cotune.records.policies import past_role, swapped_roles
from cotune.records.structs import Episode
from cotune.storage.checkpoints import newest_checkpoint, read_policies
from cotune.storage.outcomes import failure_reward
from cotune.storage.protocol import Store
from cotune.storage.run_config import RunConfig
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
    chosen: Recipe,
    config: RunConfig,
    roles: Mapping[str, str] | None = None,
) -> Regrouped:
    """Group and weigh recorded episodes as training did; `roles` as `trained_roles` gives them."""
    collected = collect(
        store,
        episodes,
        plan=chosen.plan,
        roles=roles,
        on_failure=failure_reward(config.on_failure),
        continuations=config.replay.continuations,
        rewarded=chosen.takes_rewards,
        others=chosen.joins_calls,
        seats=chosen.by_seat,
        trunks=config.replay.trunks,
    )
    samples, left_out = collected.samples, Counter(collected.left_out)
    candidates = len(samples) + left_out.total()
    own = [term.advantage for term in chosen.terms if term.advantage]
    try:
        prepared = prepare(
            samples, _without_own(chosen), decays=config.learner.weight_decay > 0, others=collected.others
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
    if own:  # a run that somebody looks at runs no code
        prepared = msgspec.structs.replace(
            prepared,
            advantages=np.full(len(prepared.samples), np.nan),
            trained=prepared.samples,
            left_out={reason: n for reason, n in prepared.left_out.items() if reason != "zero_advantage"},
        )
        problems = (*problems, f"Advantages are those of {', '.join(own)}, which is not run here: they are not shown.")
    left_out.update(prepared.left_out)
    rewards = attributed(collected, chosen.attribution, chosen.key).tolist()
    reward = dict(zip((s.id for s in samples), rewards, strict=True))
    built = build_groups([s for s in samples if reward[s.id] == reward[s.id] and not s.continues], chosen).groups
    return Regrouped(
        collected=collected,
        prepared=prepared,
        groups=tuple((group, np.array([reward[s.id] for s in group.samples])) for group in built),
        left_out=left_out,
        candidates=candidates,
        problems=problems,
    )


def _without_own(chosen: Recipe) -> Recipe:
    terms = tuple(msgspec.structs.replace(term, advantage="") for term in chosen.terms)
    return msgspec.structs.replace(chosen, terms=terms)


def recipe_of(store: Store) -> tuple[Recipe, str]:
    """The run's recipe as its run.json tells, else the default one for the plan that the records look like."""
    config = config_of(store)
    plan = config.plan.kind or _plan_of(store)
    name = config.recipe or USUAL[plan]
    settings = {"plan": plan, "team_weight": config.team_weight, **config.overrides}
    source = "as the run was configured" if is_run(store.folder) else "as the records suggest"
    return recipe(name, **settings), f"plan {plan}, recipe {name}, {source}"


def _plan_of(store: Store) -> PlanKind:
    """Only under a tree plan are the candidates of a call scored; an application may ask for several all the same."""
    return "tree" if store.has_scored_candidates() else "independent"


def trained_roles(store: Store, step: int | None) -> dict[str, str] | None:
    """The roles that the run trains in a step of training, each with the policy that plays it then; None (all) for
    records of no run or no step, or before a checkpoint."""
    folder = store.folder
    checkpoint = newest_checkpoint(RunLayout(folder).checkpoints) if is_run(folder) else None
    with contextlib.suppress(RunError):  # a damaged one
        if checkpoint is not None and step is not None:
            routing = config_of(store).routing
            trained = [one for one in read_policies(checkpoint) if one.kind in ("lora", "full")]
            roles = {role: one.name for one in trained for role in one.roles}
            past = past_role(routing.past, step)
            played = swapped_roles(roles, routing.swap, routing.swap_every, step)
            return {role: name for role, name in played.items() if role != past}
    return None


def config_of(store: Store) -> RunConfig:
    """The configuration of the run that the records belong to; the defaults where they belong to none."""
    folder = store.folder
    return read_run(folder).config if is_run(folder) else RunConfig()
