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
    """Plan and recipes, with a sentence that says why. `workflow` is the name of its function.

    Raises ConfigError for a tree plan without a scorer, for settings that do not fit the loss of a recipe, and for
    policies whose recipes do not go together.
    """
    branches = bool(scorers) and (config.recipe is None or takes_a_tree(config.recipe))
    usual: PlanKind = "tree" if branches else "independent"
    if config.recipe is not None and recipe_class(config.recipe).plan == "replay":
        usual = "replay"
    kind = config.plan.kind or usual
    plan = Plan(kind=kind, k=config.plan.k, select=config.plan.select)
    _check_policy_plans(config, kind)
    if kind == "tree" and not scorers:
        raise ConfigError(
            "plan.kind",
            kind,
            "needs a scorer; the workflow has none",
            f"Add @{workflow}.scorer(role) for at least one role, or use --plan replay or independent.",
        )
    recipes = policy_recipes(config, kind)
    check_together(recipes)
    for chosen in recipes.every:
        if chosen.loss.token_loss and config.cluster.on_ray:
            fault = f"cannot be used on a cluster, whose learners do not have the file of {chosen.loss.token_loss}"
            raise ConfigError("recipe", chosen.name, fault, 'Set cluster.address = "none".')
        check_own(chosen)
    if kind == "replay":
        why = "a call is judged by the outcome of the episode that goes on from it"
    elif scorers:
        why = f"scorers for {', '.join(sorted(scorers))}"
    else:
        why = f"the workflow has no scorer, so each task runs {plan.k} times and the outcomes are compared"
    own_k = [f"{policy.name} {policy.k}" for policy in config.policy if policy.k is not None]
    k = "; ".join([f"k={plan.k}", *own_k])
    return plan, recipes, f"plan {kind} ({k}), {recipes.names}: {why}"


def _check_policy_plans(config: TrainConfig, kind: PlanKind) -> None:
    """Raises ConfigError for a K or a choice of a policy's own that the plan has no use for."""
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
    config: TrainConfig, seen: Sequence[str], *, scored: Sequence[str] | None = None, workflow: str = "solve"
) -> Policies:
    """The policy of each role. `scored`: the roles that can be trained (None: all); a layout leaves the others
    frozen. `workflow` is the name of its function.

    Raises ConfigError for roles without a policy and policies for unknown roles.
    """
    known = sorted({*seen, *config.roles})
    able = [role for role in known if scored is None or role in scored]
    if not config.policy:
        laid = policies_for(config.policies, able, config.lora.spec)
        rest = [role for role in known if role not in able]
        if not rest:
            return laid
        frozen = PolicySpec(name="frozen", kind="frozen")
        return Policies({**laid.specs, "frozen": frozen}, {**laid.roles, **dict.fromkeys(rest, "frozen")})
    specs = config.specs
    roles = {role: p.name for p in config.policy for role in p.roles}
    for role in roles:
        if role not in known:
            raise ConfigError(
                "policy.roles",
                role,
                f"is not a role of the application: {', '.join(known)}",
                "Correct the name, or list it under `roles` if it shows only on some tasks.",
            )
    missing = [role for role in known if role not in roles]
    if missing:
        raise ConfigError(
            "policy.roles",
            ", ".join(missing),
            "have no policy",
            'Add these roles to a policy; kind = "frozen" or "provider" leaves them untrained.',
        )
    if not any(spec.trained for spec in specs.values()):
        raise ConfigError("policy.kind", "all untrained", "leaves nothing to train", "Set one to lora or full.")
    for p in config.policy:
        if p.trained and not set(p.roles) & set(able):
            raise ConfigError(
                "policy.kind",
                f"{p.kind} for {p.name}",
                "cannot be trained under the tree plan: none of its roles has a scorer",
                f"Add @{workflow}.scorer for one of {', '.join(p.roles)}, or use --plan independent.",
            )
    return Policies(specs, roles)


def with_bases(config: TrainConfig, policies: Policies) -> Policies:
    """`policies` of a checkpoint, with their base models where the configuration has them now."""
    models = {name: spec.model for name, spec in config.specs.items()}
    specs = {n: msgspec.structs.replace(spec, model=models.get(n)) for n, spec in policies.specs.items()}
    return Policies(specs, policies.roles)


def join_policies(
    config: TrainConfig, policies: Policies, roles: Sequence[str], *, scored: Collection[str] | None = None
) -> Policies:
    """Add policies for `roles` that have none, by the run's layout (one adapter per role, one shared policy, ...).

    Nothing is added if [[policy]] tables name all policies, or if `other_roles` leaves further roles to the provider.
    With `scored`, only these roles get a policy.
    """
    new_roles = [role for role in roles if role not in policies.roles and (scored is None or role in scored)]
    if not new_roles or config.policy or config.other_roles == "provider":
        return policies
    added = policies_for(config.policies, new_roles, config.lora.spec)
    return Policies({**policies.specs, **added.specs}, {**policies.roles, **added.roles})
