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
    find_faults,
    learning_findings,
    named_roles,
    rewards_by_role,
    roles_of,
    scorer_findings,
)
from cotune.trainer.config.resolve import resolve_plan, resolve_policies
from cotune.trainer.judging.bench import Bench

MOST_EPISODES = 16
"""Maximum number of episodes. More than `EPISODES` are run only while each fails because of the untrained model's
answers, as most do on a hard task."""
LEAST_CALL_LIMIT = 256
"""Least limit of calls per episode, for an application whose first episodes made few."""
MOST_SECONDS = 60.0
"""Seconds after which no episode beyond the first `EPISODES` begins."""


def max_calls(config: TrainConfig, store: Store) -> int:
    """The limit of calls per episode of a run. By default it is four times the calls of the longest episode of the
    preflight."""
    longest = max((episode.calls for episode in store.episodes(EpisodeFilters(phase="check"))), default=0)
    return config.max_calls or max(LEAST_CALL_LIMIT, 4 * longest)


async def preflight(
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    store: Store,
    sampler: Sampler,
    chats: ChatFormats,
    say: Callable[[str], None],
) -> tuple[Policies, list[str]]:
    """Run a few episodes with the untrained model, to find the roles of the application and mistakes in its rewards.

    Returns the policies of the roles, and notes for the user. `say` gets a line before each episode. Raises
    WorkflowError if the application makes no call, if the workflow fails on every task, or if a scorer fails on every
    call. Raises ConfigError for a misspelt reward or role, and if no role with a scorer calls under plan tree.
    """
    plan, recipes, _plan_text = resolve_plan(config, list(workflow.scorers), workflow.variable)
    responder = _untrained_responder(config, workflow, sampler, chats)
    parts = Parts()
    outcomes = await _run_first_episodes(config, workflow, tasks, store, responder, parts, say)
    store.flush()

    # 1. The judge of the workflow, and all calls.
    episodes = [outcome.episode for outcome in outcomes]
    notes: list[str] = []
    judge = workflow.episode_judge
    if judge is not None:
        bench = Bench(workflow=workflow, store=store, responder=responder, timeout=config.episode_timeout)
        errors = await judge_episodes(judge, store, episodes, bench.ask, workflow.redaction)
        notes = [f"the judge gave {count} episodes no outcome: {text}" for text, count in errors.items()]
    calls: list[CallRecord] = []
    for episode in (*episodes, *(bench.episodes if judge else ())):
        calls += store.calls(episode.id)
    rewards = rewards_by_role(store, calls)

    # 2. Roles of the application that no episode has called. The configured ones get a policy all the same, because
    # another answer may lead to them.
    roles_without_calls = [part.role for part in parts.known if not parts.ran(part) and part.role not in rewards]
    configured = named_roles(config, workflow)
    expected_roles = [role for role in roles_without_calls if role in configured]
    for fault in find_faults(workflow, outcomes, calls, rewards, plan, [*config.roles, *expected_roles]):
        raise fault  # The worst fault is the first.
    if expected_roles:
        notes.append(f"not called yet: {', '.join(expected_roles)}; trained from the first call on")
    if others := [role for role in roles_without_calls if role not in configured]:
        notes.append(f"no episode has come to: {', '.join(others)}; a role has no policy before it has called")

    # 3. The policies, and whether the rewards can train them.
    able = recipes.trainable_roles(workflow.scorers)
    policies = resolve_policies(config, [*rewards, *expected_roles], scored=able, workflow=workflow.variable)
    rewards_of_episodes = list(store.rewards(episode.id for episode in episodes).values())
    unknown_components: set[str] = set()
    for outcome in outcomes:
        unknown_components.update(outcome.unknown)
    takes_rewards = any(recipe.takes_rewards for recipe, _ in recipes.by_recipe(policies.learning))
    if takes_rewards and not any(rewards_of_episodes) and unknown_components:
        names = ", ".join(sorted(unknown_components))
        notes.append(f"the outcome ({names}) of all {len(outcomes)} episodes is unknown: they would be left out")
    elif takes_rewards and not any(rewards_of_episodes) and not any(rewards.values()):
        # Under plan tree a scorer may reward later answers. An episode that made too many calls may end well once the
        # policy has learned to stop.
        has_endless_episode = any(isinstance(outcome.error, TooManyCalls) for outcome in outcomes)
        if plan.kind != "tree" and not has_endless_episode:
            raise WorkflowError(
                f"No episode and no answer has a reward, so nothing can be learned under the plan {plan.kind}.",
                f"Return a reward, add @{workflow.variable}.judge, or use --plan tree where the roles have scorers.",
            )
    components = sorted(unknown_components.union(*rewards_of_episodes))
    for recipe, _roles in recipes.by_recipe(policies.learning):
        for unknown_name in unknown_names(recipe, rewards, components, policies.roles)[0]:
            raise unknown_name

    # 4. Notes for the user.
    roles = list(roles_of(calls, policies, workflow, able))
    findings = [*scorer_findings(workflow, calls, [*config.roles, *expected_roles])]
    findings += call_findings(calls, roles, plan, config)
    findings += learning_findings(roles, rewards, components, recipes, policies.roles)
    counts = ", ".join(f"{role.role} ({plural(role.calls, 'call')})" for role in roles)
    failed = [str(outcome.error) for outcome in outcomes if outcome.error is not None]
    if failed:
        notes.insert(0, f"{len(failed)} of {len(outcomes)} episodes failed while looking around: {failed[0]}")
    return policies, [f"roles: {counts}", *notes, *_finding_lines(findings)]


def _untrained_responder(
    config: TrainConfig, workflow: Workflow, sampler: Sampler, chats: ChatFormats
) -> PolicyResponder:
    """A responder that answers every role with the untrained model of its policy. Under plan tree it draws two
    candidates per call, the fewest that show how candidates are compared."""
    plan, recipes, _plan_text = resolve_plan(config, list(workflow.scorers), workflow.variable)
    # Roles whose policy has a base model of its own. All other roles are answered by UNTRAINED, the run's model.
    policy_of_role: dict[str, PolicyRef] = {}
    provider_roles: list[str] = []
    for policy in config.policy:
        if policy.model:
            policy_of_role |= dict.fromkeys(policy.roles, PolicyRef(policy.name))
        if policy.kind == "provider":
            provider_roles += policy.roles
    return PolicyResponder(
        sampler,
        chats.own,
        policy_of_role,
        chats=chats.others,
        plan=msgspec.structs.replace(plan, k=2),
        scorers=workflow.scorers,
        attribution=recipes.run.attribution,
        attribution_of_role=recipes.attributions(recipes.roles),
        defaults=SamplingParams(max_tokens=config.sampling.max_tokens, timeout=config.request_timeout),
        override={"temperature": config.sampling.temperature},
        sampling_of_role=config.own_sampling(config.named_roles),
        provider_roles=provider_roles,
        others=UNTRAINED,
        seed=config.seed,
    )


async def _run_first_episodes(
    config: TrainConfig,
    workflow: Workflow,
    tasks: Sequence[Task],
    store: Store,
    responder: PolicyResponder,
    parts: Parts,
    say: Callable[[str], None],
) -> list[Outcome]:
    """Run the first tasks once, and further ones while each episode fails because of the model's answers.

    `parts` collects the roles of the application, and `say` gets a line before each episode.
    """
    outcomes: list[Outcome] = []
    started = time.monotonic()
    episodes_per_task = 1
    planned = min(EPISODES, len(tasks))
    if workflow.episode_judge is not None:  # a judge compares two episodes of a task
        episodes_per_task = 2
        planned = EPISODES
    for number in range(MOST_EPISODES):
        # Beyond the planned ones, go on only while all have failed: another answer may let the workflow end well.
        has_time = time.monotonic() - started < MOST_SECONDS
        if number >= planned and not (_all_failed_by_answers(outcomes) and has_time):
            break
        total = planned if number < planned else f"at most {MOST_EPISODES}, as each has failed"
        say(f"looking at the application: episode {number + 1} of {total} ...")
        # With few tasks, the list of tasks is run several times. A rollout is the number of an episode of its task.
        earlier_rounds, index = divmod(number // episodes_per_task, len(tasks))
        options = EpisodeOptions(
            phase="check",
            rollout=earlier_rounds * episodes_per_task + number % episodes_per_task,
            timeout=config.episode_timeout,
            max_calls=config.max_calls or LEAST_CALL_LIMIT,
            parts=parts,
        )
        task = tasks[index]
        outcomes.append(await run_episode(workflow, task, sink=store, responder=responder, options=options))
    return outcomes


def _all_failed_by_answers(outcomes: Sequence[Outcome]) -> bool:
    """Return whether the workflow raised in all episodes after answered calls. Then an answer of the model may break
    it, and another one may not."""
    for outcome in outcomes:
        workflow_raised = outcome.error is not None and outcome.error.__cause__ is not None
        if not workflow_raised or not outcome.episode.calls or outcome.live.failures:
            return False
        if outcome.episode.blame != "policy":
            return False
    return True


def _finding_lines(findings: Iterable[Finding]) -> list[str]:
    """Return a line for each finding. Equal findings on several roles are one line, which begins with the roles."""
    roles_of_text: dict[tuple[str, str], list[str]] = {}
    for finding in findings:
        roles_of_text.setdefault((finding.text, finding.remedy), []).append(finding.about)
    lines: list[str] = []
    for (text, remedy), roles in roles_of_text.items():
        line = f"{text} {remedy}".strip()
        # A finding on the rewards names its role itself.
        is_on_rewards = roles == ["rewards"]
        lines.append(line if is_on_rewards else f"{', '.join(roles)}: {line}")
    return lines
