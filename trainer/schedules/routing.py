"""Who plays each role in a step of training: functions of the configuration, the step and the versions alone."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping

from cotune.errors import ConfigError
from cotune.records.plans import seed_of
from cotune.records.policies import Policies, swapped_roles
from cotune.records.structs import PolicyRef
from cotune.trainer.config.routing import RoutingConfig


def check_routing(routing: RoutingConfig, policies: Policies) -> None:
    """Raises ConfigError for roles that the application has not, that are not trained, or that have nothing to swap."""
    for field in ("swap", "past"):
        for role in getattr(routing, field):
            if role not in policies.learning:
                known = ", ".join(sorted(policies.learning))
                raise ConfigError(f"routing.{field}", role, f"is not a trained role: {known}")
    if routing.swap and len({policies.roles[role] for role in routing.swap}) < len(routing.swap):
        remedy = "Use --policies lora or full, or give each a [[policy]]."
        raise ConfigError("routing.swap", list(routing.swap), "are roles that share a policy", remedy)


def swapped(policies: Policies, routing: RoutingConfig, step: int) -> Policies:
    """`policies` with the roles of `swap` moved on in a step of training (`swapped_roles`)."""
    if not routing.swap:
        return policies
    return Policies(policies.specs, swapped_roles(policies.roles, routing.swap, routing.swap_every, step))


def pool(routing: RoutingConfig, version: int) -> list[int]:
    """The versions before `version` that are kept as opponents, oldest first."""
    return [v for v in range(version) if v % routing.pool_every == 0][-routing.pool :] if routing.past else []


def opponent(routing: RoutingConfig, step: int, present: PolicyRef, served: Collection[int], seed: int) -> PolicyRef:
    """The version of the pool that plays against the present one in `step`: drawn from those that are `served`, the
    present one where there is none yet."""
    able = [v for v in pool(routing, present.version) if v in served]
    drawn = random.Random(seed_of(seed, "opponent", step)).choice(able or [present.version])
    return PolicyRef(present.name, drawn)


def opposing(routing: RoutingConfig, policies: Policies, policy: str) -> RoutingConfig:
    """`routing`, or the default where it asks for no earlier versions of `policy`."""
    return routing if any(policies.roles[role] == policy for role in routing.past) else RoutingConfig()


def kept(routing: RoutingConfig, version: int, ahead: int) -> set[int]:
    """The versions that stay served once `version` is the present one: those that rollouts up to `ahead` versions
    behind may ask for, and the pool of each."""
    recent = range(max(0, version - ahead), version + 1)
    return {*recent, *(old for present in recent for old in pool(routing, present))}


def players(policies: Policies, versions: Mapping[str, int]) -> dict[str, PolicyRef]:
    """The present version that answers each role; roles of a provider have none."""
    specs = {role: policies.specs[name] for role, name in policies.roles.items()}
    return {
        role: PolicyRef(spec.name, versions.get(spec.name, 0))
        for role, spec in specs.items()
        if spec.kind != "provider"
    }
