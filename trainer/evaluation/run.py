"""One evaluation: a workflow on held-out tasks, with a given policy for each role, and what came of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean

import msgspec

from cotune.algorithms.collect import is_outcome
from cotune.algorithms.goal import Goal, worth
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.episodes.workflows import Workflow
from cotune.intervals import Interval, share
from cotune.reading.evaluations import TaskEnding
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.evaluation.modes import Prices
from cotune.trainer.evaluation.sink import Ending, EvaluationSink, RoleStatistics, Use, total_use
from cotune.trainer.evaluation.statistics import mean_reward, pass_at


class Evaluation(msgspec.Struct, frozen=True, kw_only=True):
    """Results over the tasks: `success`, `reward` and `endings` of the first episode of each, the rest of all.

    `success` counts a failed episode as no success; it is None where the workflow reports no `success`. `reward` is the
    one that is trained on, `outcome` the plain sum of the outcome's components, None where that is the same; both count
    a failed episode as `on_failure` says in training. Episodes that the infrastructure has failed are in none of them.
    `failed` counts failed episodes by reason.
    """

    label: str
    episodes: int
    success: Interval | None
    reward: Interval | None
    outcome: Interval | None = None
    roles: dict[str, RoleStatistics]
    failed: dict[str, int]
    seconds: float
    use: Use
    scorer_errors: dict[str, int] = {}
    unlisted: dict[str, int] = {}
    """Calls by role that has no policy."""
    pass_at: dict[int, Interval] = {}
    """By k, the chance that one of k episodes of a task succeeds; empty for single episodes."""
    opposed: tuple[str, ...] = ()
    """Trained roles of which one's gain is another's loss: `success` says nothing of them, and there is no `reward` and
    no `outcome`."""
    floor: float = 0.0
    """The reward of a failed episode where it is the lowest."""
    outcome_floor: float = 0.0
    floors: dict[str, float] = {}
    """By role, the reward of a failed episode where it is the lowest."""
    endings: dict[str, Ending] = {}
    """By task id; what paired comparisons are made of."""

    @property
    def all_failed(self) -> str | None:
        """Why most episodes failed, where all did."""
        if not self.episodes or sum(self.failed.values()) < self.episodes:
            return None
        return max(self.failed, key=self.failed.__getitem__)

    @property
    def rewards(self) -> dict[str, float]:
        """The trained reward by task, of the episodes that have one."""
        return {task: e.reward for task, e in self.endings.items() if e.reward is not None}

    @property
    def outcomes(self) -> dict[str, float]:
        """The plain sum of the outcome's components by task, of the episodes that have one."""
        return {task: e.outcome for task, e in self.endings.items() if e.outcome is not None}

    @property
    def successes(self) -> dict[str, bool]:
        """Success by task; empty where the workflow reports none."""
        return successes(self.endings)

    def of_role(self, role: str) -> Evaluation:
        """The same with the reward of one role alone, to be compared with an evaluation of that role."""
        replace = msgspec.structs.replace
        endings = {
            t: replace(e, reward=e.by_role.get(role), outcome=None, success=None) for t, e in self.endings.items()
        }
        floor = min([0.0, *(e.reward for e in endings.values() if e.reward is not None)])
        return replace(self, endings=endings, floor=floor, opposed=())


def share_floor(evaluations: Sequence[Evaluation]) -> list[Evaluation]:
    """The same, with one lowest reward for the failed episodes of all: that a policy fails where another does badly is
    no gain."""
    floor = min((e.floor for e in evaluations), default=0.0)
    outcome_floor = min((e.outcome_floor for e in evaluations), default=0.0)
    floors: dict[str, float] = {}
    for evaluation in evaluations:
        for role, low in evaluation.floors.items():
            floors[role] = min(low, floors.get(role, low))
    return [_with_floor(evaluation, floor, outcome_floor, floors) for evaluation in evaluations]


def _with_floor(of: Evaluation, floor: float, outcome_floor: float, floors: Mapping[str, float]) -> Evaluation:
    replace = msgspec.structs.replace
    endings = dict(of.endings)
    for task, ending in of.endings.items():
        if ending.floored:
            lows = {r: floors.get(r, x) if x <= of.floors.get(r, x) else x for r, x in ending.by_role.items()}
            ending = replace(ending, by_role=lows, reward=None if ending.reward is None else floor)
        if ending.outcome_floored and ending.outcome is not None:
            ending = replace(ending, outcome=outcome_floor)
        endings[task] = ending
    means = _mean_by_role([ending.by_role for ending in endings.values()])
    changed = replace(
        of,
        endings=endings,
        floor=floor,
        outcome_floor=outcome_floor,
        floors=dict(floors),
        roles={name: replace(role, reward=means.get(name, role.reward)) for name, role in of.roles.items()},
    )
    return replace(
        changed,
        reward=of.reward and mean_reward(list(changed.rewards.values())),
        outcome=of.outcome and mean_reward(list(changed.outcomes.values())),
    )


async def evaluate_episodes(
    workflow: Workflow,
    batch: EpisodeBatch,
    responder: PolicyResponder | None = None,
    *,
    label: str,
    prices: Prices | None = None,
    goal: Goal | None = None,
) -> Evaluation:
    """Run a batch, answered by `responder`, or by the application's own provider without one.

    Without a plan every call gets one candidate, and scorers choose nothing.
    """
    sink = EvaluationSink(batch.sink)
    started = time.perf_counter()
    await rollout(workflow, msgspec.structs.replace(batch, sink=sink), responder)
    found = summarise(label, sink, time.perf_counter() - started, prices or {}, goal)
    if responder is None:
        return found
    errors, unlisted = dict(responder.scorer_errors), dict(responder.unlisted)
    return msgspec.structs.replace(found, scorer_errors=errors, unlisted=unlisted)


def summarise(label: str, sink: EvaluationSink, seconds: float, prices: Prices, goal: Goal | None = None) -> Evaluation:
    """Intervals and counts of the episodes that a sink has counted; rewards go by `goal`."""
    goal = goal or Goal()
    played = sink.played
    trained = worth(played, goal)
    plain = worth([msgspec.structs.replace(one, samples=()) for one in played], Goal(on_failure=goal.on_failure))
    ended = [
        Ending(
            status=one.episode.status,
            reward=trained.reward[i],
            success=one.episode.solved,
            error=one.episode.error,
            seconds=one.episode.latency,
            known=is_outcome(one.episode),
            outcome=plain.reward[i],
            by_role=trained.by_role[i],
            floored=trained.failed[i],
            outcome_floored=plain.failed[i],
        )
        for i, one in enumerate(played)
    ]
    samples: dict[str, list[Ending]] = {}
    for one, ending in zip(played, ended, strict=True):
        samples.setdefault(one.episode.task.id, []).append(ending)
    first = [i for i, one in enumerate(played) if one.episode.rollout == 0]
    endings = {played[i].episode.task.id: ended[i] for i in first}
    succeeded = successes(endings)
    reward = [e.reward for i in first if (e := ended[i]).reward is not None]
    outcome = [e.outcome for i in first if (e := ended[i]).outcome is not None]
    return Evaluation(
        label=label,
        episodes=len(ended),
        success=share(sum(succeeded.values()), len(succeeded)),
        reward=None if trained.opposed else mean_reward(reward),
        outcome=mean_reward(outcome) if outcome != reward and not trained.opposed else None,
        roles=sink.roles(_mean_by_role([trained.by_role[i] for i in first])),
        failed=dict(Counter(reason for e in ended if (reason := failure(e)))),
        pass_at=_pass_at(list(samples.values())) if succeeded else {},
        seconds=seconds,
        use=total_use(sink.answered, [e.seconds for e in ended if e.status == "ok"], prices),
        opposed=trained.opposed,
        floor=trained.floor,
        outcome_floor=plain.floor,
        floors=_floors([of for e, of in zip(ended, trained.by_role, strict=True) if e.status == "ok" or e.floored]),
        endings=endings,
    )


def _mean_by_role(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    found: dict[str, list[float]] = {}
    for by_role in rewards:
        for role, value in by_role.items():
            found.setdefault(role, []).append(value)
    return {role: fmean(values) for role, values in found.items()}


def _floors(rewards: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lowest reward of each role, and at most 0."""
    found: dict[str, float] = {}
    for by_role in rewards:
        for role, value in by_role.items():
            found[role] = min(value, found.get(role, 0.0))
    return found


def _pass_at(samples: Sequence[Sequence[Ending]]) -> dict[int, Interval]:
    """pass@k for k = 1, 2, 4, ... and the least number of episodes that a task has."""
    known = [some for of in samples if (some := [e.solved for e in of if e.solved is not None])]
    least = min(map(len, known))
    tried = [(len(of), sum(of)) for of in known]
    ks = sorted({*(2**i for i in range(least.bit_length())), least}) if least > 1 else []
    return {k: found for k in ks if (found := pass_at(k, tried))}


def successes(endings: Mapping[str, TaskEnding]) -> dict[str, bool]:
    """Success by task, where some episode reports it (`TaskEnding.solved`)."""
    if all(e.success is None for e in endings.values()):
        return {}
    return {task: e.solved for task, e in endings.items() if e.solved is not None}


def failure(ending: Ending) -> str | None:
    """Why an episode counts as failed, in one line; None when it ended well."""
    if ending.status == "ok":
        return None
    return f"{ending.status}: {(ending.error or 'no reason recorded').splitlines()[0]}"
