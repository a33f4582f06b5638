"""The policy of each role in a step of training. It depends only on the configuration, the step and the versions."""

from __future__ import annotations

from collections.abc import Mapping

from cotune.config.rollouts import RoutingConfig
from cotune.errors import ConfigError
from cotune.records.policies import Policies, swapped_roles
from cotune.records.structs import PolicyRef


def check_routing(routing: RoutingConfig, policies: Policies) -> None:
    """Raise ConfigError for roles that are not trained, or that share a policy."""
    for role in routing.swap:
        if role not in policies.learning:
            trained = ", ".join(sorted(policies.learning))
            raise ConfigError("routing.swap", role, f"is not a trained role: {trained}")
    if routing.swap and len({policies.roles[role] for role in routing.swap}) < len(routing.swap):
        remedy = "Use --policies lora or full, or give each of these roles a [[policy]] table."
        raise ConfigError("routing.swap", list(routing.swap), "are roles that share a policy", remedy)


def swapped(policies: Policies, routing: RoutingConfig, step: int) -> Policies:
    """Return `policies` with the roles that they play in a step of training. Policies of the roles in `routing.swap`
    take turns with these roles (`swapped_roles`)."""
    if not routing.swap:
        return policies
    return Policies(policies.specs, swapped_roles(policies.roles, routing.swap, step))


def players(policies: Policies, versions: Mapping[str, int]) -> dict[str, PolicyRef]:
    """Return the present version of each role's policy. Roles of a provider have none."""
    policy_of_role: dict[str, PolicyRef] = {}
    for role, name in policies.roles.items():
        if policies.specs[name].kind != "provider":
            policy_of_role[role] = PolicyRef(name, versions.get(name, 0))
    return policy_of_role
