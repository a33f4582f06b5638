"""Refills of real runs: further tasks, the same again, in mode async, stopped and resumed, under each plan."""

from __future__ import annotations

import contextlib
import signal
from collections import defaultdict

import pytest

from cotune.config.rollouts import CurriculumConfig
from cotune.errors import ConfigError
from cotune.records.tasks import as_tasks
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.schedules.task_pool import TaskPool
from tests.trainer import worker_app
from tests.trainer.schedules.test_task_pool import GRADED, LETTERS, drawn_in, graded, state_of, weights_of
from tests.trainer.test_step import StopsOnce
from tests.trainer.tiny_app import application, ask, letters

MIXED = [task for task in GRADED if task["kind"] == "mixed"]
K = 4
SETTINGS = {
    "tasks_per_step": 4,
    "plan": {"k": K},
    "learner": {"lr": 1e-4},
    "concurrency": 1,
    "sampling": {"repeatable": True},
}


CLUSTER = {"address": "local", "learners": 1, "rollout_workers": 2}


def episodes_in(trainer, run: str = "run") -> dict[int, list]:
    found = defaultdict(list)
    with contextlib.closing(SqliteStore.open(trainer.folder / run / "records.db")) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            found[episode.training_step].append(episode)
    return found


def test_flat_groups_are_replaced_and_all_that_is_drawn_is_counted(trainer):
    app = application(graded)
    trainer(app, GRADED, to="plain", steps=2, **SETTINGS)
    trainer(app, GRADED, steps=2, refill={"budget": 2.0}, **SETTINGS)
    plain, lines = trainer.metrics("plain"), trainer.metrics()
    assert sum(line["groups"] for line in lines) > sum(line["groups"] for line in plain)
    for line, episodes in zip(lines, episodes_in(trainer).values(), strict=True):
        own, refill = line["roles"]["first"], line["refill"]
        assert refill == {"tasks": refill["tasks"], "episodes": K * refill["tasks"], "late": 0, "late_tasks": 0}
        assert len(episodes) == line["episodes"] == K * (4 + refill["tasks"])
        assert len({e.task.id for e in episodes}) == 4 + refill["tasks"] <= 12
        assert own["refill_drawn"] == own["refill_kept"] + own["refill_wasted"] == refill["tasks"]
        assert line["groups"] + own["refill_missing"] >= 4
        assert line["candidates"] == line["rows"] + sum(line["left_out"].values())
    assert f"refill: {lines[0]['refill']['tasks']} tasks (first " in trainer.said
    first = {e.task.id for e in episodes_in(trainer, "plain")[0]}
    assert first <= {e.task.id for e in episodes_in(trainer)[0]}, "the step's own tasks are the same"


def test_without_a_budget_a_run_is_as_it_was(trainer):
    app = application(graded)
    trainer(app, MIXED, to="unneeded", steps=2, refill={"budget": 1.0}, **SETTINGS)
    trainer(app, MIXED, to="mixed", steps=2, **SETTINGS)
    assert all(line["refill"] == {} for line in trainer.metrics("mixed"))
    assert [line["refill"]["tasks"] for line in trainer.metrics("unneeded")] == [0] * 2
    assert weights_of(trainer, "unneeded") == weights_of(trainer, "mixed"), "a refill that draws nothing"


async def never(task):
    await ask("first", f"say {task['letter']}")
    return 0.0


def test_tasks_that_nobody_solves_cost_the_budget_and_no_more_and_it_is_said(trainer):
    trainer(application(never), GRADED, steps=2, refill={"budget": 0.5}, **SETTINGS)
    assert [line["refill"]["tasks"] for line in trainer.metrics()] == [2, 2]
    assert trainer.metrics()[0]["roles"]["first"]["refill_wasted"] == 2
    assert " ".join(trainer.said.split()).count("The refill's budget was spent before role 'first'") == 1


def test_a_run_that_is_stopped_in_a_refill_ends_like_one_without_a_stop(trainer):
    settings = {**SETTINGS, "refill": {"budget": 2.0}}
    trainer(application(graded), GRADED, to="whole", steps=2, **settings)
    stop, begun = StopsOnce(signal.SIGINT), 0

    async def stopping(task):
        nonlocal begun
        begun += 1
        if begun == 3 + 4 * K + 5:  # after the preflight and the first step's own: in its refill
            stop()
        return await graded(task)

    assert not trainer(application(stopping), GRADED, to="stopped", steps=2, **settings).finished
    trainer.resume(application(graded), GRADED, to="stopped")
    assert drawn_in(trainer, "whole") == drawn_in(trainer, "stopped")
    assert state_of(trainer, "whole").tasks == state_of(trainer, "stopped").tasks
    assert weights_of(trainer, "whole") == weights_of(trainer, "stopped")
    places = [
        (e.training_step, e.task.id, e.rollout)
        for of in episodes_in(trainer, "stopped").values()
        for e in of
        if e.status == "ok"
    ]
    assert len(set(places)) == len(places), "nothing is run twice"


async def two(task):
    heard = await ask("first", f"say {task['letter']}")
    await ask("second", f"after {heard}")
    return 1.0


def scored(candidate, call, task):
    return {"easy": 1.0, "hard": 0.0}.get(task["kind"], letters(candidate, call, task))


def test_a_tree_refills_by_role(trainer):
    app = application(two, first=scored, second=lambda candidate, call, task: 1.0)
    trainer(app, GRADED, steps=2, refill={"budget": 1.0}, **SETTINGS)
    for line in trainer.metrics():
        assert line["refill"]["tasks"] == 4, "the second role has never a group that differs"
        assert line["roles"]["second"]["refill_wasted"] == 4 and line["roles"]["second"]["refill_missing"] == 4
        assert line["roles"]["first"]["refill_drawn"] == 4


async def outcome(task):
    heard = await ask("first", f"say {task['letter']}")
    return scored_text(heard, task)


def scored_text(text, task):
    return {"easy": 1.0, "hard": 0.0}.get(task["kind"], sum(letter in "abcdefgh" for letter in text) / 4)


def test_a_replay_plan_refills_with_further_tasks(trainer):
    settings = {**SETTINGS, "plan": {"kind": "replay", "k": 4}, "refill": {"budget": 2.0}}
    trainer(application(outcome), GRADED, steps=2, **settings)
    for line in trainer.metrics():
        assert line["refill"]["episodes"] == 5 * line["refill"]["tasks"] > 0
        assert line["replay"]["branches"] == 4 * (4 + line["refill"]["tasks"])


def test_an_adaptive_pool_refills_in_its_order(trainer):
    settings = {**SETTINGS, "curriculum": {"pool": "adaptive"}, "refill": {"budget": 1.0}}
    trainer(application(graded), GRADED, steps=2, **settings)
    assert all(
        len(ids) == 4 + line["refill"]["tasks"]
        for ids, line in zip(drawn_in(trainer, "run").values(), trainer.metrics(), strict=True)
    )


def sticky_tasks() -> list[dict[str, str]]:
    """The own tasks of the first step are flat, and one of those that its refill takes first never ends there."""
    ids = list(LETTERS)
    drawn = TaskPool(as_tasks([{"id": name} for name in ids]), CurriculumConfig(), 2.0, 0, [(0, 4)], 100).draw(
        0, {}, []
    )
    stuck = next(name for name in drawn.reserve[:4] if name not in ids[:3])  # which the preflight takes
    kinds = {**dict.fromkeys(drawn.own, "flat"), stuck: "stuck"}
    return [{"id": name, "letter": name, "kind": kinds.get(name, "")} for name in ids]


@pytest.mark.parametrize("where", ["here", pytest.param("ray", marks=pytest.mark.long)])
def test_in_mode_async_a_late_episode_is_not_waited_for_and_counted(trainer, where, request):
    settings = {**SETTINGS, "concurrency": 64, "sampling": {}, "mode": "async", "refill": {"budget": 2.0}}
    if where == "ray":
        request.getfixturevalue("ray_runtime")
        settings |= {"cluster": CLUSTER, "engine": "transformers"}
    trainer(worker_app.sticky, sticky_tasks(), steps=2, **settings)
    line = trainer.metrics()[0]
    cancelled = [e for e in episodes_in(trainer)[0] if e.status == "cancelled"]
    assert "stuck" in {e.task.input["kind"] for e in cancelled}
    assert line["refill"]["late"] >= len(cancelled) >= K and line["failed"] == 0
    assert line["refill"]["episodes"] + line["refill"]["late"] + 4 * K == len(episodes_in(trainer)[0])
    assert line["groups"] >= 1 and line["seconds"]["rollout"] < 600
    said = " ".join(trainer.said.split())
    assert line["refill"]["late_tasks"] >= 1 and f"late ({line['refill']['late']} episodes)" in said
    assert "tasks whose episodes take long are under-represented" in said
    assert all({*line["staleness"]} <= {"0", "1"} for line in trainer.metrics())


def test_what_a_judge_says_of_further_tasks_is_waited_for(trainer):
    """It finds the episodes of a step's own tasks equal, and those of others different."""
    app, own = application(told), set[str]()

    @app.judge
    def judged(episodes, task):
        own.add(task["id"]) if len(own) < 4 + 2 else None  # two are looked at before
        return [0.5 if task["id"] in own else float(place % 2) for place in range(len(episodes))]

    trainer(app, GRADED, steps=1, refill={"budget": 1.0}, **SETTINGS)
    (line,) = trainer.metrics()
    first = line["roles"]["first"]
    assert line["refill"] == {"tasks": 4, "episodes": 4 * K, "late": 0, "late_tasks": 0}
    assert (first["refill_drawn"], first["refill_wasted"]) == (4, 4 - first["refill_kept"])
    assert line["groups"] == first["refill_kept"] > 0


async def told(task):
    await ask("first", f"say {task['letter']}")


def test_a_refill_without_a_use_is_refused_before_work_starts(trainer):
    with pytest.raises(ConfigError, match=r"refill.budget = 1.0 has no effect with recipe"):
        trainer(application(graded), GRADED, recipe="reinforce_pp", refill={"budget": 1.0}, **SETTINGS)
    assert not (trainer.folder / "run").exists()
