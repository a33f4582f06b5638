"""One evaluation: a workflow run on held-out tasks with a policy for each role, and its figures."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from msgspec.structs import replace

from cotune.algorithms.goal import Goal, worth
from cotune.algorithms.reward_bounds import reward_bounds
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import Workflow
from cotune.intervals import Interval
from cotune.reading.evaluations import EvaluatedMode, TaskEnding
from cotune.records.prices import Prices
from cotune.sampling.responder import PolicyResponder
from cotune.tables import first_line
from cotune.trainer.evaluation.sink import EvaluationSink, SeenCall, role_statistics, total_use
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
    """Run a batch, answered by `responder`, or by the application's own provider without one.

    Without a plan every call gets one candidate, and scorers choose nothing.
    """
    sink = EvaluationSink(batch.sink)
    started = time.perf_counter()
    await rollout(workflow, replace(batch, sink=sink), responder)
    found = summarise(label, sink, time.perf_counter() - started, prices or {}, goal)
    if responder is None:
        return found
    return replace(found, scorer_errors=dict(responder.scorer_errors), unlisted=dict(responder.unlisted))


def summarise(
    label: str, sink: EvaluationSink, seconds: float, prices: Prices, goal: Goal | None = None
) -> EvaluatedMode:
    """Intervals and counts of the episodes that a sink has kept; rewards go by `goal`."""
    goal, played = goal or Goal(), sink.played()
    # The reward that is trained on, and the plain outcome, of every episode.
    trained = worth(played, goal)
    plain = worth([replace(one, samples=()) for one in played], Goal(on_failure=goal.on_failure))
    ended = [
        TaskEnding(
            status=one.episode.status,
            reward=trained.reward[i],
            success=one.episode.solved,
            error=one.episode.error,
            seconds=one.episode.latency,
            known=one.episode.is_outcome,
            outcome=plain.reward[i],
            by_role=trained.by_role[i],
            floored=trained.failed[i],
            outcome_floored=plain.failed[i],
            calls=one.episode.calls,
        )
        for i, one in enumerate(played)
    ]
    # A task's first episode is the one with the lowest number, whichever ended first.
    first: dict[str, TaskEnding] = {}
    repeats: defaultdict[str, list[TaskEnding]] = defaultdict(list)
    for one, ending in sorted(zip(played, ended, strict=True), key=lambda pair: pair[0].episode.rollout):
        if one.episode.task.id not in first:
            first[one.episode.task.id] = ending
        else:
            repeats[one.episode.task.id].append(ending)
    found = EvaluatedMode(
        label=label,
        episodes=len(ended),
        failed=dict(Counter(reason for end in ended if (reason := failure(end)))),
        seconds=seconds,
        use=total_use(sink.calls, [end.seconds for end in ended if end.status == "ok"], prices),
        opposed=trained.opposed,
        floor=trained.floor,
        endings=first,
        repeats={task: tuple(endings) for task, endings in repeats.items()},
    )
    bounds = reward_bounds(played, goal)
    # Tasks are the observations: each counts with the mean of its episodes.
    succeeded, reward = list(found.successes.values()), list(found.rewards.values())
    outcome = list(found.outcomes.values())
    means = _mean_by_role(found.by_task.values())
    by_role: defaultdict[str, list[SeenCall]] = defaultdict(list)
    for call in sink.calls:
        by_role[call.role].append(call)
    return replace(
        found,
        success=mean_reward(succeeded),
        reward=None if trained.opposed else mean_reward(reward, bounds),
        reward_bounds=bounds,
        outcome=mean_reward(outcome) if outcome != reward and not trained.opposed else None,
        roles={role: role_statistics(calls, means.get(role)) for role, calls in sorted(by_role.items())},
        pass_at=_pass_at(list(found.by_task.values())) if succeeded else {},
    )


def of_role(evaluation: EvaluatedMode, role: str) -> EvaluatedMode:
    """The same with the reward of one role alone, to be compared with an evaluation of that role."""

    def alone(ending: TaskEnding) -> TaskEnding:
        return replace(ending, reward=ending.by_role.get(role), outcome=None, success=None)

    return replace(_with_endings(evaluation, alone), opposed=())


def _with_endings(evaluation: EvaluatedMode, change: Callable[[TaskEnding], TaskEnding]) -> EvaluatedMode:
    return replace(
        evaluation,
        endings={task: change(ending) for task, ending in evaluation.endings.items()},
        repeats={task: tuple(map(change, endings)) for task, endings in evaluation.repeats.items()},
    )


class _Lows(NamedTuple):
    """The lowest rewards, at most 0: of an episode and of its plain outcome where it ended well, and of each role."""

    reward: float
    outcome: float
    by_role: Mapping[str, float]


def _lows(evaluations: Iterable[EvaluatedMode]) -> _Lows:
    endings = [end for one in evaluations for of_task in one.by_task.values() for end in of_task]
    well = [end for end in endings if end.status == "ok"]
    by_role: dict[str, float] = {}
    for end in endings:
        if end.status == "ok" or end.floored:
            by_role |= {role: min(value, by_role.get(role, 0.0)) for role, value in end.by_role.items()}
    return _Lows(
        min([0.0, *(end.reward for end in well if end.reward is not None)]),
        min([0.0, *(end.outcome for end in well if end.outcome is not None)]),
        by_role,
    )


def share_floor(evaluations: Sequence[EvaluatedMode]) -> list[EvaluatedMode]:
    """The same, with one lowest reward for the failed episodes of all: that a policy fails where another does badly is
    no gain."""
    shared = _lows(evaluations)
    return [_with_lows(one, _lows([one]).by_role, shared) for one in evaluations]


def _with_lows(of: EvaluatedMode, own: Mapping[str, float], shared: _Lows) -> EvaluatedMode:
    def with_floor(end: TaskEnding) -> TaskEnding:
        if end.floored:
            by_role = {r: shared.by_role.get(r, x) if x <= own.get(r, x) else x for r, x in end.by_role.items()}
            end = replace(end, by_role=by_role, reward=None if end.reward is None else shared.reward)
        if end.outcome_floored and end.outcome is not None:
            end = replace(end, outcome=shared.outcome)
        return end

    of = _with_endings(of, with_floor)
    means = _mean_by_role(of.by_task.values())
    changed = replace(
        of,
        floor=shared.reward,
        roles={name: replace(role, reward=means.get(name, role.reward)) for name, role in of.roles.items()},
    )
    return replace(
        changed,
        reward=of.reward and mean_reward(list(changed.rewards.values()), of.reward_bounds),
        outcome=of.outcome and mean_reward(list(changed.outcomes.values())),
    )


def _mean_by_role(by_task: Iterable[Sequence[TaskEnding]]) -> dict[str, float]:
    """Mean over tasks of each role's reward, of the mean over the episodes of a task."""
    of_tasks: defaultdict[str, list[float]] = defaultdict(list)
    for endings in by_task:
        rewards: defaultdict[str, list[float]] = defaultdict(list)
        for ending in endings:
            for role, value in ending.by_role.items():
                rewards[role].append(value)
        for role, values in rewards.items():
            of_tasks[role].append(fmean(values))
    return {role: fmean(means) for role, means in of_tasks.items()}


def _pass_at(samples: Sequence[Sequence[TaskEnding]]) -> dict[int, Interval]:
    """pass@k for k = 1, 2, 4, ... and the least number of episodes that a task has."""
    solved = [some for of in samples if (some := [e.solved for e in of if e.solved is not None])]
    least = min(map(len, solved))
    tried = [(len(of), sum(of)) for of in solved]
    ks = sorted({*(2**i for i in range(least.bit_length())), least}) if least > 1 else []
    return {k: found for k in ks if (found := pass_at(k, tried))}


def failure(ending: TaskEnding) -> str | None:
    """Why an episode counts as failed, in one line; None when it ended well."""
    if ending.status == "ok":
        return None
    return f"{ending.status}: {first_line(ending.error)}"
