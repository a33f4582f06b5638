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
from cotune.errors import ConfigError, CotuneError, TooManyCalls, WorkflowError
from cotune.near_names import did_you_mean, near_names
from cotune.records.failure_cause import chain
from cotune.records.ids import candidate_id
from cotune.records.plans import Plan
from cotune.records.policies import Policies
from cotune.records.structs import CallRecord
from cotune.runtime.user_code import origin, phrase
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
    """One thing to know before training: it `blocks`, leaves the verdict `undecided`, `warns` of a loss, is a `note`,
    or is `ok`. `remedy` says what to do."""

    level: Level
    about: str
    text: str
    remedy: str = ""


def blocking(error: CotuneError, about: str = "") -> Finding:
    """The finding of an error that training would raise."""
    return Finding("blocks", about, error.cause, error.remedy)


def rewards_by_role(store: Store, calls: Sequence[CallRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    """By role, every role that called: the components that its scorer returned, with their lowest and highest value."""
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
    """A role that called. `reason` says why it is not trained; empty where it is."""

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
    """The roles of calls, and whether they are trained: of those in `able` (None: all). `policies` is None where they
    cannot be resolved."""
    for role in dict.fromkeys(call.role for call in calls):
        own = [call for call in calls if call.role == role]
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
        elif all(call.status != "ok" for call in own):
            reason = "all its calls failed"
        name, kind = (spec.name, spec.kind) if spec else ("", "")
        yield RoleCheck(
            role=role, calls=len(own), policy=name, kind=kind, scorer=scorer, trained=not reason, reason=reason
        )


def learning_findings(
    roles: Sequence[RoleCheck],
    local: Mapping[str, Collection[str]],
    outcome: Collection[str],
    recipes: Recipes,
    listed: Collection[str] = (),
) -> Iterator[Finding]:
    """The rewards that each trained role learns from, names that a recipe misspells, and rewards that train nobody.

    `local` are the components of each role's scorer, `outcome` those of the episodes; `listed` roles need not have
    called.
    """
    every = [*listed, *(one.role for one in roles)]
    for recipe, among in recipes.by_recipe(one.role for one in roles if one.trained):
        own = {role: local.get(role, ()) for role in among}
        for role, text in learns_from(own, outcome, recipe).items():
            yield Finding("note", "rewards", f"{role} {text}")
        errors, notes = unknown_names(recipe, local, outcome, every)
        yield from (blocking(error, "rewards") for error in errors)
        yield from (Finding("warns", "rewards", note) for note in notes)
        for text, remedy in (outcome_unused(own, outcome, recipe), scorers_unused(own, recipe)):
            if text:
                yield Finding("warns", "rewards", text, remedy)


def call_findings(
    calls: Sequence[CallRecord], roles: Sequence[RoleCheck], plan: Plan, config: TrainConfig
) -> Iterator[Finding]:
    """Calls that failed, and requests that training answers in another way."""
    for checked in roles:
        role, own = checked.role, [call for call in calls if call.role == checked.role]
        failed = Counter(f"{call.status}: {call.error}" for call in own if call.status != "ok")
        for reason, count in failed.items():
            yield Finding("warns", role, f"{count} of {len(own)} calls are not trained on ({reason}).")
        unscored = Counter(call.error for call in own if call.status == "ok" and call.error)
        for error, count in unscored.items():
            yield Finding("warns", role, f"its scorer failed on {count} of {len(own)} calls: {error}")
        if checked.kind == "provider":
            continue
        asked = {
            name: sorted({value for call in own if isinstance(value := call.params.get(name), int | float)})
            for name in ("n", "temperature", "seed", *_LIMITS, *UNSHAPED)
        }
        if (n := max(asked["n"], default=1)) > 1 and checked.trained:
            drawn = f"{max(n, plan.k)} are drawn and compared" if plan.kind == "tree" else "only the first is trained"
            yield Finding("warns", role, f"asks for n = {n} choices; {drawn}.")
        if asked["temperature"] and asked["temperature"] != [config.sampling.temperature]:
            text = f"asks for temperature {_listed(asked['temperature'])}; training samples at"
            yield Finding("note", role, f"{text} {config.sampling.temperature:g} (sampling.temperature).")
        own_limits = sorted({limit for name in _LIMITS for limit in asked[name]})
        if own_limits and config.sampling.max_tokens not in (SamplingConfig().max_tokens, *own_limits):
            text = f"asks for at most {_listed(own_limits)} tokens itself; sampling.max_tokens ="
            yield Finding("note", role, f"{text} {config.sampling.max_tokens} (--max-tokens) does not apply to it.")
        for name, plain in UNSHAPED.items():
            if values := [value for value in asked[name] if value != plain]:
                yield Finding("warns", role, f"asks for {name} {_listed(values)}; training samples without it.")
        if asked["seed"]:
            text = f"asks for seed {_listed(asked['seed'])}; training and evaluation mix it into a seed of each call's"
            yield Finding("note", role, f"{text} own.")
        if plan.kind == "tree" and any(call.streamed and len(call.candidates) > 1 for call in own):
            text = f"streams; with {plan.k} candidates per call the answer comes at once, when one is chosen."
            yield Finding("note", role, text)


def _listed(values: Iterable[float]) -> str:
    return ", ".join(f"{value:.15g}" for value in values)


def faults(
    workflow: Workflow,
    outcomes: Sequence[Outcome],
    calls: Sequence[CallRecord],
    rewards: Mapping[str, Collection[str]],
    plan: Plan,
    rare: Collection[str] = (),
) -> Iterator[CotuneError]:
    """Errors that make training on these episodes pointless, worst first. `rewards` are those of each role's scorer;
    `rare` roles need not have called."""
    ended_early = list(_outcome_faults(workflow, outcomes, calls))
    yield from ended_early
    for role in workflow.scorers:
        errors = [call.error for call in calls if call.role == role and call.status == "ok"]
        if errors and all(errors) and not rewards.get(role):
            yield WorkflowError(f"{errors[0]} So it went on all {len(errors)} calls.", "Nothing was trained.")
    silent = [finding.about for finding in scorer_findings(workflow, calls, rare)]
    if plan.kind == "tree" and not ended_early and silent and len(silent) == len(workflow.scorers):
        seen = sorted({call.role for call in calls})
        yield ConfigError(
            "scorer",
            ", ".join(silent),
            f"is not a role of the application; seen in {len(outcomes)} episodes: {', '.join(seen)}",
            f"{_name_remedy(silent[0], seen)} Under plan tree only roles with a scorer are trained.",
        )


def scorer_findings(workflow: Workflow, calls: Sequence[CallRecord], rare: Collection[str] = ()) -> Iterator[Finding]:
    """Scorers of roles that have not called: misspelt, or seldom needed. `rare` roles need not have called."""
    seen = sorted({call.role for call in calls})
    for role in workflow.scorers:
        if calls and role not in seen and role not in rare:
            text = f"has a scorer and made no call; these did: {', '.join(seen)}."
            yield Finding("warns", role, text, _name_remedy(role, seen))


def _name_remedy(role: str, seen: Collection[str]) -> str:
    meant = did_you_mean(near_names(role, seen, most=2, cutoff=0.5))
    return f"{meant} Correct the name, or list it under `roles` if it calls only on some tasks.".strip()


def _outcome_faults(
    workflow: Workflow, outcomes: Sequence[Outcome], calls: Sequence[CallRecord]
) -> Iterator[CotuneError]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failed = [call for call in calls if call.status != "ok"]
    endless = any(isinstance(error, TooManyCalls) for error in errors)  # training may teach the policy to end
    if len(errors) == len(outcomes) and not endless:
        yield _every_time(errors, calls, failed)
    elif not calls:
        swallowed: Iterable[BaseException] = [e for one in outcomes for e in one.live.notes.get("raised", ())]
        text = next((f" It swallowed {phrase(error)}{origin(error)}." for error in swallowed), "")
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
    """The first error of a workflow that fails every time, with causes that its calls tell."""
    first, raised_by = errors[0], errors[0].__cause__
    cause, remedy = first.cause, first.remedy
    if not calls:  # a mistake of its own, or a client that is not seen and got no answer
        cause += " It made no LLM call that cotune can see."
        mistake = type(raised_by).__module__ == "builtins" and not isinstance(raised_by, RuntimeError | NoneType)
        if not mistake or any(isinstance(one, OSError) for one in chain(raised_by)):
            remedy = f"{remedy} {UNSEEN}".strip()
    elif len(errors) > EPISODES:
        cause += f" All {len(errors)} episodes looked at failed."
        remedy += " If an answer of the model breaks it: have the workflow return a low reward."
        ends = [candidate.finish_reason for call in calls for candidate in call.candidates]
        if (cut := ends.count("length")) * 2 > len(ends):
            remedy += (
                f" {cut} of {len(ends)} answers ended at their limit of tokens: raise sampling.max_tokens, or the "
            )
            remedy += "application's."
    call = next((call for call in failed if call.status != "cancelled"), None)
    if call is not None and first.cause not in str(call.error):
        cause = cause.replace(call.error, "...") if call.error else cause
        cause += f" The call of role {call.role!r} failed: {call.error}"
    if (cause, remedy) == (first.cause, first.remedy):
        return first
    error = WorkflowError(cause, remedy)
    error.__cause__ = first
    return error
