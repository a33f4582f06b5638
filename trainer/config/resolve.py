"""What a configuration means for an application: its plan, its recipes and the policy of each role."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import msgspec

from cotune.algorithms.catalogue import recipe_class, takes_a_tree
from cotune.algorithms.policy_recipes import Recipes, check_together
from cotune.algorithms.run_recipe import policy_recipes
from cotune.algorithms.trial import check_own
from cotune.config.train import TrainConfig
from cotune.errors import ConfigError
from cotune.records.plans import Plan, PlanKind
from cotune.records.policies import Policies, PolicySpec, policies_for


def resolve_plan(config: TrainConfig, scorers: Sequence[str], workflow: str = "solve") -> tuple[Plan, Recipes, str]:
    """Return the plan and the recipes of a run, and a sentence that names both and says why.

    `scorers` are the roles with a scorer; `workflow` is the name of the workflow's function. Raises ConfigError for a
    tree plan without a scorer, for settings that do not fit the loss of a recipe, and for policies whose recipes cannot
    be used together.
    """
    # 1. The plan: by default `tree` if the roles have scorers, unless the recipe needs another one.
    default_kind: PlanKind = "independent"
    if scorers and (config.recipe is None or takes_a_tree(config.recipe)):
        default_kind = "tree"
    if config.recipe is not None and recipe_class(config.recipe).plan == "replay":
        default_kind = "replay"
    kind = config.plan.kind or default_kind
    plan = Plan(kind=kind, k=config.plan.k, select=config.plan.select)
    _check_policy_plans(config, kind)
    if kind == "tree" and not scorers:
        raise ConfigError(
            "plan.kind",
            kind,
            "needs a scorer; the workflow has none",
            f"Add @{workflow}.scorer(role) for at least one role, or use --plan replay or independent.",
        )

    # 2. The recipes.
    recipes = policy_recipes(config, kind)
    check_together(recipes)
    for method in recipes.every:
        if method.loss.token_loss and config.cluster.on_ray:
            fault = f"cannot be used on a cluster, whose learners do not have the file of {method.loss.token_loss}"
            raise ConfigError("recipe", method.name, fault, 'Set cluster.address = "none".')
        check_own(method)

    # 3. The sentence.
    if kind == "replay":
        reason = "a call is judged by the outcome of the episode that goes on from it"
    elif scorers:
        reason = f"scorers for {', '.join(sorted(scorers))}"
    else:
        reason = f"the workflow has no scorer, so each task runs {plan.k} times and the outcomes are compared"
    k_of_policies = [f"{policy.name} {policy.k}" for policy in config.policy if policy.k is not None]
    k = "; ".join([f"k={plan.k}", *k_of_policies])
    return plan, recipes, f"plan {kind} ({k}), {recipes.names}: {reason}"


def _check_policy_plans(config: TrainConfig, kind: PlanKind) -> None:
    """Raise ConfigError for a `k` or `select` of a [[policy]] table that has no effect under this plan."""
    for policy in config.policy:
        if policy.k is not None and kind == "independent":
            fault = (
                f"of policy {policy.name} cannot be used under the plan independent, which repeats whole episodes: all "
                "policies have the same K"
            )
            raise ConfigError("policy.k", policy.k, fault, "Set plan.k, or use --plan tree or replay.")
        if policy.select is not None and kind != "tree":
            fault = f"of policy {policy.name} has no effect under the plan {kind}, which draws one candidate for a call"
            raise ConfigError("policy.select", policy.select, fault, "Leave it out.")


def resolve_policies(
    config: TrainConfig, called_roles: Sequence[str], *, scored: Sequence[str] | None = None, workflow: str = "solve"
) -> Policies:
    """Return the policy of each role: by the [[policy]] tables, or without any by the layout `policies`.

    `called_roles` are the roles that have called so far. Only roles in `scored` can be trained (None: all); a layout
    leaves the others frozen. `workflow` is the name of the workflow's function. Raises ConfigError for roles without a
    policy, policies of unknown roles, and policies that cannot be trained.
    """
    all_roles = sorted({*called_roles, *config.roles})
    trainable = [role for role in all_roles if scored is None or role in scored]
    if not config.policy:
        policies = policies_for(config.policies, trainable, config.lora.spec)
        frozen_roles = [role for role in all_roles if role not in trainable]
        if not frozen_roles:
            return policies
        frozen = PolicySpec(name="frozen", kind="frozen")
        specs = {**policies.specs, "frozen": frozen}
        return Policies(specs, {**policies.roles, **dict.fromkeys(frozen_roles, "frozen")})

    policy_of_role: dict[str, str] = {}
    for policy in config.policy:
        policy_of_role |= dict.fromkeys(policy.roles, policy.name)
    for role in policy_of_role:
        if role not in all_roles:
            raise ConfigError(
                "policy.roles",
                role,
                f"is not a role of the application: {', '.join(all_roles)}",
                "Correct the name, or list it under `roles` if it shows only on some tasks.",
            )
    missing = [role for role in all_roles if role not in policy_of_role]
    if missing:
        raise ConfigError(
            "policy.roles",
            ", ".join(missing),
            "have no policy",
            'Add these roles to a policy; kind = "frozen" or "provider" leaves them untrained.',
        )
    if not any(spec.trained for spec in config.specs.values()):
        raise ConfigError("policy.kind", "all untrained", "leaves nothing to train", "Set one to lora or full.")
    for policy in config.policy:
        if policy.trained and not set(policy.roles) & set(trainable):
            raise ConfigError(
                "policy.kind",
                f"{policy.kind} for {policy.name}",
                "cannot be trained under the tree plan: none of its roles has a scorer",
                f"Add @{workflow}.scorer for one of {', '.join(policy.roles)}, or use --plan independent.",
            )
    return Policies(config.specs, policy_of_role)


def with_bases(config: TrainConfig, policies: Policies) -> Policies:
    """Return the policies of a checkpoint with the present locations of their base models, from the configuration."""
    models = {name: spec.model for name, spec in config.specs.items()}
    specs: dict[str, PolicySpec] = {}
    for name, spec in policies.specs.items():
        specs[name] = msgspec.structs.replace(spec, model=models.get(name))
    return Policies(specs, policies.roles)


def add_policies(
    config: TrainConfig, policies: Policies, roles: Sequence[str], *, scored: Collection[str] | None = None
) -> Policies:
    """Return the policies of a run with further ones for the `roles` that have none.

    The setting `policies` decides the new ones: one adapter per role, one policy for all, and so on. With `scored`,
    only these roles get a policy. Nothing is added if the configuration has [[policy]] tables, as these then name all
    policies, or if `other_roles` leaves further roles to the provider.
    """
    if config.policy or config.other_roles == "provider":
        return policies
    new_roles = [role for role in roles if role not in policies.roles and (scored is None or role in scored)]
    if not new_roles:
        return policies
    new_policies = policies_for(config.policies, new_roles, config.lora.spec)
    return Policies({**policies.specs, **new_policies.specs}, {**policies.roles, **new_policies.roles})
