"""One evaluation mode: run a workflow on held-out tasks with a policy for each role, and compute its figures."""

from __future__ import annotations

import itertools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from cotune.algorithms.goal import Goal, Played, Worth, rewards_by_goal
from cotune.algorithms.reward_bounds import reward_bounds
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import Workflow
from cotune.intervals import Interval
from cotune.reading.evaluations import EvaluatedMode, TaskEnding
from cotune.records.prices import Prices
from cotune.sampling.responder import PolicyResponder
from cotune.tables import first_line
from cotune.trainer.evaluation.sink import EvaluatedCall, EvaluationSink, role_statistics, total_use
from cotune.trainer.evaluation.statistics import mean_reward, pass_at


async def evaluate_episodes(
    workflow: Workflow,
    batch: EpisodeBatch,
    responder: PolicyResponder | None = None,
    *,
    label: str,
    prices: Prices | None = None,
    goal: Goal | None = None,
) -> EvaluatedMode:
    """Run a batch and return its figures. `responder` answers the calls; without one, the application's own provider
    does.

    There is no plan, so every call gets one candidate, and scorers choose nothing.
    """
    sink = EvaluationSink(batch.sink)
    started = time.perf_counter()
    await rollout(workflow, replace(batch, sink=sink), responder)
    evaluation = summarise(label, sink, time.perf_counter() - started, prices or {}, goal)
    if responder is None:
        return evaluation
    return replace(evaluation, scorer_errors=dict(responder.scorer_errors), unlisted=dict(responder.unlisted))


def summarise(
    label: str, sink: EvaluationSink, seconds: float, prices: Prices, goal: Goal | None = None
) -> EvaluatedMode:
    """Compute the figures of the episodes in a sink. Rewards are computed as `goal` says."""
    goal = goal or Goal()
    played = sink.played()

    # 1. How the episodes of each task ended.
    by_goal = rewards_by_goal(played, goal)
    endings_by_task = _endings_by_task(played, by_goal, goal)
    first_endings = {task: endings[0] for task, endings in endings_by_task.items()}
    repeats = {task: tuple(endings[1:]) for task, endings in endings_by_task.items() if len(endings) > 1}

    # 2. Counts over all episodes, in the order in which they ended.
    failures: Counter[str] = Counter()
    for one_played in played:
        reason = failure(one_played.episode.status, one_played.episode.error)
        if reason:
            failures[reason] += 1
    seconds_of_episodes = [one_played.episode.latency for one_played in played if one_played.episode.status == "ok"]
    evaluation = EvaluatedMode(
        label=label,
        episodes=len(played),
        failed=dict(failures),
        seconds=seconds,
        use=total_use(sink.calls, seconds_of_episodes, prices),
        opposed=by_goal.opposed,
        floor=by_goal.floor,
        endings=first_endings,
        repeats=repeats,
    )

    # 3. Intervals. Tasks are the observations: each counts with the mean of its episodes.
    bounds = reward_bounds(played, goal)
    successes = list(evaluation.successes.values())
    rewards = list(evaluation.rewards.values())
    outcomes = list(evaluation.outcomes.values())
    reward = outcome = None
    if not by_goal.opposed:
        reward = mean_reward(rewards, bounds)
        outcome = mean_reward(outcomes) if outcomes != rewards else None

    # 4. Statistics of each role.
    mean_rewards = _mean_by_role(evaluation.by_task.values())
    calls_of_role: defaultdict[str, list[EvaluatedCall]] = defaultdict(list)
    for call in sink.calls:
        calls_of_role[call.role].append(call)
    return replace(
        evaluation,
        success=mean_reward(successes),
        reward=reward,
        reward_bounds=bounds,
        outcome=outcome,
        roles={role: role_statistics(calls, mean_rewards.get(role)) for role, calls in sorted(calls_of_role.items())},
        pass_at=_pass_at(list(evaluation.by_task.values())) if successes else {},
    )


def _endings_by_task(played: Sequence[Played], by_goal: Worth, goal: Goal) -> dict[str, list[TaskEnding]]:
    """Return how the episodes of each task ended, in the order of their numbers, whichever ended first.

    The reward of an ending is the one by the goal (`by_goal`), its outcome the plain sum of the episode's rewards.
    """
    without_samples = [replace(one_played, samples=()) for one_played in played]
    plain_sum = rewards_by_goal(without_samples, Goal(on_failure=goal.on_failure))
    endings: defaultdict[str, list[TaskEnding]] = defaultdict(list)
    # `by_goal` and `plain_sum` have an entry for each of `played`, in that order.
    by_rollout = sorted(range(len(played)), key=lambda index: played[index].episode.rollout)
    for i in by_rollout:
        episode = played[i].episode
        ending = TaskEnding(
            status=episode.status,
            reward=by_goal.reward[i],
            success=episode.solved,
            error=episode.error,
            seconds=episode.latency,
            known=episode.is_outcome,
            outcome=plain_sum.reward[i],
            by_role=by_goal.by_role[i],
            floored=by_goal.failed[i],
            outcome_floored=plain_sum.failed[i],
            calls=episode.calls,
        )
        endings[episode.task.id].append(ending)
    return endings


def of_role(evaluation: EvaluatedMode, role: str) -> EvaluatedMode:
    """Return the evaluation with the reward of one role alone, to compare it with an evaluation of that role."""

    def with_reward_of_role(ending: TaskEnding) -> TaskEnding:
        return replace(ending, reward=ending.by_role.get(role), outcome=None, success=None)

    return replace(_with_endings(evaluation, with_reward_of_role), opposed=())


def _with_endings(evaluation: EvaluatedMode, change: Callable[[TaskEnding], TaskEnding]) -> EvaluatedMode:
    """Return the evaluation with each ending changed."""
    return replace(
        evaluation,
        endings={task: change(ending) for task, ending in evaluation.endings.items()},
        repeats={task: tuple(map(change, endings)) for task, endings in evaluation.repeats.items()},
    )


class _Floors(NamedTuple):
    """The lowest rewards, at most 0, which failed episodes count with."""

    reward: float
    """The lowest reward of an episode that finished without an error."""
    outcome: float
    """The lowest outcome of such an episode."""
    by_role: Mapping[str, float]
    """The lowest reward of each role, also over failed episodes that have the lowest reward."""


def _floors(evaluations: Iterable[EvaluatedMode]) -> _Floors:
    """Find the lowest reward, outcome, and reward of each role over the finished episodes of these evaluations, but at
    most 0."""
    reward = 0.0
    outcome = 0.0
    by_role: dict[str, float] = {}
    for evaluation in evaluations:
        for ending in itertools.chain.from_iterable(evaluation.by_task.values()):
            finished = ending.status == "ok"
            if finished and ending.reward is not None:
                reward = min(reward, ending.reward)
            if finished and ending.outcome is not None:
                outcome = min(outcome, ending.outcome)
            # An episode that failed has got the lowest reward of each role already (`floored`).
            if finished or ending.floored:
                for role, value in ending.by_role.items():
                    by_role[role] = min(value, by_role.get(role, 0.0))
    return _Floors(reward, outcome, by_role)


def share_floor(evaluations: Sequence[EvaluatedMode]) -> list[EvaluatedMode]:
    """Give the failed episodes of all evaluations one lowest reward, so that no policy gains by failing on tasks that
    another one solves badly. Returns the changed evaluations in the same order."""
    shared_floors = _floors(evaluations)
    return [_with_floors(evaluation, shared_floors) for evaluation in evaluations]


def _with_floors(evaluation: EvaluatedMode, shared: _Floors) -> EvaluatedMode:
    """Return the evaluation with the lowest rewards of all evaluations (`shared`) in its failed episodes, and with
    figures that are computed again."""
    own_floors = _floors([evaluation])

    def with_shared_floors(ending: TaskEnding) -> TaskEnding:
        """Return the ending of an episode. If the episode failed and has the lowest rewards of this evaluation, it gets
        the lowest ones of all evaluations."""
        changes: dict[str, Any] = {}
        if ending.floored:
            by_role = dict(ending.by_role)
            for role, value in ending.by_role.items():
                # A role may have earned a reward in the failed episode, above the lowest one: it stays.
                has_lowest = value <= own_floors.by_role.get(role, value)
                if has_lowest:
                    by_role[role] = shared.by_role.get(role, value)
            changes["by_role"] = by_role
            if ending.reward is not None:
                changes["reward"] = shared.reward
        if ending.outcome_floored and ending.outcome is not None:
            changes["outcome"] = shared.outcome
        return replace(ending, **changes)

    changed = _with_endings(evaluation, with_shared_floors)
    mean_rewards = _mean_by_role(changed.by_task.values())
    roles = {}
    for role, statistics in evaluation.roles.items():
        roles[role] = replace(statistics, reward=mean_rewards.get(role, statistics.reward))
    # A figure that the evaluation does not have stays missing.
    reward = outcome = None
    if evaluation.reward is not None:
        reward = mean_reward(list(changed.rewards.values()), evaluation.reward_bounds)
    if evaluation.outcome is not None:
        outcome = mean_reward(list(changed.outcomes.values()))
    return replace(changed, floor=shared.reward, roles=roles, reward=reward, outcome=outcome)


def _mean_by_role(by_task: Iterable[Sequence[TaskEnding]]) -> dict[str, float]:
    """Return each role's mean reward over tasks, where a task counts with the mean over its episodes."""
    means_of_role: defaultdict[str, list[float]] = defaultdict(list)
    for endings in by_task:
        rewards_of_role: defaultdict[str, list[float]] = defaultdict(list)
        for ending in endings:
            for role, reward in ending.by_role.items():
                rewards_of_role[role].append(reward)
        for role, rewards in rewards_of_role.items():
            means_of_role[role].append(fmean(rewards))
    return {role: fmean(means) for role, means in means_of_role.items()}


def _pass_at(by_task: Sequence[Sequence[TaskEnding]]) -> dict[int, Interval]:
    """Compute pass@k for k = 1, 2, 4, ... up to the least number of episodes that a task has, and for that number."""
    # The episodes of each task whose result is known, and how many of them succeeded.
    counts: list[tuple[int, int]] = []
    for endings in by_task:
        solved = [ending.solved for ending in endings if ending.solved is not None]
        if solved:
            counts.append((len(solved), sum(solved)))
    least_episodes = min(episodes for episodes, _successes in counts)
    if least_episodes == 1:
        return {}
    powers_of_two = [2**i for i in range(least_episodes.bit_length())]
    intervals: dict[int, Interval] = {}
    for k in sorted({*powers_of_two, least_episodes}):
        interval = pass_at(k, counts)
        if interval:
            intervals[k] = interval
    return intervals


def failure(status: str, error: str | None) -> str | None:
    """The reason in one line why an episode counts as failed; None if it finished without an error."""
    if status == "ok":
        return None
    return f"{status}: {first_line(error)}"
