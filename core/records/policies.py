"""Policies: named sets of weights, and the roles that each one plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from cotune.errors import ConfigError, check_bounds
from cotune.records.structs import PolicyRef

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

PolicyKind = Literal["lora", "full", "frozen", "provider"]

TRAINED: tuple[PolicyKind, ...] = ("lora", "full")
"""Kinds of policies that are trained."""

OtherRoles = Literal["frozen", "provider"]
"""The player of a role without a policy: the untrained model, or the model that the application uses today."""

UNTRAINED = PolicyRef("base")
"""The run's model, untrained, for roles without a policy. A frozen policy with another model is untrained too, under
its own name: for a policy that was never published, an engine answers with the base that it was opened with."""


def stand_in(others: OtherRoles) -> PolicyRef | None:
    """The policy that answers for a role without one; None for the application's own provider."""
    return UNTRAINED if others == "frozen" else None


def unlisted_roles_text(role: str, others: OtherRoles) -> str:
    """A sentence about a role without a policy."""
    player = "the untrained model" if others == "frozen" else "its own provider"
    return (
        f"role {role!r} has no policy: {player} answers its calls, which are not trained on (other_roles = {others!r})"
    )


class LoraSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Shape of a LoRA adapter: W + (alpha / rank) * B A on each target module."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    """The adapter's output is scaled by alpha / rank."""
    targets: tuple[str, ...] = ALL_LINEAR
    """Names of the linear layers that get an adapter."""

    def __post_init__(self) -> None:
        check_bounds(self, "rank", "alpha", table="lora.")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


class PolicySpec(msgspec.Struct, frozen=True, kw_only=True):
    """One policy. `lora` trains an adapter, `full` all weights; `frozen` serves `model` untrained; with `provider`, its
    roles keep the model that the application uses today.

    `model` is None for the run's model.
    """

    name: str
    kind: PolicyKind = "lora"
    lora: LoraSpec = LoraSpec()
    model: str | None = None

    @property
    def trained(self) -> bool:
        return self.kind in TRAINED


class Policies(msgspec.Struct, frozen=True):
    """The policies of a run and the policy of each role."""

    specs: Mapping[str, PolicySpec]
    roles: Mapping[str, str]

    @property
    def trained(self) -> list[str]:
        """The names of the trained policies."""
        return [name for name, spec in self.specs.items() if spec.trained]

    @property
    def learning(self) -> dict[str, str]:
        """The trained roles, and the policies that play them."""
        return {role: name for role, name in self.roles.items() if self.specs[name].trained}

    def bases(self, run_model: str) -> dict[str, list[str]]:
        """The names of the policies on each base model. The model of the run comes first, even without a policy.
        Policies of kind provider have no base model.
        """
        bases: dict[str, list[str]] = {run_model: []}
        for spec in self.specs.values():
            if spec.kind != "provider":
                bases.setdefault(spec.model or run_model, []).append(spec.name)
        return bases

    def roles_of(self, name: str) -> list[str]:
        """The roles that a policy plays."""
        return [role for role, player in self.roles.items() if player == name]

    def of(self, role: str) -> PolicySpec:
        """The policy that plays `role`. Raises ConfigError for a role that no policy plays."""
        try:
            return self.specs[self.roles[role]]
        except KeyError:
            raise ConfigError(
                "policies",
                role,
                f"has no policy; roles with one: {sorted(self.roles)}",
                "Add the role to [policies.roles], or use --policies shared.",
            ) from None


def models_text(bases: Mapping[str, Sequence[str]]) -> str:
    """The base models of a run, in words."""
    return f"the model{'s' if len(bases) > 1 else ''} {', '.join(bases)}"


STEPS_BETWEEN_SWAPS = 5
"""Twenty turns in a run of 100 steps, and enough steps between two for a policy to learn in its new role."""


def swapped_roles(roles: Mapping[str, str], ring: Sequence[str], step: int) -> dict[str, str]:
    """The policy of each role in a training step, if the roles of `ring` exchange their policies every
    STEPS_BETWEEN_SWAPS steps (CORY, arXiv 2410.06101: pioneer and observer exchange their models).

    `roles` has the policy of each role in step 0. At each exchange, a role gets the policy of the next role of the
    ring.
    """
    n_exchanges = step // STEPS_BETWEEN_SWAPS
    policy_of = dict(roles)
    for position, role in enumerate(ring):
        first_player = ring[(position + n_exchanges) % len(ring)]
        policy_of[role] = roles[first_player]
    return policy_of


def policies_for(layout: Literal["shared", "lora", "full"], roles: Sequence[str], lora: LoraSpec) -> Policies:
    """One policy for all roles (`shared`, a LoRA), or one LoRA (`lora`) or one model (`full`) per role."""
    if layout == "shared":
        return Policies({"shared": PolicySpec(name="shared", lora=lora)}, dict.fromkeys(roles, "shared"))
    specs = {role: PolicySpec(name=role, kind=layout, lora=lora) for role in roles}
    return Policies(specs, {role: role for role in roles})
