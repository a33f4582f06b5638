"""Findings about an application before training, each made in one place for `cotune check` and the start of a run.
Findings about a machine (`cotune doctor`) have the same type."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from types import NoneType
from typing import Literal

import msgspec

from cotune.algorithms.learning_signal import learns_from, outcome_unused, scorers_unused, unknown_names
from cotune.algorithms.policy_recipes import Recipes
from cotune.config.rollouts import SamplingConfig
from cotune.config.train import TrainConfig
from cotune.episodes.episode import UNSEEN, Outcome
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, CotuneError, Outage, TooManyCalls, WorkflowError
from cotune.near_names import did_you_mean, near_names
from cotune.records.failure_cause import error_chain
from cotune.records.ids import candidate_id
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import error_origin, error_phrase
from cotune.sampling.protocol import UNSHAPED
from cotune.storage.protocol import Store
from cotune.tables import BAD, GOOD, QUIET

Level = Literal["blocks", "undecided", "warns", "note", "ok"]
STYLES: Mapping[Level, str] = {"blocks": BAD, "undecided": "yellow", "warns": "yellow", "note": QUIET, "ok": GOOD}
_LIMITS = ("max_tokens", "max_completion_tokens")
"""Parameters of a request that limit its answer."""
EPISODES = 3
"""Least number of episodes that run before training."""


class Finding(msgspec.Struct, frozen=True):
    """One fact to know before training."""

    level: Level
    """Whether it blocks training, leaves the verdict undecided, warns of a loss, is a note, or is ok."""
    about: str
    """The role, package or part that the finding is about."""
    text: str
    remedy: str = ""
    """The action to take; empty if there is nothing to do."""


def blocking_finding(error: CotuneError, about: str = "") -> Finding:
    """The finding of an error that training would raise."""
    return Finding("blocks", about, error.cause, error.remedy)


def rewards_by_role(store: Store, calls: Sequence[CallRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    """By role, the components that its scorer returned, with their lowest and highest value. Every role that called is
    in the result."""
    rewards: dict[str, dict[str, tuple[float, float]]] = {role: {} for role in sorted({call.role for call in calls})}
    for call in calls:
        candidates = [candidate_id(call.id, candidate.index) for candidate in call.candidates]
        rewards_of_role = rewards[call.role]
        for rewards_of_candidate in store.rewards(candidates).values():
            for name, value in rewards_of_candidate.items():
                low, high = rewards_of_role.get(name, (value, value))
                rewards_of_role[name] = (min(low, value), max(high, value))
    return rewards


def named_roles(config: TrainConfig, workflow: Workflow) -> set[str]:
    """The roles that a scorer or a [[policy]] table names. They need not have called yet."""
    roles = set(workflow.scorers)
    for policy in config.policy:
        roles.update(policy.roles)
    return roles


class RoleCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A role that called, and its part in training."""

    role: str
    calls: int
    policy: str
    """The name of the policy that plays it; empty if the policies cannot be resolved."""
    kind: str
    """The kind of this policy, such as lora or frozen."""
    scorer: bool
    """Whether the role has a scorer."""
    trained: bool
    reason: str = ""
    """Why it is not trained; empty if it is."""


def roles_of(
    calls: Sequence[CallRecord],
    policies: Policies | None,
    workflow: Workflow,
    able: Collection[str] | None,
) -> Iterator[RoleCheck]:
    """Yield the roles of these calls, and whether they are trained.

    Only roles in `able` can be trained (None: all). `policies` is None if the policies cannot be resolved.
    """
    for role in dict.fromkeys(call.role for call in calls):
        role_calls = [call for call in calls if call.role == role]
        spec = policies.of(role) if policies else None
        scorer = role in workflow.scorers
        reason = ""
        if spec is None:
            reason = "the policies cannot be resolved"
        elif spec.kind == "provider":
            reason = "left to the application's provider"
        elif able is not None and role not in able:
            reason = "no scorer"
        elif spec.kind == "frozen":
            reason = "its policy is frozen"
        elif all(call.status != "ok" for call in role_calls):
            reason = "all its calls failed"
        yield RoleCheck(
            role=role,
            calls=len(role_calls),
            policy=spec.name if spec else "",
            kind=spec.kind if spec else "",
            scorer=scorer,
            trained=not reason,
            reason=reason,
        )


def learning_findings(
    roles: Sequence[RoleCheck],
    local: Mapping[str, Collection[str]],
    outcome: Collection[str],
    recipes: Recipes,
    listed: Collection[str] = (),
) -> Iterator[Finding]:
    """Yield the rewards that each trained role learns from, misspelt names in a recipe, and rewards that train no role.

    `local` has the components of each role's scorer, `outcome` the components of the episodes' outcome. Roles in
    `listed` need not have called.
    """
    known_roles = [*listed, *(role.role for role in roles)]
    for recipe, roles_of_recipe in recipes.by_recipe(role.role for role in roles if role.trained):
        components = {role: local.get(role, ()) for role in roles_of_recipe}
        for role, text in learns_from(components, outcome, recipe).items():
            yield Finding("note", "rewards", f"{role} {text}")
        errors, notes = unknown_names(recipe, local, outcome, known_roles)
        yield from (blocking_finding(error, "rewards") for error in errors)
        yield from (Finding("warns", "rewards", note) for note in notes)
        for text, remedy in (outcome_unused(components, outcome, recipe), scorers_unused(components, recipe)):
            if text:
                yield Finding("warns", "rewards", text, remedy)


def call_findings(
    calls: Sequence[CallRecord], roles: Sequence[RoleCheck], plan: Plan, config: TrainConfig
) -> Iterator[Finding]:
    """Yield findings on calls that failed, and on request parameters that training replaces."""
    plans = config.plans_of(plan, config.named_roles)
    own_sampling = config.own_sampling(config.named_roles)
    for checked in roles:
        role = checked.role
        role_calls = [call for call in calls if call.role == role]
        failed = Counter(f"{call.status}: {call.error}" for call in role_calls if call.status != "ok")
        for reason, count in failed.items():
            yield Finding("warns", role, f"{count} of {len(role_calls)} calls are not trained on ({reason}).")
        unscored = Counter(call.error for call in role_calls if call.status == "ok" and call.error)
        for error, count in unscored.items():
            yield Finding("warns", role, f"its scorer failed on {count} of {len(role_calls)} calls: {error}")
        # The application's provider gets requests as they are.
        if checked.kind == "provider":
            continue
        role_plan = plans.get(role, plan)
        policy_temperature = own_sampling.get(role, {}).get("temperature")
        yield from _parameter_findings(checked, role_calls, role_plan, config, policy_temperature)
        if plan.kind == "tree" and any(call.streamed and len(call.candidates) > 1 for call in role_calls):
            text = f"streams; with {role_plan.k} candidates per call the answer comes at once, when one is chosen."
            yield Finding("note", role, text)


def _parameter_findings(
    checked: RoleCheck, calls: Sequence[CallRecord], plan: Plan, config: TrainConfig, policy_temperature: float | None
) -> Iterator[Finding]:
    """Yield findings on request parameters in the calls of one role that training replaces, or that replace a setting
    of training. `plan` is the plan of the role, `policy_temperature` the temperature that its [[policy]] sets."""
    role = checked.role
    requested: dict[str, list[float]] = {}
    for name in ("n", "temperature", "seed", *_LIMITS, *UNSHAPED):
        values = [call.params.get(name) for call in calls]
        requested[name] = sorted({value for value in values if isinstance(value, int | float)})

    n = max(requested["n"], default=1)
    if n > 1 and checked.trained:
        text = "only the first is trained"
        if plan.kind == "tree":
            text = f"{max(n, plan.k)} are drawn and compared"
        yield Finding("warns", role, f"asks for n = {n} choices; {text}.")
    temperature, setting = policy_temperature, "temperature of its [[policy]]"
    if policy_temperature is None:
        temperature, setting = config.sampling.temperature, "sampling.temperature"
    if requested["temperature"] and requested["temperature"] != [temperature]:
        text = f"asks for temperature {_join_numbers(requested['temperature'])}; training samples at"
        yield Finding("note", role, f"{text} {temperature:g} ({setting}).")
    limits = sorted({*requested["max_tokens"], *requested["max_completion_tokens"]})
    # The default limit is worth no note.
    if limits and config.sampling.max_tokens not in (SamplingConfig().max_tokens, *limits):
        text = f"asks for at most {_join_numbers(limits)} tokens itself; sampling.max_tokens ="
        yield Finding("note", role, f"{text} {config.sampling.max_tokens} does not apply to it.")
    for name, neutral in UNSHAPED.items():
        replaced = [value for value in requested[name] if value != neutral]
        if replaced:
            yield Finding("warns", role, f"asks for {name} {_join_numbers(replaced)}; training samples without it.")
    if requested["seed"]:
        text = f"asks for seed {_join_numbers(requested['seed'])}; training and evaluation mix it into a seed of each"
        yield Finding("note", role, f"{text} call's own.")


def _join_numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.15g}" for value in values)


def find_faults(
    workflow: Workflow,
    outcomes: Sequence[Outcome],
    calls: Sequence[CallRecord],
    rewards: Mapping[str, Collection[str]],
    plan: Plan,
    rare: Collection[str] = (),
) -> Iterator[CotuneError]:
    """Yield errors that make training on these episodes pointless, the worst first. `rewards` has the rewards of each
    role's scorer; `rare` roles need not have called."""
    outcome_faults = list(_outcome_faults(workflow, outcomes, calls))
    yield from outcome_faults
    for role in workflow.scorers:
        errors = [call.error for call in calls if call.role == role and call.status == "ok"]
        if errors and all(errors) and not rewards.get(role):
            yield WorkflowError(f"{errors[0]} This happened on all {len(errors)} calls.", "Nothing was trained.")
    # Under plan tree only roles with a scorer are trained, so at least one of them must have called.
    without_calls = [finding.about for finding in scorer_findings(workflow, calls, rare)]
    no_scored_role = bool(workflow.scorers) and len(without_calls) == len(workflow.scorers)
    if plan.kind == "tree" and no_scored_role and not outcome_faults:
        roles = sorted({call.role for call in calls})
        yield ConfigError(
            "scorer",
            ", ".join(without_calls),
            f"is not a role of the application; seen in {len(outcomes)} episodes: {', '.join(roles)}",
            f"{_name_remedy(without_calls[0], roles)} Under plan tree only roles with a scorer are trained.",
        )


def scorer_findings(workflow: Workflow, calls: Sequence[CallRecord], rare: Collection[str] = ()) -> Iterator[Finding]:
    """Yield scorers of roles that have not called: misspelt, or seldom needed. `rare` roles need not have called."""
    calling_roles = sorted({call.role for call in calls})
    for role in workflow.scorers:
        if calls and role not in calling_roles and role not in rare:
            text = f"has a scorer and made no call; these did: {', '.join(calling_roles)}."
            yield Finding("warns", role, text, _name_remedy(role, calling_roles))


def _name_remedy(role: str, calling_roles: Collection[str]) -> str:
    suggestion = did_you_mean(near_names(role, calling_roles, most=2, cutoff=0.5))
    return f"{suggestion} Correct the name, or list it under `roles` if it calls only on some tasks.".strip()


def _outcome_faults(
    workflow: Workflow, outcomes: Sequence[Outcome], calls: Sequence[CallRecord]
) -> Iterator[CotuneError]:
    """Yield the error that makes training pointless, if there is one: every episode failed, the workflow made no call,
    or all of its calls failed."""
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failed = [call for call in calls if call.status != "ok"]
    # Training may teach the policy to stop calling.
    too_many_calls = any(isinstance(error, TooManyCalls) for error in errors)
    if len(errors) == len(outcomes) and not too_many_calls:
        yield _error_of_all_episodes(errors, calls, failed)
    elif not calls:
        cause = f"The workflow {workflow.name!r} made no LLM call that cotune can see."
        remedy = UNSEEN
        # An error that the workflow caught may be the reason why it made no call.
        swallowed: list[BaseException] = []
        for outcome in outcomes:
            swallowed += outcome.live.notes.get("raised", ())
        if swallowed:
            cause += f" It swallowed {error_phrase(swallowed[0])}{error_origin(swallowed[0])}."
            remedy = "Let the error through, and fix it."
        yield WorkflowError(cause, remedy)
    elif len(failed) == len(calls):
        yield WorkflowError(
            f"All {len(calls)} calls of the workflow {workflow.name!r} failed; the first: {failed[0].error}",
            "Nothing was trained.",
        )


def _error_of_all_episodes(
    errors: Sequence[CotuneError], calls: Sequence[CallRecord], failed: Sequence[CallRecord]
) -> CotuneError:
    """The first error of a workflow that fails in every episode, with the causes that its calls show.

    It names the call that failed, unseen clients if no call was made, and the limit of tokens if most answers were cut.
    An outage is named only if every episode ended in one.
    """
    failed_call = next((call for call in failed if call.status != "cancelled"), None)
    errors_of_workflow = [error for error in errors if not isinstance(error, Outage)]
    if not errors_of_workflow:
        return _outage_of_all_episodes(errors, failed_call)
    first = errors_of_workflow[0]
    cause = first.cause
    remedy = first.remedy

    # 1. What is known of all episodes: none made a call, or enough episodes failed to tell how many answers were cut.
    if not calls:
        cause += " It made no LLM call that cotune can see."
        # A built-in error other than RuntimeError is usually a mistake in the application. Any other error, or one of
        # the network, may come from a client that cotune does not see and that got no answer.
        raised_by = first.__cause__
        is_mistake = type(raised_by).__module__ == "builtins" and not isinstance(raised_by, RuntimeError | NoneType)
        if not is_mistake or any(isinstance(error, OSError) for error in error_chain(raised_by)):
            remedy = f"{remedy} {UNSEEN}".strip()
    elif len(errors) > EPISODES:
        cause += f" All {len(errors)} of the first episodes failed."
        remedy += " If an answer of the model breaks it: have the workflow return a low reward."
        finish_reasons: list[str] = []
        for call in calls:
            finish_reasons += [candidate.finish_reason for candidate in call.candidates]
        at_limit = finish_reasons.count("length")
        if at_limit * 2 > len(finish_reasons):
            remedy += f" {at_limit} of {len(finish_reasons)} answers ended at their limit of tokens: "
            remedy += "raise sampling.max_tokens, or the application's."

    # 2. The call that failed, unless the first error names it.
    if failed_call is not None and first.cause not in str(failed_call.error):
        # The error of the call is shown once, at the end.
        if failed_call.error:
            cause = cause.replace(failed_call.error, "...")
        cause += f" The call of role {failed_call.role!r} failed: {failed_call.error}"
    if (cause, remedy) == (first.cause, first.remedy):
        return first
    error = WorkflowError(cause, remedy)
    error.__cause__ = first
    return error


def _outage_of_all_episodes(outages: Sequence[CotuneError], failed_call: CallRecord | None) -> CotuneError:
    """The outage that the application reports in every episode, with the call that failed.

    The application names the service that is down. If a call failed, this service may be its model.
    """
    first = outages[0]
    if failed_call is None:
        return first
    cause = first.cause
    if len(outages) > 1:
        cause += f" All {len(outages)} of the first episodes failed."
    cause += f" The call of role {failed_call.role!r} failed: {failed_call.error}"
    error = Outage(cause, first.remedy)
    error.__cause__ = first
    return error
