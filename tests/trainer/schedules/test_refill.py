"""Refills: what a step draws in place of tasks whose groups have nothing to compare."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cotune
from cotune.algorithms.catalogue import recipe
from cotune.algorithms.task_signals import GroupSignal
from cotune.config.rollouts import RefillConfig
from cotune.errors import ConfigError
from cotune.records.structs import Episode, Task
from cotune.trainer.config.load import convert
from cotune.trainer.rollout.refill import run_refill
from cotune.trainer.schedules.refill import Refill, check_refill
from cotune.trainer.schedules.task_pool import DrawnTasks
from tests.trainer.tiny_app import application

OWN, RESERVE = ("a", "b", "c", "d"), ("w", "x", "y", "z")


def group(task: str, role: str = "first", *, spread: bool = False, episode: str = "") -> GroupSignal:
    return GroupSignal(
        task=task,
        roles=frozenset({role}),
        episodes=frozenset({episode or task}),
        rewards=4,
        variance=0.25 * spread,
        spread=spread,
    )


def refill(*signals: GroupSignal, budget: float = 1.0) -> Refill:
    return Refill(RefillConfig(budget=budget), DrawnTasks(OWN, RESERVE), ["first", "second"], signals)


def test_groups_without_spread_are_replaced_until_the_role_has_as_many():
    step = refill(group("a", spread=True), group("b"), group("c", spread=True), group("d", spread=True))
    assert step.targets == {"first": 4} and step.missing == {"first": 1}
    assert step.more() == ["w", "x"]  # each of which shows one with the chance (3 + 1) / (4 + 2)
    step.ended(["w", "x"], ["w", "x"], [group("w"), group("x")])
    assert step.more() == ["y", "z"]
    step.ended(["y", "z"], ["y", "z"], [group("y", spread=True), group("z")])
    assert step.missing == {} and step.more() == [] and step.tasks == 4
    assert step.figures("first") == {"refill_drawn": 4, "refill_kept": 1, "refill_wasted": 3, "refill_missing": 0}


def test_a_step_whose_groups_all_differ_draws_nothing():
    assert refill(*(group(name, spread=True) for name in OWN)).more() == []


def test_a_role_that_seldom_acts_is_not_waited_for():
    common = [group(name, spread=True) for name in OWN]
    assert refill(*common, group("a", "second")).targets == {"first": 4}
    assert refill(*common, group("a", "second"), group("b", "second")).missing == {"second": 2}
    assert refill(group("a"), group("b", "second")).targets == {"first": 1, "second": 1}, "none acts more often"
    assert refill().more() == [], "no group at all"


@given(
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.floats(0.01, 1.0),
)
def test_a_refill_ends_within_its_budget_and_draws_no_further_task_twice(own, more, budget):
    step = refill(*(group(n, spread=s) for n, s in zip(OWN, own, strict=True)), budget=budget)
    shown = dict(zip(RESERVE, more, strict=True))
    every: list[str] = []
    while drawn := step.more():
        every += drawn
        step.ended(drawn, drawn, [group(name, spread=shown.get(name, False)) for name in drawn])
    assert step.tasks <= -(-budget * 4 // 1) + 1e-6
    assert len(set(every)) == len(every) == step.tasks
    assert not step.missing or step.tasks == int(-(-budget * 4 // 1))


def episodes(names, number: int = 0) -> list[Episode]:
    return [Episode(id=f"{name}{number}", task=Task(id=name, input=name), workflow="w") for name in names]


def driven(
    step: Refill, at_once: int | None, slow: str = "", needed: bool = False
) -> tuple[list[Episode], list[str], list[list[str]]]:
    """Runs a refill whose further tasks all differ. `slow` ends long after the others; if training has `needed` the
    step from the start, never."""
    batches: list[list[str]] = []

    async def roll(names):
        batches.append(list(names))
        if slow in names and slow:
            await (asyncio.Event().wait() if needed else asyncio.sleep(0.2))
        return episodes(names)

    async def judge(ended):
        return [group(e.task.id, spread=True, episode=e.id) for e in ended]

    async def run():
        asked = asyncio.Event()
        if needed:
            asked.set()
        return await asyncio.wait_for(run_refill(step, episodes(OWN), roll, judge, at_once, asked), 10)

    added, late = asyncio.run(run())
    return added, late, batches


def test_in_mode_sync_tasks_drawn_together_are_waited_for():
    step = refill(group("a", spread=True), group("b", spread=True), group("c"), group("d"))
    added, late, batches = driven(step, None)
    assert batches == [["w", "x", "y", "z"]] and [e.id for e in added] == ["w0", "x0", "y0", "z0"] and late == []


def test_in_mode_async_slow_tasks_are_waited_for_while_nobody_needs_the_step():
    step = refill(group("a", spread=True), group("b", spread=True), group("c"), group("d"))
    added, late, batches = driven(step, 8, slow="w")
    assert sorted(e.id for e in added) == ["w0", "x0", "y0", "z0"] and late == []
    assert batches == [["w"], ["x"], ["y"], ["z"]], "nothing more is drawn meanwhile"


def test_in_mode_async_no_task_is_waited_for_once_training_needs_the_step():
    step = refill(group("a", spread=True), group("b", spread=True), group("c"), group("d"))
    added, late, batches = driven(step, 8, slow="w", needed=True)
    assert sorted(e.id for e in added) == ["x0", "y0", "z0"] and late == ["w"]
    assert batches == [["w"], ["x"], ["y"], ["z"]]
    assert step.figures("first")["refill_kept"] == 3


def test_no_more_run_at_once_than_the_concurrency_allows():
    step = refill(*(group(name) for name in OWN))
    _, _, batches = driven(step, 1)
    assert [len(batch) for batch in batches] == [1] * len(batches)


def test_an_episode_that_raises_ends_the_refill():
    async def roll(names):
        raise ValueError("the engine is gone")

    async def judge(ended):
        return []

    with pytest.raises(ValueError, match="the engine is gone"):
        asyncio.run(run_refill(refill(group("a")), [], roll, judge, None))


def test_wrong_refills_are_refused():
    with pytest.raises(ConfigError, match=r"refill.budget = -1.0 must be 0 or more"):
        RefillConfig(budget=-1.0)


def test_check_refuses_a_refill_without_effect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    tasks = [{"id": str(number), "letter": "a"} for number in range(10)]
    with pytest.raises(ConfigError, match=r"refill.budget = 1.0 has no effect with recipe distill"):
        cotune.check(application(), tasks, refill={"budget": 1.0}, recipe="distill", distill={"teacher": "t"})


def test_a_refill_is_refused_only_if_no_policy_learns_from_rewards() -> None:
    config = convert({"model": "m", "refill": {"budget": 0.5}})
    taught, rewarded = recipe("distill"), recipe("dr_mas")
    check_refill(config, [rewarded, taught])
    check_refill(config, [taught, rewarded])
    with pytest.raises(ConfigError, match=r"refill.budget = 0.5 has no effect with recipe distill"):
        check_refill(config, [taught])
