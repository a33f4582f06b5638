"""Policies of several runs, exports and models as one team: each role is played from the source that the user names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import UNTRAINED, OtherRoles
from cotune.trainer.evaluation.policies import EvaluatedPolicies, open_evaluated_policies
from cotune.trainer.evaluation.sources import REST, Source


@dataclass(frozen=True)
class Team:
    """The policies of a team. `sources` has the source of each role, and under `REST` the source of all other roles.

    If the sources do not agree on who plays these other roles, `note` says who does; else it is empty.
    """

    policies: EvaluatedPolicies
    sources: Mapping[str, Source]
    note: str = ""


def open_team(sources: Mapping[str, Source], moved: Moved = None) -> Team:
    """Open the policies of a team, with their weights.

    The source under `REST` plays all of its roles that are not named, and other roles as it was configured. Without
    `REST`, roles that are not named are played as the runs and exports were configured (`other_roles`). If these do not
    agree, or if there are only models, the application's own provider plays them. `moved` is the present location of
    base models.

    Raises ConfigError for a role that a source does not have, and AdapterError or RunError for a source that cannot be
    opened.
    """
    bases = SharedBases()
    policies_of_source = {source: open_source(source, moved, bases) for source in dict.fromkeys(sources.values())}

    # 1. The policies that play, and the roles of each. Keys are the source and the name of the policy in that source.
    roles_of_policy: dict[tuple[Source, str], list[str]] = {}
    playing: dict[tuple[Source, str], TrainedPolicy] = {}

    def play(role: str, source: Source, policy: TrainedPolicy) -> None:
        key = (source, policy.name)
        playing[key] = policy
        roles_of_policy.setdefault(key, []).append(role)

    for role, source in sources.items():
        if role != REST:
            play(role, source, _policy_for(role, source, policies_of_source[source]))
    default_source = sources.get(REST)
    if default_source is not None and default_source.kind != "model":
        for policy in policies_of_source[default_source].policies:
            for role in policy.roles:
                if role not in sources:
                    play(role, default_source, policy)

    # 2. The player of all other roles.
    other_player, note = _player_of_other_roles(sources, policies_of_source)
    model = other_player.model
    if model is None:
        model = next((policy.model for policy in playing.values() if policy.model), None)
    if model is None:
        raise ConfigError("use", None, "leaves every role to a provider", "Name a policy or a model for one of them.")

    # 3. Names that are unique in the team: two runs may both have a policy `shared`.
    names = unique_names(list(playing))
    policies: list[TrainedPolicy] = []
    for key, policy in playing.items():
        policies.append(dataclasses.replace(policy, name=names[key], roles=tuple(roles_of_policy[key])))
    return Team(EvaluatedPolicies(model, policies, other_player.kind), sources, note)


class SharedBases:
    """Gives one name to a base model that several sources name differently, so that it is loaded once."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}

    def name(self, model: str) -> str:
        """Return the name under which this model was first passed here. Raises ConfigError if it does not exist."""
        return self._names.setdefault(locate_model(model), model)


def open_source(source: Source, moved: Moved, bases: SharedBases) -> EvaluatedPolicies:
    """Open the policies of one source, and check their base models. Raises ConfigError, AdapterError, RunError, which
    name the source."""
    if source.kind == "model":
        model = bases.name(source.place)
        policy = TrainedPolicy(name=source.name, kind="frozen", version=0, roles=(), model=model)
        return EvaluatedPolicies(model, [policy])
    try:
        evaluated = open_evaluated_policies(source.place, moved, step=source.step)
        evaluated.check_bases()
        policies: list[TrainedPolicy] = []
        for policy in evaluated.policies:
            if policy.model:
                policy = dataclasses.replace(policy, model=bases.name(policy.model))
            policies.append(policy)
        return dataclasses.replace(evaluated, model=bases.name(evaluated.model), policies=policies)
    except AdapterError as error:
        raise AdapterError(f"{source.text}: {error.cause}", error.remedy) from None
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"(of {source.text}) {error.fault}", error.remedy) from None


def _policy_for(role: str, source: Source, policies: EvaluatedPolicies) -> TrainedPolicy:
    """Return the policy of `source` for a role. A model plays any role."""
    if source.kind == "model":
        return policies.policies[0]
    for policy in policies.policies:
        if role in policy.roles:
            return policy
    roles: list[str] = []
    for policy in policies.policies:
        roles += policy.roles
    fault = f"has no policy of role {role!r}; it has policies of: {', '.join(roles) or 'none'}"
    raise ConfigError("use", f"{role}={source.text}", fault, "Name another run, or a model, for this role.")


class _OtherPlayer(NamedTuple):
    """Who plays the roles that have no policy."""

    kind: OtherRoles
    model: str | None
    """The base model, if an untrained model plays; else None."""


def _player_of_other_roles(
    sources: Mapping[str, Source], policies_of_source: Mapping[Source, EvaluatedPolicies]
) -> tuple[_OtherPlayer, str]:
    """Return who plays the roles that `--use` does not name, and a note if the sources do not agree on that ("" if they
    do). If they do not agree, the application's own provider plays these roles.
    """
    if REST in sources:
        return _other_player(policies_of_source[sources[REST]]), ""
    # The players that runs and exports were configured with (`other_roles`), each with the first source that has it.
    source_of_player: dict[_OtherPlayer, Source] = {}
    for source, policies in policies_of_source.items():
        if source.kind != "model":
            source_of_player.setdefault(_other_player(policies), source)
    provider = _OtherPlayer("provider", model=None)
    if not source_of_player:
        return provider, ""
    if len(source_of_player) == 1:
        (player,) = source_of_player
        return player, ""
    differences: list[str] = []
    for player, source in source_of_player.items():
        player_text = player.model or "the application's own provider"
        differences.append(f"{source.text} has {player_text}")
    note = (
        "Any role that --use does not name is left to the application's own provider, as the sources differ: "
        f"{', '.join(differences)}. Name who plays these roles: --use MODEL."
    )
    return provider, note


def _other_player(policies: EvaluatedPolicies) -> _OtherPlayer:
    """Return who plays the roles that have no policy in a run or an export, as it was configured."""
    untrained_model = policies.model if policies.other_roles == "frozen" else None
    return _OtherPlayer(policies.other_roles, untrained_model)


def unique_names(keys: Sequence[tuple[Source, str]]) -> dict[tuple[Source, str], str]:
    """Give each policy a name: its present one if no other policy of the team has it, else with the name of its source.

    `keys` are the sources of the policies with their present names.
    """
    present_names = [name for _source, name in keys]
    names: dict[tuple[Source, str], str] = {}
    for source, name in keys:
        stem = name
        # `base` is the name of the untrained model, which plays roles without a policy.
        if present_names.count(name) > 1 or name == UNTRAINED.name:
            stem = f"{name}-{source.name}"
        unique_name = stem
        number = 2
        while unique_name in names.values():
            unique_name = f"{stem}-{number}"
            number += 1
        names[source, name] = unique_name
    return names
