"""Estimates from the arms: how much each role costs, with intervals, and the verdict.

The score of a role is the mean over tasks of

    ((only this role swapped - nothing swapped) + (all swapped - all but this role swapped)) / 2

Both differences are needed. If two roles always fail, mending one of them changes nothing, and only the second
difference shows them. If two roles can stand in for each other, only the first difference does.

Redraws of a role's own answers measure how much its answers vary, not whether they are at fault: a role that is always
wrong gets new answers that are as bad as the recorded ones. Only `luck` uses redraws.
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
"""The prior on the spread of a role's score over tasks: this number of observations with this standard deviation, as a
share of the span of outcomes. Without the prior, intervals are far too narrow if a few tasks happen to agree."""
MOST_FURTHER_TASKS = 1000
"""If more tasks than this are needed to decide, the report names no number."""


NORMAL_95 = 1.645
"""The 95% quantile of the normal distribution."""


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
        """The mean and its interval for the report: without bounds if the tasks are too few to generalize from."""
        if self.tasks < LEAST_TASKS:
            return Interval(mean=self.mean, n=self.tasks)
        return Interval(mean=self.mean, low=self.low, high=self.high, n=self.tasks)


class RoleEffect(NamedTuple):
    """How much a role costs, in units of the outcome. Positive means that the reference does better than the role."""

    role: str
    score: Estimate
    """The mean of `alone` and `last`."""
    alone: Estimate
    """The gain from swapping only this role, compared with swapping none."""
    last: Estimate
    """The gain from swapping all roles, compared with swapping all but this one."""


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
        """From 0 to 1 if all outcomes lie between them; else from the least to the greatest outcome."""
        outcomes: list[float] = []
        for runs_by_task in self._runs.values():
            for runs in runs_by_task.values():
                outcomes += runs
        low, high = min(outcomes, default=0.0), max(outcomes, default=1.0)
        if low >= 0 and high <= 1:
            return Span(0.0, 1.0)
        if high > low:
            return Span(low, high)
        # Outcomes that are all equal span nothing. A positive one counts as a success, a negative one as a failure.
        return Span(min(low, 0.0), max(high, 0.0))


def estimate(values: Sequence[float], scale: float = 1.0) -> Estimate:
    """The mean of one value per task, with Student's t intervals under a prior on the spread.

    For n values whose squared deviations sum up to SS, the variance is (3 s**2 + SS) / (n + 2). It has n + 2 degrees of
    freedom. The prior is 3 observations with a spread s of 0.2 times `scale`, the span of outcomes. Needs at least one
    value.
    """
    n = len(values)
    mean = fmean(values)
    squared_deviations = sum((value - mean) ** 2 for value in values)
    degrees_of_freedom = n + PRIOR_OBSERVATIONS - 1
    prior_spread = PRIOR_SPREAD * scale
    variance = (PRIOR_OBSERVATIONS * prior_spread**2 + squared_deviations) / degrees_of_freedom
    standard_error = math.sqrt(variance / n)
    one_sided = float(stats.t.ppf(0.95, degrees_of_freedom)) * standard_error
    two_sided = float(stats.t.ppf(0.975, degrees_of_freedom)) * standard_error
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
    """By task that ran in both arms, the mean outcome in `arm` minus the mean outcome in `other`."""
    means, means_of_other = outcomes.means(arm), outcomes.means(other)
    return {task: mean - means_of_other[task] for task, mean in means.items() if task in means_of_other}


def role_effects(outcomes: Outcomes, roles: Sequence[str], scale: float) -> list[RoleEffect]:
    """The effects of the roles whose arms have all run on at least one task, the highest score first.

    `scale` is the span of outcomes, by which intervals are widened when tasks are few (`estimate`).
    """
    effects = []
    for role in roles:
        alone = difference(outcomes, only(role, roles), OWN)
        last = difference(outcomes, ALL, all_but(role, roles))
        tasks = [task for task in alone if task in last]
        if not tasks:
            continue
        scores = [(alone[task] + last[task]) / 2 for task in tasks]
        effects.append(
            RoleEffect(
                role=role,
                score=estimate(scores, scale),
                alone=estimate([alone[task] for task in tasks], scale),
                last=estimate([last[task] for task in tasks], scale),
            )
        )
    return sorted(effects, key=lambda effect: -effect.score.mean)


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Which roles are at fault. The kinds are:

    named: all of `roles`, which begin with the role that costs most
    either: one of `roles`, and the runs do not show which one
    nobody: no role costs `LEAST_EFFECT` or more
    reference: swapping all roles to the reference does not mend the failures
    undecided: about `more_tasks` further tasks would decide (None: more than `MOST_FURTHER_TASKS`)
    untested: no role was swapped
    """

    kind: Kind
    roles: tuple[str, ...] = ()
    more_tasks: int | None = None


def decide(outcomes: Outcomes, roles: Sequence[str], live: Sequence[str]) -> Verdict:
    """Decide from the outcomes of all arms which of the `roles` is at fault.

    Roles that are not `live` any more were dropped in an earlier round. They can be no more than a further role.
    """
    span = outcomes.span()
    least = LEAST_EFFECT * span.size  # the least effect that matters, in units of the outcome
    effects = [effect for effect in role_effects(outcomes, roles, span.size) if effect.role in live]
    if not effects:
        return Verdict(kind="untested")
    tasks = effects[0].score.tasks
    if tasks < LEAST_TASKS:
        return Verdict(kind="undecided", more_tasks=LEAST_TASKS - tasks)

    # 1. Roles that stand in for each other: mending any one of them is enough, so not mending one loses nothing.
    redundant = [effect for effect in effects if effect.alone.least >= least and effect.last.mean < least]
    tied_roles = _roles_tied_with_best(outcomes, roles, redundant, span.size)
    if len(tied_roles) > 1:
        return Verdict(kind="either", roles=tuple(tied_roles))

    # 2. The first role, if it costs enough, with the further roles that do.
    first = effects[0]
    if first.score.least >= least:
        further_roles = _further_roles_at_fault(outcomes, roles, first.role, span)
        return Verdict(kind="named", roles=(first.role, *further_roles))

    # 3. The first two roles together cost enough, so one of them is at fault. Which one is not known.
    if len(effects) > 1 and _mean_score_of_pair(outcomes, roles, effects, span.size).least >= least:
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


def _roles_tied_with_best(
    outcomes: Outcomes, roles: Sequence[str], effects: Sequence[RoleEffect], scale: float
) -> list[str]:
    """The best of the roles in `effects`, and all others that it does not clearly beat.

    The best role is the one whose swap, with no other role swapped, gains most. It beats another role if, with 95%
    confidence, swapping only it gives better outcomes than swapping only the other.
    """
    ranked = sorted(effects, key=lambda effect: -effect.alone.mean)
    if not ranked:
        return []
    best = ranked[0]
    tied_roles = [best.role]
    for effect in ranked[1:]:
        lead_by_task = difference(outcomes, only(best.role, roles), only(effect.role, roles))
        if estimate(list(lead_by_task.values()), scale).least <= 0:
            tied_roles.append(effect.role)
    return tied_roles


def _further_roles_at_fault(outcomes: Outcomes, roles: Sequence[str], first: str, span: Span) -> list[str]:
    """The roles besides `first` that cost enough, the highest score first.

    A role costs enough by its score, or by `last`: its cost once all other roles are mended. A fault that always fails
    hides another one until it is mended itself, so the second fault has an `alone` of 0, and half of `last` as score.
    """
    effects = [effect for effect in role_effects(outcomes, roles, span.size) if effect.role != first]
    # The roles are tested together, so each at a stricter level (Bonferroni). They are all roles, also those that were
    # dropped in an earlier round: the roles still live are those with the best luck so far.
    level = 0.05 / len(effects) if effects else 0.05
    at_fault = []
    for effect in effects:
        bound = max(_lower_bound(effect.score, level), _lower_bound(effect.last, level))
        if bound >= LEAST_EFFECT * span.size:
            at_fault.append(effect.role)
    return at_fault


def _lower_bound(cost: Estimate, level: float) -> float:
    """The one-sided lower bound of a cost at a `level` other than the 5% of `Estimate.least`."""
    degrees_of_freedom = cost.tasks + PRIOR_OBSERVATIONS - 1
    standard_error = cost.deviation / math.sqrt(cost.tasks)
    return cost.mean - float(stats.t.ppf(1 - level, degrees_of_freedom)) * standard_error


def _mean_score_of_pair(
    outcomes: Outcomes, roles: Sequence[str], effects: Sequence[RoleEffect], scale: float
) -> Estimate:
    """The mean of the scores of the first two roles. At least one of them costs as much as this."""
    scores_by_task: defaultdict[str, list[float]] = defaultdict(list)
    for effect in effects[:2]:
        alone = difference(outcomes, only(effect.role, roles), OWN)
        last = difference(outcomes, ALL, all_but(effect.role, roles))
        for task in alone.keys() & last.keys():
            scores_by_task[task].append((alone[task] + last[task]) / 2)
    means = [fmean(scores) for scores in scores_by_task.values() if len(scores) == 2]
    return estimate(means, scale) if means else effects[1].score


def _more_tasks(effects: Sequence[RoleEffect], least: float) -> int | None:
    """About how many further tasks an undecided analysis needs, if the means stay as they are; None for more than
    `MOST_FURTHER_TASKS`. `least` is the smallest effect that matters."""
    # If the first role seems to cost enough, its lower bound has to rise to `least`.
    score = effects[0].score
    if score.mean < least:
        # Otherwise the likely verdict is "nobody", so the highest upper bound has to fall below `least`.
        score = max((effect.score for effect in effects), key=lambda candidate: candidate.most)
    gap = abs(score.mean - least)
    if gap == 0:
        return None
    needed_tasks = (NORMAL_95 * score.deviation / gap) ** 2
    further_tasks = math.ceil(needed_tasks) - score.tasks
    return None if further_tasks > MOST_FURTHER_TASKS else max(further_tasks, 1)


def scoring_noise(pairs: Sequence[tuple[float, float]], outcomes: Sequence[float]) -> ScoringNoise | None:
    """The noise of a scorer, from pairs of outcomes of the same run; None without any pair.

    Half the mean squared difference of the two outcomes is the variance of one score. The noise is also given as a
    share of the variance of `outcomes`, which are all outcomes of the application as it is.
    """
    if not pairs:
        return None
    scorer_variance = fmean((first - second) ** 2 for first, second in pairs) / 2
    total_variance = pvariance(outcomes) if outcomes else 0.0
    share = float(scorer_variance > 0)  # all outcomes are equal, or there are none
    if total_variance:
        share = min(1.0, scorer_variance / total_variance)
    return ScoringNoise(
        runs=len(pairs),
        changed=sum(not math.isclose(first, second, abs_tol=1e-9) for first, second in pairs),
        deviation=math.sqrt(scorer_variance),
        share=share,
    )


class OwnRuns(NamedTuple):
    """Whether each run of one task by the unchanged application succeeded, in the order of the runs."""

    succeeded: Sequence[bool]


def luck(tasks: Sequence[OwnRuns], *, first_failed: bool = False) -> Interval | None:
    """The share of failures that succeed when the task is run again; None without a failure that was run again.

    For each failed run of a task, the other runs of the task are its further tries. With `first_failed` only the first
    run counts as a failure: for tasks that were run again because their first run failed. Tasks are weighted by their
    number of failures. The interval takes a task as one observation.
    """
    failures_of_tasks: list[int] = []
    weighted_shares: list[float] = []
    for task in tasks:
        runs = list(task.succeeded)
        failures = runs[:1].count(False) if first_failed else runs.count(False)
        if not failures or len(runs) < 2:
            continue
        failures_of_tasks.append(failures)
        weighted_shares.append(failures * (runs.count(True) / (len(runs) - 1)))
    if not failures_of_tasks:
        return None
    total = sum(failures_of_tasks)
    mean = sum(weighted_shares) / total
    # Kish's effective sample size of weighted observations.
    observations = total**2 / sum(failures**2 for failures in failures_of_tasks)
    low, high = wilson(mean, observations)
    return Interval(mean=mean, low=low, high=high, n=len(failures_of_tasks))


def nameable_effect(tasks: int, runs: int, roles: int = 4) -> float | None:
    """The smallest cost of a role that an analysis of this size names in about 4 of 5 cases, as a share of the span of
    outcomes; None if the tasks are too few to name any role.

    `runs` is the number of runs of each task. The estimate assumes `roles` roles, tasks that differ by the prior's
    spread, and outcomes of 0 and 1 of which three in four are equal.
    """
    if tasks < LEAST_TASKS:
        return None
    # A round has 2 arms for the whole application and 2 for each live role. About 60% of the roles are live on average.
    runs_per_round = 2 + 2 * 0.6 * roles
    rounds = max(1.0, runs / runs_per_round)
    outcome_variance = 0.19  # 0.75 * 0.25
    deviation = math.sqrt(PRIOR_SPREAD**2 + outcome_variance / rounds)
    degrees_of_freedom = tasks + PRIOR_OBSERVATIONS - 1
    # A one-sided test at 5% with a power of 80%.
    quantiles = float(stats.t.ppf(0.95, degrees_of_freedom)) + float(stats.norm.ppf(0.8))
    return min(1.0, LEAST_EFFECT + quantiles * deviation / math.sqrt(tasks))
