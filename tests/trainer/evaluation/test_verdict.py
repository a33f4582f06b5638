from __future__ import annotations

import pytest

from cotune.intervals import Interval
from cotune.trainer.evaluation.verdict import tasks_for_mean, tasks_for_share, verdict_on_reward, verdict_on_success


def test_how_many_tasks_show_five_points() -> None:
    # z = 1.959964 and 0.841621. None differ, so 0.05: ((1.959964 sqrt 0.05 + 0.841621 sqrt 0.0475) / 0.05)^2 = 154.6
    alike = {str(i): True for i in range(50)}
    assert tasks_for_share(alike, alike) == 155
    # half differ: ((1.959964 sqrt 0.5 + 0.841621 sqrt 0.4975) / 0.05)^2 = 1567.4
    assert tasks_for_share(alike, {task: int(task) % 2 == 0 for task in alike}) == 1568


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
    assert verdict_on_reward("new", "old", shown) == (
        "new is better than old by 0.500 of reward, 95% interval 0.250 to 0.750, on 9 tasks"
    )
    # half 1 = t(0.975, 4) s / sqrt 5, so s = sqrt 5 / 2.776445 = 0.80538; (2.801585 s / 0.5)^2 = 20.4
    unclear = Interval(mean=0.5, low=-0.5, high=1.5, n=5)
    assert verdict_on_reward("new", "old", unclear) == (
        "no difference shown between new and old: +0.500 of reward, 95% interval -0.500 to 1.500, on 5 tasks; "
        "about 21 tasks would show a difference of this size"
    )
    one = Interval(mean=0.5, low=None, high=None, n=1)
    assert verdict_on_reward("new", "old", one) == "one task shows nothing of new against old (+0.500 of reward)"
