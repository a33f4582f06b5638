"""An evaluation task by task: the tasks that lost most come first."""

from __future__ import annotations

from cotune.reading.by_task import by_task, tasks_of_kind
from cotune.reading.evaluations import EvaluatedMode, StoredEvaluation, TaskEnding


def mode(**endings: float | str) -> EvaluatedMode:
    """A mode of success by task (1 or 0), or of an error."""
    made = {
        task: TaskEnding(status="error", error=end)
        if isinstance(end, str)
        else TaskEnding(status="ok", success=end > 0)
        for task, end in endings.items()
    }
    return EvaluatedMode(episodes=len(made), endings=made)


def test_tasks_that_lost_come_first_then_those_that_stay_unsolved() -> None:
    found = by_task(
        StoredEvaluation(
            evaluations={"base": mode(a=0, b=1, c=1, d=0, e=1), "trained": mode(a=1, b=0, c=1, d=0, e="ValueError: no")}
        ),
        "trained",
        "base",
    )
    assert [(one.task, one.change) for one in found] == [("b", -1), ("e", -1), ("d", 0), ("c", 0), ("a", 1)]
    assert found[1].endings["trained"].error == "ValueError: no"


def test_a_kind_of_tasks_holds_only_these() -> None:
    modes = {"base": mode(a=0, b=1, c=1, d=0), "trained": mode(a=1, b=0, c=1, d=0)}
    found = by_task(StoredEvaluation(evaluations=modes), "trained", "base")
    ids = {kind: [one.task for one in tasks_of_kind(found, kind)] for kind in ("", "lost", "gained", "same")}
    assert ids == {"": ["b", "d", "c", "a"], "lost": ["b"], "gained": ["a"], "same": ["d", "c"]}


def test_without_success_rewards_are_compared_and_a_task_without_one_comes_last() -> None:
    rewards = [
        {task: TaskEnding(status="ok" if value is not None else "error", reward=value) for task, value in of.items()}
        for of in ({"a": 1.0, "b": 0.5, "c": 1.0}, {"a": 0.25, "b": 1.0, "c": None})
    ]
    modes = {name: EvaluatedMode(episodes=3, endings=of) for name, of in zip(("base", "trained"), rewards, strict=True)}
    found = by_task(StoredEvaluation(evaluations=modes), "trained", "base")
    assert [(one.task, one.change) for one in found] == [("a", -0.75), ("b", 0.5), ("c", None)]


def test_a_failed_episode_counts_the_lowest_of_both_modes_and_an_outage_counts_nothing() -> None:
    failed = TaskEnding(status="error", reward=-1.0, floored=True)
    outage = TaskEnding(status="error", reward=0.0, known=False)
    base = EvaluatedMode(episodes=2, floor=-2.0, endings=dict.fromkeys("ab", TaskEnding(status="ok", reward=0.5)))
    trained = EvaluatedMode(episodes=2, floor=-1.0, endings={"a": outage, "b": failed})
    found = by_task(StoredEvaluation(evaluations={"base": base, "trained": trained}), "trained", "base")
    assert [(one.task, one.change) for one in found] == [("b", -2.5), ("a", None)]


def test_an_outcome_that_nobody_knows_is_no_loss() -> None:
    known, unknown = (TaskEnding(status="ok", success=True, outcome=1.0), TaskEnding(status="ok"))
    silent = TaskEnding(status="ok", outcome=0.5)
    base = EvaluatedMode(episodes=2, endings=dict.fromkeys("ab", known))
    trained = EvaluatedMode(episodes=2, endings={"a": unknown, "b": silent})
    found = by_task(StoredEvaluation(evaluations={"base": base, "trained": trained}), "trained", "base")
    assert [(one.task, one.change) for one in found] == [("b", -1.0), ("a", None)]
    assert EvaluatedMode(episodes=3, endings={"a": unknown, "b": silent, "c": known}).successes == {
        "b": False,
        "c": True,
    }
