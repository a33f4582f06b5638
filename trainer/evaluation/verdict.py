"""The verdict of a comparison in one sentence, and the number of tasks that a difference needs to be shown.

Everything here refers to one test, `paired_difference`: a difference is shown if its interval does not contain 0.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from scipy import special, stats

from cotune.intervals import LEVEL, Interval
from cotune.tables import plural
from cotune.trainer.evaluation.statistics import shared_differences, within_unit

Floats = npt.NDArray[np.float64]

POWER = 0.8
"""The chance of showing the difference with the number of tasks that is returned."""
LEAST = 6
"""Fewest tasks with which the test can show a difference: five tasks all differ the same way by chance in 1 of 16
comparisons."""
POINTS = 0.05
"""Difference of success shares for which a verdict gives the number of tasks."""
MOST_EXACT = 200
"""Most tasks for which the power is summed over all outcomes. With more, a normal approximation is close."""


def power_on_success(tasks: int, gained: float, lost: float) -> float:
    """Return the chance that `tasks` tasks with one sample each show the later policy to be better.

    `gained` is the probability that only the later policy solves a task, `lost` that only the earlier one does.
    """
    # Every outcome is a number of gains and a number of losses; the other tasks end the same way for both policies.
    gains, losses = np.meshgrid(np.arange(tasks + 1), np.arange(tasks + 1), indexing="ij")
    possible = gains + losses <= tasks
    gains = gains[possible]
    losses = losses[possible]
    same = tasks - gains - losses
    # Multinomial probability of each outcome.
    ways = special.gammaln(tasks + 1) - special.gammaln(gains + 1) - special.gammaln(losses + 1)
    ways -= special.gammaln(same + 1)
    chance = np.exp(ways) * gained**gains * lost**losses * max(1 - gained - lost, 0.0) ** same
    return float(chance[_shows_gain(tasks, gains, losses)].sum())


def _shows_gain(tasks: int, gains: Floats, losses: Floats) -> npt.NDArray[np.bool_]:
    """Return whether `paired_difference` shows a gain, for many outcomes of an evaluation with `tasks` tasks at once.

    `gains` and `losses` [outcomes] are the numbers of tasks with a difference of 1 and of -1. The result is [outcomes].
    """
    # 1. Whether the t interval around the mean difference lies above 0.
    total = tasks + 1  # includes half an observation at each of the two bounds, as in `mean`
    middle = (gains - losses) / total
    spread = gains + losses + 1 - total * middle**2
    half_width = stats.t.ppf(0.5 + LEVEL / 2, tasks) * np.sqrt(np.maximum(spread, 0.0) / tasks / total)
    is_above_zero = middle > half_width
    # 2. Whether the sign-flip test rejects too. Its p is the chance, doubled for both sides, of at most so few gains
    # (or losses) among the tasks that differ.
    fewer = np.minimum(gains, losses)
    p = np.minimum(2 * stats.binom.cdf(fewer, gains + losses, 0.5), 1.0)
    shown: npt.NDArray[np.bool_] = is_above_zero & (p <= 1 - LEVEL)
    return shown


@functools.lru_cache(256)
def gain_shown(tasks: int) -> float | None:
    """Return the smallest gain of success, in steps of 0.01, that `tasks` tasks show in 4 of 5 runs; None if they
    cannot show any.

    It assumes independent samples, and a gain from (1 - gain) / 2 to (1 + gain) / 2, which is the hardest to show.
    """

    def is_shown(percent: int) -> bool:
        gain = percent / 100
        after = (1 + gain) / 2
        before = (1 - gain) / 2
        # With independent samples, a task is won with this chance, and lost with the other one.
        won = after * (1 - before)
        lost = before * (1 - after)
        return power_on_success(tasks, won, lost) >= POWER

    # A larger gain is easier to show.
    smallest = bisect.bisect_left(range(101), True, key=is_shown)
    return smallest / 100 if smallest <= 100 else None


@functools.lru_cache(256)
def tasks_for_gain(gain: float) -> int:
    """Return the smallest number of tasks that shows this gain of success in 4 of 5 runs, as in `gain_shown`."""
    tasks = LEAST
    while power_on_success(tasks, (0.5 + gain / 2) ** 2, (0.5 - gain / 2) ** 2) < POWER:
        tasks += 1
    return tasks


def tasks_for_mean(deviation: float, difference: float) -> int:
    """Return the number of tasks that shows a mean `difference` with 80% power, if the differences of single tasks have
    this standard deviation."""
    quantiles = float(stats.norm.ppf(0.5 + LEVEL / 2) + stats.norm.ppf(POWER))
    return math.ceil((quantiles * deviation / difference) ** 2)


def tasks_for_points(after: Mapping[str, float], before: Mapping[str, float]) -> int:
    """Return the number of tasks that shows a difference of `POINTS` of success with 80% power.

    It assumes that further tasks differ as much as the shared ones, and that at least a share of `POINTS` differs.
    1 / POINTS tasks are added because the p of an exact test is discrete (Connor 1987, Biometrics 43, 207).
    """
    differences = np.array(shared_differences(after, before))
    deviation = math.sqrt(POINTS)
    if len(differences):
        deviation = max(float(np.std(differences)), deviation)
    return tasks_for_mean(deviation, POINTS) + math.ceil(1 / POINTS)


def tasks_for_this(after: Mapping[str, float], before: Mapping[str, float]) -> int | None:
    """Return how many tasks an evaluation needs to show the observed mean difference with 80% power; None if it is 0.

    `after` and `before` are the scores of two evaluations by task. It is assumed that further tasks differ as the
    shared ones do.
    """
    differences = np.array(shared_differences(after, before))
    mean_difference = float(np.mean(differences))
    if not mean_difference:
        return None
    least_tasks = max(len(differences) + 1, LEAST)
    largest = float(np.abs(differences).max())
    if set(np.unique(differences)) <= {-largest, 0.0, largest}:
        return _tasks_for_equal_sizes(differences, mean_difference, least_tasks)

    # The interval includes half an observation at each end of the range of differences. They widen it the less, the
    # more tasks there are. So the number of tasks is raised until the interval of so many tasks is narrow enough,
    # usually in fewer than ten steps.
    end_of_range = 1.0 if within_unit([*after.values(), *before.values()]) else largest
    tasks = least_tasks
    for _ in range(60):
        deviation = math.sqrt(float(np.var(differences)) + end_of_range**2 / tasks)
        needed = max(tasks_for_mean(deviation, mean_difference), least_tasks)
        if needed <= tasks:
            return tasks
        tasks = max(tasks + 1, min(needed, 2 * tasks))
    return tasks


def _tasks_for_equal_sizes(differences: Floats, mean_difference: float, least_tasks: int) -> int:
    """Return `tasks_for_this` for differences of one size (or 0), for which the power can be computed exactly. The
    search begins with `least_tasks`."""
    # The shares of tasks whose difference has the sign of the mean, and the other sign.
    gained = float(np.mean(differences * mean_difference > 0))
    lost = float(np.mean(differences * mean_difference < 0))
    # The power of each number takes time to compute, so the search moves in steps of 5%.
    tasks = least_tasks
    while tasks <= MOST_EXACT and power_on_success(tasks, gained, lost) < POWER:
        tasks = max(tasks + 1, math.floor(tasks * 1.05))
    if tasks <= MOST_EXACT:
        return tasks
    # As in `tasks_for_points`, tasks are added because the p of an exact test is discrete.
    size = float(np.abs(differences).max())
    mean_in_sizes = mean_difference / size
    deviation_in_sizes = float(np.std(differences)) / size
    return tasks_for_mean(deviation_in_sizes, mean_in_sizes) + math.ceil(1 / abs(mean_in_sizes))


def what_tasks_show(tasks: int) -> str:
    """Return a sentence on the gain that this number of held-out tasks can show, for the user to read before a run."""
    gain = gain_shown(tasks) if tasks <= MOST_EXACT else gain_shown(MOST_EXACT)
    if gain is None:
        return f"{plural(tasks, 'held-out task')} cannot show a gain: {tasks_for_gain(0.3)} show one of 30 points"
    return (
        f"with {tasks:,} held-out tasks, a gain of about {100 * gain:.0f} points of success or more is seen in 4 of 5 "
        "runs"
    )


def verdict_on_success(label: str, against: str, difference: Interval, needed_tasks: int) -> str:
    """Return the sentence on a difference of success shares. `needed_tasks` would show a difference of `POINTS`."""
    size = f"{abs(100 * difference.mean):.1f} points of success"
    clear = _clear_verdict(label, against, difference, size, scale=100, form=".1f")
    if clear:
        return clear
    verdict = f"no difference shown between {label} and {against}: {100 * difference.mean:+.1f} points of success, "
    verdict += _interval(difference, scale=100, form=".1f")
    return f"{verdict}; about {_rounded_up(needed_tasks)} tasks would show {100 * POINTS:.0f} points"


def verdict_on_reward(label: str, against: str, difference: Interval, needed_tasks: int | None) -> str:
    """Return the sentence on a difference of rewards. `needed_tasks` would show this difference (`tasks_for_this`)."""
    if difference.low is None or difference.high is None:
        return f"one task shows nothing of {label} against {against} ({difference.mean:+.3f} of reward)"
    size = f"{abs(difference.mean):.3f} of reward"
    clear = _clear_verdict(label, against, difference, size, scale=1, form=".3f")
    if clear:
        return clear
    verdict = f"no difference shown between {label} and {against}: {difference.mean:+.3f} of reward, "
    verdict += _interval(difference, scale=1, form=".3f")
    if needed_tasks is None:
        return verdict
    return f"{verdict}; about {_rounded_up(needed_tasks)} tasks would show a difference of this size"


def _clear_verdict(label: str, against: str, difference: Interval, size: str, scale: float, form: str) -> str:
    """Return the sentence on a difference whose interval does not contain 0; an empty text for any other difference.

    `size` is the difference as a text. The ends of the interval are multiplied by `scale`, written in the format `form`
    and without a sign, the smaller one first.
    """
    low = difference.low
    high = difference.high
    if low is None or high is None or low <= 0 <= high:
        return ""
    word = "better"
    if difference.mean <= 0:
        word, low, high = "worse", -high, -low
    bounds = f"95% interval {scale * low:{form}} to {scale * high:{form}}"
    return f"{label} is {word} than {against} by {size}, {bounds}, on {plural(difference.n, 'task')}"


def _interval(difference: Interval, scale: float, form: str) -> str:
    tasks = plural(difference.n, "task")
    if difference.low is None or difference.high is None:
        return tasks
    return f"95% interval {scale * difference.low:{form}} to {scale * difference.high:{form}}, on {tasks}"


def _rounded_up(number: int) -> str:
    """Round upwards to two significant digits."""
    step = 10 ** max(len(str(number)) - 2, 0)
    return f"{math.ceil(number / step) * step:,}"
