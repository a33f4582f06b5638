"""Preflight: a few episodes with the untrained model find the roles, and mistakes before weights are loaded."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from cotune.algorithms.learning_signal import unknown_names
from cotune.config.train import TrainConfig
from cotune.episodes.episode import EpisodeOptions, Outcome, run_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import TooManyCalls, WorkflowError
from cotune.judging.episodes import judge_episodes
from cotune.recording.app_parts import Parts
from cotune.records.policies import UNTRAINED, Policies
from cotune.records.structs import CallRecord, PolicyRef, Task
from cotune.sampling.protocol import ChatFormats, Sampler, SamplingParams
from cotune.sampling.responder import PolicyResponder
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.protocol import Store
from cotune.tables import plural
from cotune.trainer.before.findings import (
    EPISODES,
    Finding,
    call_findings,
    faults,
    learning_findings,
    named_roles,
    rewards_by_role,
    roles_of,
    scorer_findings,
)
from cotune.trainer.config.resolve import resolve_plan, resolve_policies
from cotune.trainer.judging.bench import Bench

MOST_EPISODES = 16
"""Most episodes, run while each fails because of the untrained model's answers: on a hard task most do."""
FEWEST_CALLS = 256
"""Calls that an episode may make at least."""
MOST_SECONDS = 60.0
"""After this time no episode beyond the first `EPISODES` begins."""


def max_calls(config: TrainConfig, store: Store) -> int:
    """Calls that an episode of a run may make: more than any that looked at the application needed by far."""
    most = max((episode.calls for episode in store.episodes(EpisodeFilters(phase="check"))), default=0)
    return config.max_calls or max(FEWEST_CALLS, 4 * most)


async def preflight(
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    store: Store,
    sampler: Sampler,
    chats: ChatFormats,
    say: Callable[[str], None],
) -> tuple[Policies, list[str]]:
    """Run the first tasks once, and further ones while each fails by the policy's doing: the policies of the roles, and
    lines to tell. `say` is called before each.

    Raises WorkflowError for an application that makes no call, a workflow that fails on every task, a scorer that
    fails on every call; ConfigError for a misspelt reward or role, and if no role with a scorer calls under plan tree.
    """
    plan, recipes, _ = resolve_plan(config, list(workflow.scorers), workflow.name)
    responder = PolicyResponder(
        sampler,
        chats.own,
        {role: PolicyRef(policy.name) for policy in config.policy if policy.model for role in policy.roles},
        chats=chats.others,
        plan=msgspec.structs.replace(plan, k=2),
        scorers=workflow.scorers,
        attribution=recipes.run.attribution,
        own=recipes.attributions(recipes.roles),
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.request_timeout),
        override={"temperature": config.sampling.temperature},
        own_sampling=config.own_sampling(config.named_roles),
        provider_roles=[role for policy in config.policy if policy.kind == "provider" for role in policy.roles],
        others=UNTRAINED,
        seed=config.seed,
    )
    outcomes: list[Outcome] = []
    parts = Parts()
    started = time.monotonic()
    judge = workflow.episode_judge
    each = 1 if judge is None else 2  # a judge compares two episodes of a task
    usual = min(EPISODES, len(tasks)) if judge is None else EPISODES
    for number in range(MOST_EPISODES):
        if number >= usual and not (_worth_another_look(outcomes) and time.monotonic() - started < MOST_SECONDS):
            break
        total = usual if number < usual else f"at most {MOST_EPISODES}, as each has failed"
        say(f"looking at the application: episode {number + 1} of {total} ...")
        place = number // each
        rollout = place // len(tasks) * each + number % each
        options = EpisodeOptions(
            phase="check",
            rollout=rollout,
            timeout=config.episode_timeout,
            max_calls=config.max_calls or FEWEST_CALLS,
            parts=parts,
        )
        task = tasks[place % len(tasks)]
        outcomes.append(await run_episode(workflow, task, sink=store, responder=responder, options=options))
    store.flush()

    episodes = [outcome.episode for outcome in outcomes]
    notes: list[str] = []
    if judge is not None:
        bench = Bench(workflow=workflow, store=store, responder=responder, timeout=config.episode_timeout)
        errors = await judge_episodes(judge, store, episodes, bench.ask, workflow.redaction)
        notes = [f"the judge gave {count} episodes no outcome: {text}" for text, count in errors.items()]
    calls: list[CallRecord] = []
    for episode in (*episodes, *(bench.episodes if judge else ())):
        calls += store.calls(episode.id)
    rewards = rewards_by_role(store, calls)
    idle = [part.role for part in parts.known if not parts.ran(part) and part.role not in rewards]
    named = named_roles(config, workflow)
    unseen = [role for role in idle if role in named]  # another answer may lead to them
    for fault in faults(workflow, outcomes, calls, rewards, plan, [*config.roles, *unseen]):
        raise fault
    if unseen:
        notes.append(f"not called yet: {', '.join(unseen)}; trained from the first call on")
    if others := [role for role in idle if role not in named]:
        notes.append(f"no episode has come to: {', '.join(others)}; a role has no policy before it has called")

    able = recipes.able(workflow.scorers)
    policies = resolve_policies(config, [*rewards, *unseen], scored=able, workflow=workflow.name)
    ended = store.rewards(episode.id for episode in episodes).values()
    unknown: set[str] = set()
    for outcome in outcomes:
        unknown.update(outcome.unknown)
    if any(recipe.takes_rewards for recipe, _ in recipes.by_recipe(policies.learning)) and not any(ended):
        if unknown:
            names = ", ".join(sorted(unknown))
            notes.append(f"the outcome ({names}) of all {len(outcomes)} episodes is unknown: they would be left out")
        elif plan.kind != "tree" and not any(rewards.values()) and not any(map(_endless, outcomes)):
            raise WorkflowError(
                f"No episode and no answer has a reward, so nothing can be learned under the plan {plan.kind}.",
                f"Return a reward, add @{workflow.name}.judge, or use --plan tree where the roles have scorers.",
            )
    components = sorted(unknown.union(*ended))
    for recipe, _ in recipes.by_recipe(policies.learning):
        for error in unknown_names(recipe, rewards, components, policies.roles)[0]:
            raise error
    roles = list(roles_of(calls, policies, workflow, able))
    findings = [*scorer_findings(workflow, calls, [*config.roles, *unseen])]
    findings += call_findings(calls, roles, plan, config)
    findings += learning_findings(roles, rewards, components, recipes, policies.roles)
    counts = ", ".join(f"{role.role} ({plural(role.calls, 'call')})" for role in roles)
    failed = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    if failed:
        notes.insert(0, f"{len(failed)} of {len(outcomes)} episodes failed while looking around: {failed[0]}")
    return policies, [f"roles: {counts}", *notes, *_lines(findings)]


def _endless(outcome: Outcome) -> bool:
    return isinstance(outcome.error, TooManyCalls)


def _worth_another_look(outcomes: Sequence[Outcome]) -> bool:
    """Return whether the workflow raised in all episodes after answered calls: an answer may break it."""
    return all(
        outcome.episode.calls
        and outcome.episode.blame == "policy"
        and not outcome.live.failures
        and outcome.error
        and outcome.error.__cause__
        for outcome in outcomes
    )


def _lines(findings: Iterable[Finding]) -> list[str]:
    """A line for each finding, with all roles that have it."""
    roles_of_text: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        roles_of_text.setdefault((finding.text, finding.remedy), []).append(finding.about)
    lines: list[str] = []
    for (text, remedy), roles in roles_of_text.items():
        prefix = "" if roles == ["rewards"] else f"{', '.join(roles)}: "
        lines.append(f"{prefix}{text} {remedy}".strip())
    return lines
