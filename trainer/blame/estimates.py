"""Estimates from the arms: how much each role costs, with intervals, and the verdict.

The score of a role is the mean over tasks of

    ((only this role swapped - nothing swapped) + (all swapped - all but this role swapped)) / 2

Both differences are needed. Where two roles are certain to fail, mending one of them changes nothing: only the second
difference sees them. Where two roles can stand in for each other, only the first one does.

Redraws of a role's own answers measure how much its answers vary, and not whether they are at fault: they are as bad
as the recorded ones where the role is always wrong. They appear here in `luck` alone.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, pvariance
from typing import NamedTuple

import msgspec
from scipy import stats

from cotune.intervals import Interval, wilson
from cotune.reading.blame import LEAST_EFFECT, LEAST_TASKS, Kind, ScoringNoise
from cotune.trainer.blame.arms import ALL, OWN, Arm, all_but, only

PRIOR_OBSERVATIONS, PRIOR_SPREAD = 3, 0.2
"""The prior on the spread of a role's score over tasks, as so many observations with this standard deviation. Without
it the intervals of a few tasks are far too narrow whenever these happen to agree."""
MOST_TASKS = 1000
"""A larger number of further tasks is not named."""


class Span(NamedTuple):
    """The least and the greatest outcome."""

    low: float
    high: float

    @property
    def size(self) -> float:
        return self.high - self.low

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2

    def share(self, outcome: float) -> float:
        """An outcome from 0 (the least) to 1 (the greatest)."""
        return min(max((outcome - self.low) / self.size, 0.0), 1.0)


class Estimate(NamedTuple):
    """A mean over tasks, with its 95% interval and the one-sided 95% bounds."""

    mean: float
    low: float
    high: float
    least: float
    """With 95% confidence the mean is at least this."""
    most: float
    """With 95% confidence the mean is at most this."""
    deviation: float
    """Standard deviation over tasks, with the prior."""
    tasks: int

    @property
    def interval(self) -> Interval:
        """For people: without bounds where the tasks are too few to say anything about other tasks."""
        if self.tasks < LEAST_TASKS:
            return Interval(mean=self.mean, n=self.tasks)
        return Interval(mean=self.mean, low=self.low, high=self.high, n=self.tasks)


class RoleEffect(NamedTuple):
    """The cost of a role. All are in units of the outcome; positive means that the reference does better."""

    role: str
    score: Estimate
    alone: Estimate
    """Only this role swapped, against nothing swapped."""
    last: Estimate
    """All roles swapped, against all but this one."""


class Outcomes:
    """The outcomes of runs, by arm and task."""

    def __init__(self) -> None:
        self._runs: defaultdict[Arm, defaultdict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, arm: Arm, task: str, outcome: float) -> None:
        self._runs[arm][task].append(outcome)

    def runs(self, arm: Arm) -> Mapping[str, Sequence[float]]:
        """The outcomes of an arm by task."""
        return self._runs.get(arm, {})

    def means(self, arm: Arm) -> dict[str, float]:
        """The mean outcome of an arm by task."""
        return {task: fmean(outcomes) for task, outcomes in self.runs(arm).items()}

    def span(self) -> Span:
        """From 0 to 1 where all outcomes are in there; else from the least to the greatest outcome."""
        outcomes = [value for tasks in self._runs.values() for runs in tasks.values() for value in runs]
        low, high = min(outcomes, default=0.0), max(outcomes, default=1.0)
        if low >= 0 and high <= 1:
            return Span(0.0, 1.0)
        if high > low:
            return Span(low, high)
        # Outcomes that are all equal span nothing. A positive one counts as a success, a negative one as a failure.
        return Span(min(low, 0.0), max(high, 0.0))


def estimate(values: Sequence[float], scale: float = 1.0) -> Estimate:
    """The mean of one value per task, with Student's t intervals under a prior on the spread.

    With n values and their squared deviations SS, the variance is (3 * 0.2**2 + SS) / (n + 2), with n + 2 degrees of
    freedom. `scale` is the span of outcomes, in which the prior is measured. Needs at least one value.
    """
    n = len(values)
    mean = fmean(values)
    squares = sum((value - mean) ** 2 for value in values)
    freedom = n + PRIOR_OBSERVATIONS - 1
    variance = (PRIOR_OBSERVATIONS * (PRIOR_SPREAD * scale) ** 2 + squares) / freedom
    error = math.sqrt(variance / n)
    one_sided = float(stats.t.ppf(0.95, freedom)) * error
    two_sided = float(stats.t.ppf(0.975, freedom)) * error
    return Estimate(
        mean=mean,
        low=mean - two_sided,
        high=mean + two_sided,
        least=mean - one_sided,
        most=mean + one_sided,
        deviation=math.sqrt(variance),
        tasks=n,
    )


def difference(outcomes: Outcomes, arm: Arm, other: Arm) -> dict[str, float]:
    """Mean outcome of an arm less that of another, by task that ran in both."""
    means, others = outcomes.means(arm), outcomes.means(other)
    return {task: mean - others[task] for task, mean in means.items() if task in others}


def role_effects(outcomes: Outcomes, roles: Sequence[str], scale: float) -> list[RoleEffect]:
    """The effects of the roles that ran in all their arms on at least one task, the highest score first."""
    effects = []
    for role in roles:
        alone = difference(outcomes, only(role, roles), OWN)
        last = difference(outcomes, ALL, all_but(role, roles))
        tasks = [task for task in alone if task in last]
        if not tasks:
            continue
        score = [(alone[task] + last[task]) / 2 for task in tasks]
        effects.append(
            RoleEffect(
                role=role,
                score=estimate(score, scale),
                alone=estimate([alone[task] for task in tasks], scale),
                last=estimate([last[task] for task in tasks], scale),
            )
        )
    return sorted(effects, key=lambda effect: -effect.score.mean)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Who is at fault.

    named: `roles`, the one that costs most first
    either: one of `roles`, which cannot be told apart
    nobody: no role costs the least effect that matters
    reference: the reference does not mend the failures
    undecided: about `more_tasks` further tasks would decide (None: more than can be said)
    untested: nothing was swapped
    """

    kind: Kind
    roles: tuple[str, ...] = ()
    more_tasks: int | None = None


def decide(outcomes: Outcomes, roles: Sequence[str], live: Sequence[str]) -> Verdict:
    """The verdict on these arms. Only roles that are still `live` can be named."""
    span = outcomes.span()
    least = LEAST_EFFECT * span.size
    effects = [effect for effect in role_effects(outcomes, roles, span.size) if effect.role in live]
    if not effects:
        return Verdict(kind="untested")
    tasks = effects[0].score.tasks
    if tasks < LEAST_TASKS:
        return Verdict(kind="undecided", more_tasks=LEAST_TASKS - tasks)

    # 1. Roles that stand in for each other: mending any one of them is enough, so leaving one out loses nothing.
    redundant = [effect for effect in effects if effect.alone.least >= least and effect.last.mean < least]
    tied = _as_good_alone(outcomes, roles, redundant, span.size)
    if len(tied) > 1:
        return Verdict(kind="either", roles=tuple(tied))

    # 2. The first role, if it costs enough. Further ones are tested at a stricter level, as they are several.
    first = effects[0]
    if first.score.least >= least:
        further = [e.role for e in effects[1:] if _bound(e.score, 0.05 / (len(effects) - 1)) >= least]
        return Verdict(kind="named", roles=(first.role, *further))

    # 3. Two roles that cost enough between them: one of them is at fault, and which one is not known.
    if len(effects) > 1 and _pair(outcomes, roles, effects, span.size).least >= least:
        return Verdict(kind="either", roles=(first.role, effects[1].role))

    # 4. Much is lost, and even the reference in all roles does not bring it back.
    lost = estimate([span.high - mean for mean in outcomes.means(OWN).values()], span.size)
    gained = estimate(list(difference(outcomes, ALL, OWN).values()), span.size)
    if lost.least >= least and gained.low <= 0 and gained.most < lost.mean / 2:
        return Verdict(kind="reference")

    # 5. Too little is lost for any role to cost enough.
    if lost.most < least or all(effect.score.most < least for effect in effects):
        return Verdict(kind="nobody")
    return Verdict(kind="undecided", more_tasks=_more_tasks(effects, least))


def _as_good_alone(outcomes: Outcomes, roles: Sequence[str], effects: Sequence[RoleEffect], scale: float) -> list[str]:
    """The roles whose mending alone may help as much as mending the best role alone."""
    ranked = sorted(effects, key=lambda effect: -effect.alone.mean)
    tied = []
    for effect in ranked:
        further = difference(outcomes, only(ranked[0].role, roles), only(effect.role, roles))
        if effect is ranked[0] or estimate(list(further.values()), scale).least <= 0:
            tied.append(effect.role)
    return tied


def _bound(score: Estimate, level: float) -> float:
    """The one-sided lower bound of a score at another level than 5%."""
    freedom = score.tasks + PRIOR_OBSERVATIONS - 1
    return score.mean - float(stats.t.ppf(1 - level, freedom)) * score.deviation / math.sqrt(score.tasks)


def _pair(outcomes: Outcomes, roles: Sequence[str], effects: Sequence[RoleEffect], scale: float) -> Estimate:
    """The mean score of the two first roles. At least one of them costs as much as this."""
    scores: defaultdict[str, list[float]] = defaultdict(list)
    for effect in effects[:2]:
        alone = difference(outcomes, only(effect.role, roles), OWN)
        last = difference(outcomes, ALL, all_but(effect.role, roles))
        for task in alone.keys() & last.keys():
            scores[task].append((alone[task] + last[task]) / 2)
    both = [fmean(of_task) for of_task in scores.values() if len(of_task) == 2]
    return estimate(both, scale) if both else effects[1].score


def _more_tasks(effects: Sequence[RoleEffect], least: float) -> int | None:
    """About how many further tasks would decide, if the means stay as they are; None if that is beyond `MOST_TASKS`."""
    first = effects[0].score
    # Above the least effect, the bound of the first role has to come up to it. Below, the bounds of all have to fall.
    score = first if first.mean >= least else max((effect.score for effect in effects), key=lambda one: one.most)
    gap = abs(score.mean - least)
    if gap == 0:
        return None
    needed = (1.645 * score.deviation / gap) ** 2
    more = math.ceil(needed) - score.tasks
    return None if more > MOST_TASKS else max(more, 1)


def scoring_noise(pairs: Sequence[tuple[float, float]], outcomes: Sequence[float]) -> ScoringNoise | None:
    """The noise of a scorer, from two outcomes of the same runs; None without any.

    Half the mean squared difference of the two is the variance of one score. `outcomes` are all outcomes of the
    application as it is, whose variance it is a share of.
    """
    if not pairs:
        return None
    noise = fmean((first - second) ** 2 for first, second in pairs) / 2
    variance = pvariance(outcomes) if outcomes else 0.0
    return ScoringNoise(
        runs=len(pairs),
        changed=sum(not math.isclose(first, second, abs_tol=1e-9) for first, second in pairs),
        deviation=math.sqrt(noise),
        share=min(1.0, noise / variance) if variance else float(noise > 0),
    )


class OwnRuns(NamedTuple):
    """The runs of one task by the unchanged application, in their order: whether each succeeded."""

    succeeded: Sequence[bool]


def luck(tasks: Sequence[OwnRuns], *, first_failed: bool = False) -> Interval | None:
    """The share of failures that succeed when the task is run again; None without a failure that was run again.

    Each run of a task counts as the failure, and the other runs of this task are its further tries. With `first_failed`
    only the first one does: for tasks that were run again because their first run failed. A task counts by its
    failures. The interval takes a task as one observation.
    """
    weights: list[float] = []
    shares: list[float] = []
    for task in tasks:
        runs = list(task.succeeded)
        failures = runs[:1].count(False) if first_failed else runs.count(False)
        if not failures or len(runs) < 2:
            continue
        weights.append(float(failures))
        shares.append(runs.count(True) / (len(runs) - 1))
    if not weights:
        return None
    total = sum(weights)
    mean = sum(weight * share for weight, share in zip(weights, shares, strict=True)) / total
    observations = total**2 / sum(weight**2 for weight in weights)
    low, high = wilson(mean, observations)
    return Interval(mean=mean, low=low, high=high, n=len(weights))


def nameable_effect(tasks: int, runs: int, roles: int = 4) -> float | None:
    """About the least cost of a role that so many tasks and runs per task name in four of five cases, as a share of
    the span; None where the tasks are too few to name anybody.

    It takes outcomes that vary as a coin with 3 : 1 does, tasks that differ by the prior's spread, and `roles` roles.
    """
    if tasks < LEAST_TASKS:
        return None
    # About half of the roles are left in most rounds.
    rounds = max(1.0, runs / (2 + 1.2 * roles))
    deviation = math.sqrt(PRIOR_SPREAD**2 + 0.19 / rounds)
    freedom = tasks + PRIOR_OBSERVATIONS - 1
    quantiles = float(stats.t.ppf(0.95, freedom)) + float(stats.norm.ppf(0.8))
    return min(1.0, LEAST_EFFECT + quantiles * deviation / math.sqrt(tasks))
