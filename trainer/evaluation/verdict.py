"""The verdict of a comparison in one sentence, and how many tasks show how large a difference.

All of it is about one test, `paired_difference`: a difference is shown if its interval leaves out 0.
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
"""Chance that so many tasks show the difference."""
LEAST = 6
"""Tasks that the test needs at least: five that all differ the same way do so by chance in 1 of 16 comparisons."""
POINTS = 0.05
"""Difference of success shares for which a verdict gives the number of tasks."""
MOST_EXACT = 200
"""Tasks up to which the power for success is summed over all outcomes; beyond, a normal approximation is close."""


def power_on_success(tasks: int, gained: float, lost: float) -> float:
    """Chance that `tasks` tasks with one sample each show the later policy to be better, if it alone solves a task
    with probability `gained`, and the earlier one alone with probability `lost`."""
    gains, losses = np.meshgrid(np.arange(tasks + 1), np.arange(tasks + 1), indexing="ij")
    possible = gains + losses <= tasks
    gains, losses = gains[possible], losses[possible]
    same = tasks - gains - losses
    # Multinomial probability of each outcome.
    ways = special.gammaln(tasks + 1) - special.gammaln(gains + 1) - special.gammaln(losses + 1)
    ways -= special.gammaln(same + 1)
    chance = np.exp(ways) * gained**gains * lost**losses * max(1 - gained - lost, 0.0) ** same
    return float(chance[_shows_gain(tasks, gains, losses)].sum())


def _shows_gain(tasks: int, gains: Floats, losses: Floats) -> npt.NDArray[np.bool_]:
    """`paired_difference` for differences of 1, 0 and -1, for many outcomes at once: whether it shows a gain."""
    total = tasks + 1  # with half an observation at each of both bounds
    middle = (gains - losses) / total
    spread = gains + losses + 1 - total * middle**2
    half = stats.t.ppf(0.5 + LEVEL / 2, tasks) * np.sqrt(np.maximum(spread, 0.0) / tasks / total)
    sign_flip = np.minimum(2 * stats.binom.cdf(np.minimum(gains, losses), gains + losses, 0.5), 1.0)
    shown: npt.NDArray[np.bool_] = (middle > half) & (sign_flip <= 1 - LEVEL)
    return shown


@functools.lru_cache(256)
def gain_shown(tasks: int) -> float | None:
    """The smallest gain of success, in hundredths, that `tasks` tasks show in 4 of 5 runs; None if they show none.

    It is the gain from (1 - gain) / 2 to (1 + gain) / 2, which is the hardest to show, of samples that are independent.
    """

    def is_shown(points: int) -> bool:
        better, worse = 0.5 + points / 200, 0.5 - points / 200
        return power_on_success(tasks, better**2, worse**2) >= POWER

    points = bisect.bisect_left(range(101), True, key=is_shown)
    return points / 100 if points <= 100 else None


@functools.lru_cache(256)
def tasks_for_gain(gain: float) -> int:
    """The smallest number of tasks that shows this gain of success in 4 of 5 runs, as `gain_shown` has it."""
    tasks = LEAST
    while power_on_success(tasks, (0.5 + gain / 2) ** 2, (0.5 - gain / 2) ** 2) < POWER:
        tasks += 1
    return tasks


def tasks_for_mean(deviation: float, difference: float) -> int:
    """Tasks whose paired differences, of this standard deviation, show a mean `difference` with 80% power."""
    return math.ceil(((_z(0.5 + LEVEL / 2) + _z(POWER)) * deviation / difference) ** 2)


def tasks_for_points(after: Mapping[str, float], before: Mapping[str, float]) -> int:
    """Tasks that show a difference of `POINTS` of success with 80% power, if their differences vary as those of the
    shared tasks do, and at least as if a share of `POINTS` of them differed.

    1 / POINTS tasks are added for the steps in which an exact test's p goes (Connor 1987, Biometrics 43, 207).
    """
    differences = np.array(shared_differences(after, before))
    deviation = max(float(np.std(differences)) if len(differences) else 0.0, math.sqrt(POINTS))
    return tasks_for_mean(deviation, POINTS) + math.ceil(1 / POINTS)


def tasks_for_this(after: Mapping[str, float], before: Mapping[str, float]) -> int | None:
    """Tasks that show the mean difference of the shared tasks in 4 of 5 evaluations, if further tasks differ as these
    do; None if the mean is 0."""
    differences = np.array(shared_differences(after, before))
    n, centre = len(differences), float(np.mean(differences))
    if not centre:
        return None
    size = float(np.abs(differences).max())
    if set(np.unique(differences)) <= {-size, 0.0, size}:
        # Differences of one size: the power is known exactly.
        rates = float(np.mean(differences * centre > 0)), float(np.mean(differences * centre < 0))
        tasks = max(n + 1, LEAST)
        while tasks <= MOST_EXACT and power_on_success(tasks, *rates) < POWER:
            tasks = max(tasks + 1, math.floor(tasks * 1.05))
        if tasks <= MOST_EXACT:
            return tasks
        centre, size = centre / size, 1.0
        return tasks_for_mean(float(np.std(differences / size)), centre) + math.ceil(1 / abs(centre))
    # The interval has half an observation at each end of the range: of little weight if the tasks are many.
    bound = 1.0 if within_unit([*after.values(), *before.values()]) else size
    tasks = max(n + 1, LEAST)
    for _ in range(60):
        deviation = math.sqrt(float(np.var(differences)) + bound**2 / tasks)
        needed = max(tasks_for_mean(deviation, centre), n + 1, LEAST)
        if needed <= tasks:
            return tasks
        tasks = max(tasks + 1, min(needed, 2 * tasks))
    return tasks


def what_tasks_show(tasks: int) -> str:
    """A sentence on what so many held-out tasks can show, for the user to read before a run."""
    gain = gain_shown(tasks) if tasks <= MOST_EXACT else gain_shown(MOST_EXACT)
    if gain is None:
        return f"{plural(tasks, 'held-out task')} cannot show a gain: {tasks_for_gain(0.3)} show one of 30 points"
    return (
        f"with {tasks:,} held-out tasks, a gain of about {100 * gain:.0f} points of success or more is seen in 4 of 5 "
        "runs"
    )


def verdict_on_success(label: str, against: str, found: Interval, enough: int) -> str:
    """The sentence on a difference of success shares; `enough` tasks would show 5 points."""
    said = f"{100 * found.mean:+.1f} points of success, {_interval(found, 100, '.1f')}"
    clear = _clear(label, against, found, f"{abs(100 * found.mean):.1f} points of success", 100, ".1f")
    return clear or (
        f"no difference shown between {label} and {against}: {said}; about {_rounded(enough)} tasks would show "
        f"{100 * POINTS:.0f} points"
    )


def verdict_on_reward(label: str, against: str, found: Interval, enough: int | None) -> str:
    """The sentence on a difference of rewards; `enough` tasks would show one of this size (`tasks_for_this`)."""
    if found.low is None or found.high is None:
        return f"one task shows nothing of {label} against {against} ({found.mean:+.3f} of reward)"
    clear = _clear(label, against, found, f"{abs(found.mean):.3f} of reward", 1, ".3f")
    if clear:
        return clear
    said = f"no difference shown between {label} and {against}: {found.mean:+.3f} of reward, "
    said += _interval(found, 1, ".3f")
    if enough is None:
        return said
    return f"{said}; about {_rounded(enough)} tasks would show a difference of this size"


def _clear(label: str, against: str, found: Interval, size: str, scale: float, form: str) -> str:
    """The sentence on an interval without zero, with the smaller end first; empty for another."""
    if found.low is None or found.high is None or found.low <= 0 <= found.high:
        return ""
    word, low, high = ("better", found.low, found.high) if found.mean > 0 else ("worse", -found.high, -found.low)
    bounds = f"95% interval {scale * low:{form}} to {scale * high:{form}}"
    return f"{label} is {word} than {against} by {size}, {bounds}, on {plural(found.n, 'task')}"


def _interval(found: Interval, scale: float, form: str) -> str:
    if found.low is None or found.high is None:
        return plural(found.n, "task")
    return f"95% interval {scale * found.low:{form}} to {scale * found.high:{form}}, on {plural(found.n, 'task')}"


def _rounded(number: int) -> str:
    """To two digits that count, upwards."""
    step = 10 ** max(len(str(number)) - 2, 0)
    return f"{math.ceil(number / step) * step:,}"


def _z(quantile: float) -> float:
    return float(stats.norm.ppf(quantile))
