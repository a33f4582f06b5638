"""Preflight: a few episodes with the untrained model find the roles and the mistakes that are worth finding early."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

import msgspec

from cotune.algorithms.learning_signal import learns_from, outcome_unused, scorers_unused, unknown_names
from cotune.algorithms.recipes import Recipe
from cotune.episodes.episode import UNSEEN, EpisodeOptions, Outcome, run_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError, CotuneError, WorkflowError
from cotune.judging.episodes import judge_episodes
from cotune.near_names import did_you_mean, near_names
from cotune.recording.app_parts import Part, Parts
from cotune.records.blame import chain
from cotune.records.policies import UNTRAINED, Policies
from cotune.records.structs import CallRecord, Episode, Task, candidate_id
from cotune.runtime.user_code import origin, phrase
from cotune.sampling.protocol import ChatFormat, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.protocol import Store
from cotune.trainer.config.train import TrainConfig
from cotune.trainer.rollout.judging import Bench

EPISODES = 3
MOST_EPISODES = 16
"""Run while every one fails by what the untrained model says: on a hard task most do."""
MOST_SECONDS = 60.0
"""After this time no episode beyond the first `EPISODES` begins."""


@dataclass(frozen=True)
class PreflightReport:
    """What the episodes of the preflight show."""

    rewards: Mapping[str, Collection[str]]
    """By role, every role that called: names of the reward components that its scorer returned."""
    outcome: Sequence[str]
    """Names of the rewards that the episodes ended with."""
    notes: Sequence[str]
    """What the user should know."""
    unseen: Sequence[str] = ()
    """Roles of the application that have not called yet, and that a scorer or a policy names."""

    @property
    def roles(self) -> list[str]:
        return [*self.rewards, *self.unseen]

    def lessons(self, policies: Policies, recipe: Recipe) -> list[str]:
        """What each trained role learns from, and what nobody does. Raises ConfigError where the recipe misspells a
        reward or a role."""
        errors, notes = unknown_names(recipe, self.rewards, self.outcome, [*self.roles, *policies.roles])
        for error in errors:
            raise error
        trained = {role: names for role, names in self.rewards.items() if policies.of(role).trained}
        said = [f"{role} {text}" for role, text in learns_from(trained, self.outcome, recipe).items()]
        unused = outcome_unused(trained, self.outcome, recipe), scorers_unused(trained, recipe)
        return [*said, *notes, *(" ".join(filter(None, found)) for found in unused)]


async def preflight(
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    store: Store,
    sampler: Sampler,
    chat: ChatFormat,
    say: Callable[[str], None],
) -> PreflightReport:
    """Run the first tasks once, and further ones while each fails by the policy's doing. `say` is called before each.

    Raises WorkflowError for an application that makes no call, a workflow that fails on every task, a scorer that
    fails on every call; ConfigError for a scorer of a role that never calls.
    """
    plan, recipe, _ = config.resolve_plan(list(workflow.scorers))
    provider = [role for policy in config.policy if policy.kind == "provider" for role in policy.roles]
    responder = PolicyResponder(
        sampler,
        chat,
        {},
        plan=msgspec.structs.replace(plan, k=2),
        scorers=workflow.scorers,
        attribution=recipe.attribution,
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.sampling.timeout),
        override={"temperature": config.sampling.temperature},
        provider_roles=provider,
        others=UNTRAINED,
        seed=config.seed,
    )
    outcomes: list[Outcome] = []
    parts = Parts()
    started = time.monotonic()
    usual = min(EPISODES, len(tasks)) if workflow.episode_judge is None else EPISODES
    for number in range(MOST_EPISODES):
        rollout, place = divmod(number, len(tasks))
        if workflow.episode_judge is not None:  # which has something to compare in two episodes of a task
            place, rollout = divmod(number, 2)
            place %= len(tasks)
        if number >= usual and not (_worth_another_look(outcomes) and time.monotonic() - started < MOST_SECONDS):
            break
        of = usual if number < usual else f"at most {MOST_EPISODES}, as each has failed"
        say(f"looking at the application: episode {number + 1} of {of} ...")
        outcomes.append(
            await run_episode(
                workflow,
                tasks[place],
                sink=store,
                responder=responder,
                options=EpisodeOptions(phase="check", rollout=rollout, timeout=config.episode_timeout, parts=parts),
            )
        )
    store.flush()
    notes: list[str] = []
    judged: list[Episode] = []
    if workflow.episode_judge is not None:
        bench = Bench(workflow=workflow, store=store, responder=responder, timeout=config.episode_timeout)
        ran = [outcome.episode for outcome in outcomes]
        errors = await judge_episodes(workflow.episode_judge, store, ran, bench.ask)
        notes = [f"the judge gave {count} episodes no outcome: {text}" for text, count in errors.items()]
        judged = bench.episodes
    ended = store.rewards(outcome.episode.id for outcome in outcomes)
    calls = [call for episode in [*(o.episode for o in outcomes), *judged] for call in store.calls(episode.id)]
    rewards = rewards_by_role(store, calls)
    idle = [part for part in parts.known if not parts.ran(part)]
    unseen = unseen_roles(config, workflow, idle, rewards)
    for fault in faults(workflow, outcomes, calls, rewards, [*config.roles, *unseen]):
        raise fault
    if unseen:
        notes.append(f"not called yet: {', '.join(unseen)}; trained from the first call on")
    if others := [part.role for part in idle if part.role not in rewards and part.role not in unseen]:
        notes.append(f"no episode has come to: {', '.join(others)}; a role has no policy before it has called")
    unknown = {name for outcome in outcomes for name in outcome.unknown}
    if recipe.takes_rewards and not any(ended.values()):
        if unknown:
            names, count = ", ".join(sorted(unknown)), len(outcomes)
            notes.append(f"nobody knew the outcome ({names}) of the {count} episodes looked at: such are left out")
        elif plan.kind != "tree" and not any(rewards.values()):
            raise WorkflowError(
                f"No episode and no answer has a reward, so nothing can be learned under the plan {plan.kind}.",
                "Return a reward, add @workflow.judge, or use --plan tree where the roles have scorers.",
            )
    return PreflightReport(
        rewards=rewards,
        outcome=sorted(unknown.union(*ended.values())),
        notes=[*_notes(outcomes, calls), *_temperatures(calls, config.sampling.temperature), *notes],
        unseen=unseen,
    )


def _worth_another_look(outcomes: Sequence[Outcome]) -> bool:
    """Whether the workflow raised in all of them after calls that were answered: what the model says may break it."""
    return all(
        outcome.episode.calls
        and outcome.episode.blame == "policy"
        and not outcome.live.failures
        and outcome.error
        and outcome.error.__cause__
        for outcome in outcomes
    )


def unseen_roles(
    config: TrainConfig, workflow: Workflow, idle: Iterable[Part], called: Collection[str] = ()
) -> list[str]:
    """Of the parts of the application that have not run, those that a scorer or a policy names: another answer leads
    to them."""
    named = {*workflow.scorers, *(role for policy in config.policy for role in policy.roles)}
    return [part.role for part in idle if part.role in named and part.role not in called]


def rewards_by_role(store: Store, calls: Sequence[CallRecord]) -> dict[str, dict[str, tuple[float, float]]]:
    """Components that the scorer of each role that calls has returned, each with its lowest and highest value."""
    found: dict[str, dict[str, tuple[float, float]]] = {role: {} for role in sorted({call.role for call in calls})}
    for call in calls:
        for named in store.rewards(candidate_id(call.id, c.index) for c in call.candidates).values():
            for name, value in named.items():
                low, high = found[call.role].get(name, (value, value))
                found[call.role][name] = (min(low, value), max(high, value))
    return found


def faults(
    workflow: Workflow,
    outcomes: Sequence[Outcome],
    calls: Sequence[CallRecord],
    rewards: Mapping[str, Collection[str]],
    rare: Sequence[str] = (),
) -> Iterator[CotuneError]:
    """What would make training on these episodes pointless, worst first. `rewards` is as in `PreflightReport`; `rare`
    roles need not have called."""
    ended_early = list(_outcome_faults(workflow, outcomes, calls))
    yield from ended_early
    for role in workflow.scorers:
        errors = [call.error for call in calls if call.role == role and call.status == "ok"]
        if errors and all(errors) and not rewards.get(role):
            yield WorkflowError(f"{errors[0]} So it went on all {len(errors)} calls.", "Nothing was trained.")
    seen = sorted({call.role for call in calls})
    for role in () if ended_early else workflow.scorers:  # else who would have called is not known
        if role not in seen and role not in rare:
            yield ConfigError(
                "scorer",
                role,
                f"must be a role of the application; seen in {len(outcomes)} episodes: {', '.join(seen)}",
                f"{did_you_mean(near_names(role, seen, most=2, cutoff=0.5))} Correct the name, or list it under "
                "`roles` in the configuration if it shows only on some tasks.".strip(),
            )


def _outcome_faults(
    workflow: Workflow, outcomes: Sequence[Outcome], calls: Sequence[CallRecord]
) -> Iterator[CotuneError]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    failed = [call for call in calls if call.status != "ok"]
    if len(errors) == len(outcomes) and not calls:
        yield _without_calls(errors[0])
    elif len(errors) == len(outcomes):
        yield _with_calls(_every_time(errors, calls), failed)
    elif not calls:
        swallowed = [error for outcome in outcomes for error in outcome.live.notes.get("raised", ())]
        text = f" It swallowed {phrase(swallowed[0])}{origin(swallowed[0])}." if swallowed else ""
        remedy = "Let the error through, and fix it." if swallowed else UNSEEN
        yield WorkflowError(f"The workflow {workflow.name!r} made no LLM call that cotune can see.{text}", remedy)
    elif len(failed) == len(calls):
        yield WorkflowError(
            f"All {len(calls)} calls of the workflow {workflow.name!r} failed; the first: {failed[0].error}",
            "Nothing was trained.",
        )


def _every_time(errors: Sequence[CotuneError], calls: Sequence[CallRecord]) -> CotuneError:
    if len(errors) <= EPISODES:
        return errors[0]
    remedy = f"{errors[0].remedy} If it is what the model says that breaks it: have the workflow return a low reward."
    ends = [candidate.finish_reason for call in calls for candidate in call.candidates]
    if (cut := ends.count("length")) * 2 > len(ends):
        remedy += (
            f" {cut} of {len(ends)} answers ended at their limit of tokens: raise --max-tokens, or the application's."
        )
    raised = WorkflowError(f"{errors[0].cause} All {len(errors)} episodes looked at failed.", remedy)
    raised.__cause__ = errors[0]
    return raised


def _without_calls(error: CotuneError) -> CotuneError:
    """What a workflow raised that was not seen to call: a mistake of its own, unless its client is not seen and had no
    answer."""
    raised_by = error.__cause__
    mistake = type(raised_by).__module__ == "builtins" and not isinstance(raised_by, RuntimeError | NoneType)
    mistake = mistake and not any(isinstance(one, OSError) for one in chain(raised_by))
    cause = f"{error.cause} It made no LLM call that cotune can see."
    raised = WorkflowError(cause, error.remedy if mistake else f"{error.remedy} {UNSEEN}".strip())
    raised.__cause__ = error
    return raised


def _with_calls(error: CotuneError, failed: Sequence[CallRecord]) -> CotuneError:
    first = next((call for call in failed if call.status != "cancelled"), None)
    if first is None or error.cause in str(first.error):
        return error
    cause = error.cause.replace(first.error, "...") if first.error else error.cause
    raised = WorkflowError(f"{cause} The call of role {first.role!r} failed: {first.error}", error.remedy)
    raised.__cause__ = error
    return raised


def _notes(outcomes: Sequence[Outcome], calls: Sequence[CallRecord]) -> list[str]:
    errors = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    notes = [f"{len(errors)} of {len(outcomes)} episodes failed while looking around: {errors[0]}"] if errors else []
    for what, broken in (("failed", True), ("were not scored whole", False)):
        found = [call.error for call in calls if call.error is not None and (call.status != "ok") is broken]
        notes += [f"{len(found)} of {len(calls)} calls {what} while looking around: {found[0]}"] if found else []
    roles: Mapping[str, int] = {role: sum(c.role == role for c in calls) for role in sorted({c.role for c in calls})}
    return [*notes, "roles: " + ", ".join(f"{role} ({count} calls)" for role, count in roles.items())]


def _temperatures(calls: Sequence[CallRecord], sampled: float) -> Iterator[str]:
    """Which roles ask for another temperature than that of training."""
    asked: dict[float, set[str]] = {}
    for call in calls:
        temperature = call.params.get("temperature")
        if isinstance(temperature, int | float) and temperature != sampled:
            asked.setdefault(float(temperature), set()).add(call.role)
    for temperature, roles in sorted(asked.items()):
        who = f"{', '.join(sorted(roles))} {'asks' if len(roles) == 1 else 'ask'}"
        yield f"{who} for temperature {temperature:g}; training samples at {sampled:g} (sampling.temperature)"
