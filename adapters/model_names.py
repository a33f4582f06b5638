"""Choose the policy that answers a request to `cotune serve`, by the model name in the request.

A server sees no roles, only model names. An export keeps the model names that each role asked for in training
(`Manifest.models`). An application that asks for `gpt-4o-mini` therefore gets the policy of the role that asked for it
in training. `cotune.deployed` sees roles and does not need this module.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cotune.adapters.manifest import Manifest
from cotune.adapters.open_policies import LocalPolicies, ServedModel, base_of_unlisted_roles, served_base, served_policy
from cotune.errors import ConfigError
from cotune.near_names import did_you_mean, near_names
from cotune.records.policies import UNTRAINED


@dataclass(frozen=True)
class ModelNames:
    """The model names of a server. A name that is neither in `served` nor in `ambiguous` gets `default`, or a 404."""

    served: Mapping[str, ServedModel]
    """Model name -> policy: roles, names given by `--as`, and names that one role asked for in training."""
    ambiguous: Mapping[str, Sequence[str]]
    """Model name -> the roles that asked for it, which a server cannot tell apart."""
    default: ServedModel | None = None
    remedy: str = ""
    """The advice in the message of a 404."""
    left_to_provider: Sequence[str] = ()
    """Roles that training left to the application's provider: the server has no policy for them."""
    plain: bool = False
    """Whether the server has a plain model instead of an export; the user listed its names."""

    def find(self, model: str) -> ServedModel | None:
        """The policy that answers a model name; None for a name that gets a 404."""
        if model in self.served:
            return self.served[model]
        if model in self.ambiguous or model in self.left_to_provider:
            return None
        return self.default

    def fault(self, model: str) -> str:
        """Why no policy answers `model`, and how to change that."""
        if roles := self.ambiguous.get(model):
            return f"{_ambiguous_name_text(model, roles)}, or start the server with --as {model}=ROLE."
        unknown = f"There is no model {model!r} here; the models are: {', '.join(self.served)}."
        if model in self.left_to_provider:
            return f"{unknown} Training left role {model!r} to its provider."
        return f"{unknown} {self.remedy}".rstrip()

    def notes(self) -> list[str]:
        """Sentences printed when the server starts: the policy for unlisted names, and the names that get a 404."""
        lines = [_ambiguous_name_text(name, roles) for name, roles in self.ambiguous.items()]
        if self.default is not None:
            lines.append(f"any other name: {self.default.policy} ({self.default.kind}), {self.default.base}")
        elif not self.plain:
            lines.append(f"any other name is refused. {self.remedy}")
        return lines


def _ambiguous_name_text(name: str, roles: Sequence[str]) -> str:
    both = "both" if len(roles) == 2 else "all"
    return f"{', '.join(roles[:-1])} and {roles[-1]} {both} ask for {name}: use cotune.deployed"


def name_models(
    local: LocalPolicies, aliases: Mapping[str, str] | None = None, default: str = "", *, prompts: bool = False
) -> ModelNames:
    """Choose the policy of each model name that requests to a server may have.

    `aliases` map further names to roles. `default` names the policy for all other names, or is "base" for the untrained
    model. Without it, the only policy of an export answers all other names if it played every recorded role. With
    `prompts`, requests are edited by role, so each name must lead to exactly one role. Raises ConfigError for an alias
    or a default that the export does not have.
    """
    # Model name -> policy. The name of a role is also a model name.
    served = {**local.served, **_served_aliases(local, aliases or {})}
    manifest = local.manifest
    if manifest is None:
        if default:
            fault = "chooses among the policies of an export, and this is a plain model"
            raise ConfigError("default", default, fault, "Name each further model name with --role NAME.")
        remedy = "Start the server with --role NAME to give the model another name."
        return ModelNames(served, ambiguous={}, remedy=remedy, plain=True)

    # Recorded roles that no policy plays were answered by the untrained model in training, if the export has it
    # (`others`), and still are.
    untrained = local.others
    if untrained is not None:
        for role in manifest.models:
            if role not in served and role not in local.left_to_provider:
                served[role] = replace(untrained, name=role)

    # An application asks for names such as `gpt-4o-mini`, which in training led to one role or to several.
    requested, ambiguous = _requested_names(manifest, served, prompts)
    served |= requested

    policy_names = [policy.name for policy in manifest.policies if policy.base is not None]
    default_name = default or _policy_of_all_roles(manifest, prompts)
    remedy = f"Start the server with --default POLICY ({', '.join(policy_names)}) or --default {UNTRAINED.name}."
    return ModelNames(
        served,
        ambiguous,
        default=_default_model(manifest, default_name, policy_names),
        remedy=remedy,
        left_to_provider=local.left_to_provider,
    )


def _served_aliases(local: LocalPolicies, aliases: Mapping[str, str]) -> dict[str, ServedModel]:
    """The policy of each alias. Raises ConfigError for an alias of an unknown role, or with the name of a role."""
    served = {}
    for name, role in aliases.items():
        if role not in local.served:
            fault = f"names a role that is not served; the roles are {', '.join(local.served)}"
            raise ConfigError("aliases", f"{name}={role}", fault, did_you_mean(near_names(role, local.served)))
        if name in local.served:
            fault = f"gives a role another policy: {name} is the name of a role"
            raise ConfigError("aliases", f"{name}={role}", fault, "Leave it out, or choose another name.")
        served[name] = local.served[role]
    return served


def _requested_names(
    manifest: Manifest, served: Mapping[str, ServedModel], prompts: bool
) -> tuple[dict[str, ServedModel], dict[str, list[str]]]:
    """The model names that roles asked for in training, such as `gpt-4o-mini`, without the names in `served`.

    Returns two mappings: name -> policy, for names that lead to one policy, and name -> roles, for names that do not,
    because the roles that asked for them have different policies or, with edited `prompts`, different prompts. A name
    that only roles of the application's provider asked for is in neither.
    """
    roles_of_model: dict[str, list[str]] = {}
    for role, models in manifest.models.items():
        for model in models:
            roles_of_model.setdefault(model, []).append(role)

    unambiguous: dict[str, ServedModel] = {}
    ambiguous: dict[str, list[str]] = {}
    for name, roles in roles_of_model.items():
        if name in served:
            continue
        # None stands for the application's provider.
        policies = {served[role].policy if role in served else None for role in roles}
        # With edited prompts, even roles of one policy get different answers.
        if len(roles) > 1 and (prompts or len(policies) > 1):
            ambiguous[name] = roles
        elif roles[0] in served:
            # A call is counted and edited as its role, which a name of several roles does not tell.
            role = roles[0] if len(roles) == 1 else ""
            unambiguous[name] = replace(served[roles[0]], name=role)
    return unambiguous, ambiguous


def _policy_of_all_roles(manifest: Manifest, prompts: bool) -> str:
    """The name of the only policy of an export if it played every role that was recorded in training; empty otherwise.

    `prompts`: whether requests are answered with edited prompts.
    """
    if len(manifest.policies) != 1:
        return ""
    policy = manifest.policies[0]
    recorded_roles = manifest.models.keys()
    if policy.base is None or not recorded_roles:
        return ""
    roles_of_policy = [entry.role for entry in manifest.roles]
    plays_all_roles = recorded_roles <= set(roles_of_policy)
    if not plays_all_roles:
        return ""
    # Edited prompts differ by role, and an unlisted name does not tell the role.
    if prompts and len(roles_of_policy) > 1:
        return ""
    return policy.name


def _default_model(manifest: Manifest, default: str, choices: Sequence[str]) -> ServedModel | None:
    """The model that answers all other names: the policy that `default` names, or the untrained base for "base"; None
    for an empty `default`. `choices` are the names of the policies, for the error.
    """
    if not default:
        return None
    if default == UNTRAINED.name:
        return served_base(base_of_unlisted_roles(manifest))
    policy = next((p for p in manifest.policies if p.name == default and p.base is not None), None)
    if policy is None:
        fault = f"is not a policy of the export; choose from: {', '.join(choices)}, {UNTRAINED.name}"
        raise ConfigError("default", default, fault, did_you_mean(near_names(default, choices)))
    roles = [entry.role for entry in manifest.roles if entry.policy == policy.name]
    # A policy with one role answers as that role, so that its edited prompts apply.
    return served_policy(roles[0] if len(roles) == 1 else "", policy)
