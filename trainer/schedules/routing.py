"""Who plays each role in a step of training: functions of the configuration, the step and the versions alone."""

from __future__ import annotations

from collections.abc import Mapping

from cotune.config.rollouts import RoutingConfig
from cotune.errors import ConfigError
from cotune.records.policies import Policies, swapped_roles
from cotune.records.structs import PolicyRef


def check_routing(routing: RoutingConfig, policies: Policies) -> None:
    """Raises ConfigError for roles that the application has not, that are not trained, or that have nothing to swap."""
    for role in routing.swap:
        if role not in policies.learning:
            known = ", ".join(sorted(policies.learning))
            raise ConfigError("routing.swap", role, f"is not a trained role: {known}")
    if routing.swap and len({policies.roles[role] for role in routing.swap}) < len(routing.swap):
        remedy = "Use --policies lora or full, or give each a [[policy]]."
        raise ConfigError("routing.swap", list(routing.swap), "are roles that share a policy", remedy)


def swapped(policies: Policies, routing: RoutingConfig, step: int) -> Policies:
    """`policies` with the roles of `swap` moved on in a step of training (`swapped_roles`)."""
    if not routing.swap:
        return policies
    return Policies(policies.specs, swapped_roles(policies.roles, routing.swap, step))


def players(policies: Policies, versions: Mapping[str, int]) -> dict[str, PolicyRef]:
    """The present version that answers each role; roles of a provider have none."""
    specs = {role: policies.specs[name] for role, name in policies.roles.items()}
    return {
        role: PolicyRef(spec.name, versions.get(spec.name, 0))
        for role, spec in specs.items()
        if spec.kind != "provider"
    }
