"""Policies of several runs, exports and models as one team: each role is played from the source that the user names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cotune.adapters.bases import Moved
from cotune.adapters.export import TrainedPolicy
from cotune.errors import AdapterError, ConfigError
from cotune.integrations.models.folder.folder import locate_model
from cotune.records.policies import UNTRAINED, OtherRoles
from cotune.trainer.evaluation.policies import EvaluatedPolicies, open_evaluated_policies
from cotune.trainer.evaluation.sources import REST, Source


@dataclass(frozen=True)
class Team:
    """The policies of a team. `sources` are by the role that they play, with `REST` for the roles that are not named.
    `note` says who plays these if the sources do not agree on it; else it is empty."""

    policies: EvaluatedPolicies
    sources: Mapping[str, Source]
    note: str = ""


def open_team(sources: Mapping[str, Source], moved: Moved = None) -> Team:
    """Open the policies of a team, with their weights.

    A source under `REST` plays all roles of its own that are not named, and other roles as it was configured. Without
    `REST`, roles that are not named are played as the runs and exports were configured (`other_roles`). If these do not
    agree, or if there are only models, the application's own provider plays them. `moved` says where base models lie
    now.

    Raises ConfigError for a role that a source does not have, and AdapterError or RunError for a source that cannot be
    opened.
    """
    bases = SharedBases()
    opened = {source: open_source(source, moved, bases) for source in dict.fromkeys(sources.values())}

    # 1. The policy of each role, by its source and its name there. A policy may play several roles.
    roles_of: dict[tuple[Source, str], list[str]] = {}
    played: dict[tuple[Source, str], TrainedPolicy] = {}

    def play(role: str, source: Source, policy: TrainedPolicy) -> None:
        key = (source, policy.name)
        played[key] = policy
        roles_of.setdefault(key, []).append(role)

    for role, source in sources.items():
        if role != REST:
            play(role, source, _policy_for(role, source, opened[source]))
    rest = sources.get(REST)
    if rest is not None and rest.kind != "model":
        for policy in opened[rest].policies:
            for role in policy.roles:
                if role not in sources:
                    play(role, rest, policy)

    # 2. Who plays the roles that nobody named.
    other_roles, model, note = _others(sources, opened)
    if model is None:
        model = next((policy.model for policy in played.values() if policy.model), None)
    if model is None:
        raise ConfigError("use", None, "leaves every role to a provider", "Name a policy or a model for one of them.")

    # 3. Names that are unique in the team: two runs may both have a policy `shared`.
    names = unique_names(list(played))
    policies = [
        dataclasses.replace(policy, name=names[key], roles=tuple(roles_of[key])) for key, policy in played.items()
    ]
    return Team(EvaluatedPolicies(model, policies, other_roles), sources, note)


class SharedBases:
    """Gives one name to a base model that several sources name differently, so that it is loaded once."""

    def __init__(self) -> None:
        self._names: dict[Path, str] = {}

    def name(self, model: str) -> str:
        """The name under which this model was seen first. Raises ConfigError if there is no such model."""
        return self._names.setdefault(locate_model(model), model)


def open_source(source: Source, moved: Moved, bases: SharedBases) -> EvaluatedPolicies:
    """The policies of one source, after a check of their bases. Raises ConfigError, AdapterError, RunError, which name
    the source."""
    if source.kind == "model":
        model = bases.name(source.place)
        policy = TrainedPolicy(name=source.name, kind="frozen", version=0, roles=(), model=model)
        return EvaluatedPolicies(model, [policy])
    try:
        opened = open_evaluated_policies(source.place, moved, step=source.step)
        opened.check_bases()
        policies = [
            dataclasses.replace(policy, model=bases.name(policy.model)) if policy.model else policy
            for policy in opened.policies
        ]
        return dataclasses.replace(opened, model=bases.name(opened.model), policies=policies)
    except AdapterError as error:
        raise AdapterError(f"{source.text}: {error.cause}", error.remedy) from None
    except ConfigError as error:
        raise ConfigError(error.field, error.value, f"(of {source.text}) {error.fault}", error.remedy) from None


def _policy_for(role: str, source: Source, opened: EvaluatedPolicies) -> TrainedPolicy:
    """The policy of `source` for a role. A model plays any role."""
    if source.kind == "model":
        return opened.policies[0]
    for policy in opened.policies:
        if role in policy.roles:
            return policy
    known = ", ".join(role for policy in opened.policies for role in policy.roles) or "none"
    fault = f"has no policy of role {role!r}; it has policies of: {known}"
    raise ConfigError("use", f"{role}={source.text}", fault, "Name another run, or a model, for this role.")


def _others(
    sources: Mapping[str, Source], opened: Mapping[Source, EvaluatedPolicies]
) -> tuple[OtherRoles, str | None, str]:
    """Who plays the roles that are not named, the base model that does if it is one, and a note if the sources do not
    agree on it: then the application's own provider does."""
    if REST in sources:
        rest = opened[sources[REST]]
        return rest.other_roles, rest.model if rest.other_roles == "frozen" else None, ""
    answers: dict[tuple[OtherRoles, str | None], Source] = {}
    for source, policies in opened.items():
        if source.kind != "model":
            frozen = policies.other_roles == "frozen"
            answers.setdefault((policies.other_roles, policies.model if frozen else None), source)
    if len(answers) < 2:
        without: tuple[OtherRoles, str | None] = ("provider", None)
        other_roles, model = next(iter(answers), without)
        return other_roles, model, ""
    said = ", ".join(f"{source.text} has {_said(*answer)}" for answer, source in answers.items())
    note = (
        f"Any role that --use does not name is left to the application's own provider, as the sources differ: {said}. "
        "Name who plays such roles: --use MODEL."
    )
    return "provider", None, note


def _said(other_roles: OtherRoles, model: str | None) -> str:
    return str(model) if other_roles == "frozen" else "the application's own provider"


def unique_names(keys: Sequence[tuple[Source, str]]) -> dict[tuple[Source, str], str]:
    """A name for each policy: its own if no other policy of the team has it, else with the name of its source."""
    own = [name for _, name in keys]
    names: dict[tuple[Source, str], str] = {}
    taken: set[str] = set()
    for source, name in keys:
        # `base` is the name of the untrained model, which plays roles without a policy.
        unique = name if own.count(name) == 1 and name != UNTRAINED.name else f"{name}-{source.name}"
        number = 2
        candidate = unique
        while candidate in taken:
            candidate = f"{unique}-{number}"
            number += 1
        taken.add(candidate)
        names[source, name] = candidate
    return names
