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
"""Run before training, at least."""


class Finding(msgspec.Struct, frozen=True):
    """One fact to know before training: it `blocks`, leaves the verdict `undecided`, `warns` of a loss, is a `note`,
    or is `ok`. `remedy` is the action to take."""

    level: Level
    about: str
    text: str
    remedy: str = ""


def blocking_finding(error: CotuneError, about: str = "") -> Finding:
    """The finding of an error that training would raise."""
    return Finding("blocks", about, error.cause, error.remedy)


def rewards_by_role(store: Store, calls: Sequence[CallRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    """Return the components that each role's scorer returned, with their lowest and highest value. Every role that
    called is listed."""
    rewards: dict[str, dict[str, tuple[float, float]]] = {role: {} for role in sorted({call.role for call in calls})}
    for call in calls:
        for named in store.rewards(candidate_id(call.id, c.index) for c in call.candidates).values():
            for name, value in named.items():
                low, high = rewards[call.role].get(name, (value, value))
                rewards[call.role][name] = (min(low, value), max(high, value))
    return rewards


def named_roles(config: TrainConfig, workflow: Workflow) -> set[str]:
    """Roles that a scorer or a policy names: they need not have called yet."""
    return {*workflow.scorers, *(role for policy in config.policy for role in policy.roles)}


class RoleCheck(msgspec.Struct, frozen=True, kw_only=True):
    """A role that called. `reason` says why it is not trained; it is empty if it is trained."""

    role: str
    calls: int
    policy: str
    kind: str
    scorer: bool
    trained: bool
    reason: str = ""


def roles_of(
    calls: Sequence[CallRecord],
    policies: Policies | None,
    workflow: Workflow,
    able: Collection[str] | None,
) -> Iterator[RoleCheck]:
    """Yield the roles of calls, and whether they are trained. Only roles in `able` can be (None: all). `policies` is
    None if the policies cannot be resolved."""
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
    every = [*listed, *(role.role for role in roles)]
    for recipe, roles_of_recipe in recipes.by_recipe(role.role for role in roles if role.trained):
        components = {role: local.get(role, ()) for role in roles_of_recipe}
        for role, text in learns_from(components, outcome, recipe).items():
            yield Finding("note", "rewards", f"{role} {text}")
        errors, notes = unknown_names(recipe, local, outcome, every)
        yield from (blocking_finding(error, "rewards") for error in errors)
        yield from (Finding("warns", "rewards", note) for note in notes)
        for text, remedy in (outcome_unused(components, outcome, recipe), scorers_unused(components, recipe)):
            if text:
                yield Finding("warns", "rewards", text, remedy)


def call_findings(
    calls: Sequence[CallRecord], roles: Sequence[RoleCheck], plan: Plan, config: TrainConfig
) -> Iterator[Finding]:
    """Yield calls that failed, and request parameters that training replaces."""
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
        if checked.kind == "provider":
            continue

        # The values of each parameter in the requests of the role.
        requested: dict[str, list[float]] = {}
        for name in ("n", "temperature", "seed", *_LIMITS, *UNSHAPED):
            values = [call.params.get(name) for call in role_calls]
            requested[name] = sorted({value for value in values if isinstance(value, int | float)})
        if (n := max(requested["n"], default=1)) > 1 and checked.trained:
            drawn = "only the first is trained"
            if plan.kind == "tree":
                drawn = f"{max(n, plans.get(role, plan).k)} are drawn and compared"
            yield Finding("warns", role, f"asks for n = {n} choices; {drawn}.")
        own_temperature = own_sampling.get(role, {}).get("temperature")
        temperature = config.sampling.temperature if own_temperature is None else own_temperature
        if requested["temperature"] and requested["temperature"] != [temperature]:
            setting = "sampling.temperature" if own_temperature is None else "temperature of its [[policy]]"
            text = f"asks for temperature {_listed(requested['temperature'])}; training samples at"
            yield Finding("note", role, f"{text} {temperature:g} ({setting}).")
        role_limits = sorted({*requested["max_tokens"], *requested["max_completion_tokens"]})
        if role_limits and config.sampling.max_tokens not in (SamplingConfig().max_tokens, *role_limits):
            text = f"asks for at most {_listed(role_limits)} tokens itself; sampling.max_tokens ="
            yield Finding("note", role, f"{text} {config.sampling.max_tokens} (--max-tokens) does not apply to it.")
        for name, neutral in UNSHAPED.items():
            if shaping := [value for value in requested[name] if value != neutral]:
                yield Finding("warns", role, f"asks for {name} {_listed(shaping)}; training samples without it.")
        if requested["seed"]:
            text = f"asks for seed {_listed(requested['seed'])}; training and evaluation mix it into a seed of each"
            yield Finding("note", role, f"{text} call's own.")
        if plan.kind == "tree" and any(call.streamed and len(call.candidates) > 1 for call in role_calls):
            k = plans.get(role, plan).k
            text = f"streams; with {k} candidates per call the answer comes at once, when one is chosen."
            yield Finding("note", role, text)


def _listed(values: Iterable[float]) -> str:
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
    ended_early = list(_outcome_faults(workflow, outcomes, calls))
    yield from ended_early
    for role in workflow.scorers:
        errors = [call.error for call in calls if call.role == role and call.status == "ok"]
        if errors and all(errors) and not rewards.get(role):
            yield WorkflowError(f"{errors[0]} This happened on all {len(errors)} calls.", "Nothing was trained.")
    silent = [finding.about for finding in scorer_findings(workflow, calls, rare)]
    if plan.kind == "tree" and not ended_early and silent and len(silent) == len(workflow.scorers):
        roles = sorted({call.role for call in calls})
        yield ConfigError(
            "scorer",
            ", ".join(silent),
            f"is not a role of the application; seen in {len(outcomes)} episodes: {', '.join(roles)}",
            f"{_name_remedy(silent[0], roles)} Under plan tree only roles with a scorer are trained.",
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
    endless = any(isinstance(error, TooManyCalls) for error in errors)  # training may teach the policy to end
    if len(errors) == len(outcomes) and not endless:
        yield _every_time(errors, calls, failed)
    elif not calls:
        # An error that the workflow caught may be the reason why it made no call.
        swallowed: list[BaseException] = []
        for outcome in outcomes:
            swallowed += outcome.live.notes.get("raised", ())
        text = next((f" It swallowed {error_phrase(error)}{error_origin(error)}." for error in swallowed), "")
        remedy = "Let the error through, and fix it." if text else UNSEEN
        yield WorkflowError(f"The workflow {workflow.name!r} made no LLM call that cotune can see.{text}", remedy)
    elif len(failed) == len(calls):
        yield WorkflowError(
            f"All {len(calls)} calls of the workflow {workflow.name!r} failed; the first: {failed[0].error}",
            "Nothing was trained.",
        )


def _every_time(
    errors: Sequence[CotuneError], calls: Sequence[CallRecord], failed: Sequence[CallRecord]
) -> CotuneError:
    """The first error of a workflow that fails in every episode, with the causes that its calls show.

    It names the call that failed, unseen clients if no call was made, and the limit of tokens if most answers were cut.
    An outage is named only if every episode ended in one.
    """
    failed_call = next((call for call in failed if call.status != "cancelled"), None)
    others = [error for error in errors if not isinstance(error, Outage)]
    if not others:
        return _outage_every_time(errors, failed_call)
    first = others[0]
    raised_by = first.__cause__
    cause = first.cause
    remedy = first.remedy
    if not calls:
        # A mistake in the application, or a client that cotune does not see and that got no answer.
        cause += " It made no LLM call that cotune can see."
        mistake = type(raised_by).__module__ == "builtins" and not isinstance(raised_by, RuntimeError | NoneType)
        if not mistake or any(isinstance(error, OSError) for error in error_chain(raised_by)):
            remedy = f"{remedy} {UNSEEN}".strip()
    elif len(errors) > EPISODES:
        cause += f" All {len(errors)} of the first episodes failed."
        remedy += " If an answer of the model breaks it: have the workflow return a low reward."
        ends: list[str] = []
        for call in calls:
            ends += [candidate.finish_reason for candidate in call.candidates]
        if (cut := ends.count("length")) * 2 > len(ends):
            remedy += (
                f" {cut} of {len(ends)} answers ended at their limit of tokens: raise sampling.max_tokens, or the "
            )
            remedy += "application's."
    if failed_call is not None and first.cause not in str(failed_call.error):
        cause = cause.replace(failed_call.error, "...") if failed_call.error else cause
        cause += f" The call of role {failed_call.role!r} failed: {failed_call.error}"
    if (cause, remedy) == (first.cause, first.remedy):
        return first
    error = WorkflowError(cause, remedy)
    error.__cause__ = first
    return error


def _outage_every_time(outages: Sequence[CotuneError], failed_call: CallRecord | None) -> CotuneError:
    """The outage that the application reports in every episode.

    The application knows what is down, so its clients and its answers are not the cause. A call that failed may be: an
    application may report its model as the service that is down.
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
