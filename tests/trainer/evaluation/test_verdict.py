from __future__ import annotations

import numpy as np
import pytest

from cotune.intervals import Interval
from cotune.trainer.evaluation.statistics import paired_difference
from cotune.trainer.evaluation.verdict import (
    gain_shown,
    power_on_success,
    tasks_for_gain,
    tasks_for_mean,
    tasks_for_points,
    tasks_for_this,
    verdict_on_reward,
    verdict_on_success,
    what_tasks_show,
)


def share_shown(tasks: int, gained: float, lost: float, runs: int = 400) -> float:
    """How often evaluations on so many tasks show a gain, simulated with the test of the product."""
    rng, shown = np.random.default_rng(0), 0
    for _ in range(runs):
        drawn = rng.random(tasks)
        after = {str(i): float(x < gained) for i, x in enumerate(drawn)}
        before = {str(i): float(gained <= x < gained + lost) for i, x in enumerate(drawn)}
        found = paired_difference(after, before)
        assert found is not None and found.low is not None
        shown += found.low > 0
    return shown / runs


@pytest.mark.parametrize(("tasks", "gained", "lost"), [(6, 0.9, 0.0), (16, 0.6, 0.05), (51, 0.4225, 0.1225)])
def test_the_power_is_that_of_the_test(tasks: int, gained: float, lost: float) -> None:
    assert power_on_success(tasks, gained, lost) == pytest.approx(share_shown(tasks, gained, lost), abs=0.06)


def test_what_held_out_tasks_can_show() -> None:
    assert tasks_for_gain(0.3) == 51 and gain_shown(51) == 0.3
    assert gain_shown(5) is None, "five tasks that all gain do so by chance in 1 of 16 comparisons"
    assert [gain_shown(tasks) for tasks in (16, 33)] == [0.55, 0.37]
    assert what_tasks_show(16) == (
        "with 16 held-out tasks, a gain of about 55 points of success or more is seen in 4 of 5 runs"
    )
    assert what_tasks_show(5) == "5 held-out tasks cannot show a gain: 51 show one of 30 points"
    assert what_tasks_show(5000).startswith("with 5,000 held-out tasks, a gain of about 15 points")


def test_how_many_tasks_show_five_points() -> None:
    # z = 1.959964 and 0.841621. None differ, so 0.05: (2.801585 sqrt 0.05 / 0.05)^2 = 157.0, and 1 / 0.05 = 20 more
    alike = {str(i): 1.0 for i in range(50)}
    assert tasks_for_points(alike, alike) == 177
    assert power_on_success(177, 0.05, 0.0) >= 0.8
    # half gained: the deviation is 0.5, (2.801585 x 0.5 / 0.05)^2 = 784.9
    assert tasks_for_points(alike, {task: float(int(task) % 2) for task in alike}) == 805


@pytest.mark.parametrize(
    ("tasks", "gained", "lost"),
    [
        (2, 1, 0),
        (3, 1, 0),
        (5, 1, 0),
        (5, 2, 0),
        (6, 2, 0),
        (10, 2, 0),
        (10, 4, 1),
        (20, 4, 0),
        (40, 6, 1),
        (100, 9, 3),
    ],
)
def test_the_promised_number_of_tasks_shows_the_difference(tasks: int, gained: int, lost: int) -> None:
    after = {str(i): float(i < gained) for i in range(tasks)}
    before = {str(i): float(gained <= i < gained + lost) for i in range(tasks)}
    enough = tasks_for_this(after, before)
    assert enough is not None and enough > tasks
    assert share_shown(enough, gained / tasks, lost / tasks) >= 0.74
    assert tasks_for_this(before, after) == enough


def test_the_promised_number_of_tasks_shows_a_difference_of_rewards() -> None:
    rng = np.random.default_rng(1)
    for scale in (1.0, 5.0):  # within 0 and 1, and of unknown range
        before = {str(i): 0.3 * scale for i in range(12)}
        after = {str(i): (0.3 + 0.1 * float(x)) * scale for i, x in enumerate(rng.normal(0.5, 1.0, 12))}
        enough = tasks_for_this(after, before)
        assert enough is not None
        differences, shown = [after[task] - before[task] for task in after], 0
        for _ in range(200):
            drawn = rng.choice(differences, enough)
            found = paired_difference(
                {str(i): 0.3 * scale + x for i, x in enumerate(drawn)}, {str(i): 0.3 * scale for i in range(enough)}
            )
            assert found is not None and found.low is not None and found.high is not None
            shown += not found.low <= 0 <= found.high
        assert shown / 200 >= 0.7
    assert tasks_for_this({"a": 1.0, "b": 0.0}, {"a": 0.0, "b": 1.0}) is None


def test_how_many_tasks_show_a_mean() -> None:
    assert tasks_for_mean(1.0, 0.5) == 32  # (2.801585 / 0.5)^2 = 31.4


@pytest.mark.parametrize(
    ("mean", "low", "high", "said"),
    [
        (0.12, 0.04, 0.2, "new is better than old by 12.0 points of success, 95% interval 4.0 to 20.0, on 50 tasks"),
        (-0.12, -0.2, -0.04, "new is worse than old by 12.0 points of success, 95% interval 4.0 to 20.0, on 50 tasks"),
        (
            0.02,
            -0.06,
            0.1,
            "no difference shown between new and old: +2.0 points of success, 95% interval -6.0 to 10.0, on 50 tasks; "
            "about 1,600 tasks would show 5 points",
        ),
    ],
)
def test_verdict_on_success(mean: float, low: float, high: float, said: str) -> None:
    assert verdict_on_success("new", "old", Interval(mean=mean, low=low, high=high, n=50), 1568) == said


def test_verdict_on_reward() -> None:
    shown = Interval(mean=0.5, low=0.25, high=0.75, n=9)
    assert verdict_on_reward("new", "old", shown, 20) == (
        "new is better than old by 0.500 of reward, 95% interval 0.250 to 0.750, on 9 tasks"
    )
    unclear = Interval(mean=0.5, low=-0.5, high=1.5, n=5)
    assert verdict_on_reward("new", "old", unclear, 21) == (
        "no difference shown between new and old: +0.500 of reward, 95% interval -0.500 to 1.500, on 5 tasks; "
        "about 21 tasks would show a difference of this size"
    )
    one = Interval(mean=0.5, low=None, high=None, n=1)
    assert verdict_on_reward("new", "old", one, 9) == "one task shows nothing of new against old (+0.500 of reward)"


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_the_number_of_tasks_does_not_depend_on_the_scale_of_rewards(size: float):
    differences = [1.0] * 22 + [-1.0] * 18 + [0.0] * 60
    after = {str(task): size * max(difference, 0.0) for task, difference in enumerate(differences)}
    before = {str(task): size * max(-difference, 0.0) for task, difference in enumerate(differences)}
    assert tasks_for_this(after, before) == 1980
