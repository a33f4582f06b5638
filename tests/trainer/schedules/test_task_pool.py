"""Adaptive pools: tasks are drawn by the variance that their groups are expected to have, and none is forgotten."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter, defaultdict

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.algorithms.catalogue import recipe
from cotune.algorithms.collect import Collected
from cotune.algorithms.policy_recipes import Recipes
from cotune.algorithms.prepare import StepContext, prepare
from cotune.algorithms.samples import Sample
from cotune.algorithms.task_signals import HALF, PRIOR, RoleFacts, TaskFacts, task_chances, with_step
from cotune.config.rollouts import CurriculumConfig
from cotune.records.structs import PolicyRef, Task
from cotune.storage.checkpoints import newest_checkpoint
from cotune.storage.episode_filters import EpisodeFilters
from cotune.storage.sqlite_store import SqliteStore
from cotune.trainer.run.checkpoint import Checkpoint, load_checkpoint
from cotune.trainer.schedules.task_pool import TaskPool, arrivals
from tests.trainer.tiny_app import application, ask

ADAPTIVE = CurriculumConfig(pool="adaptive")
names = st.integers(1, 40).map(lambda count: [f"t{i}" for i in range(count)])
facts = st.builds(
    TaskFacts,
    st.floats(-1, 1),
    st.dictionaries(
        st.sampled_from(["a", "b", "gone"]), st.builds(RoleFacts, st.floats(0.0, 64.0), st.floats(0.0, 9.0))
    ),
)
knowns = st.dictionaries(st.sampled_from([f"t{i}" for i in range(40)]), facts)


def of(variance: float, rewards: float = 8.0, role: str = "a") -> TaskFacts:
    return TaskFacts(0.5, {role: RoleFacts(rewards, variance)})


def places(ids: list[str]) -> dict[str, int]:
    return {name: i for i, name in enumerate(ids)}


@given(names, knowns, st.floats(0.01, 1.0))
def test_every_task_keeps_its_share_of_the_floor(ids, known, floor):
    found = task_chances(places(ids), known, ["a", "b"], floor)
    assert found.sum() == pytest.approx(1.0)
    assert (found >= floor / len(ids) * (1 - 1e-9)).all()


@given(names, knowns, st.integers(0, 50), st.integers(1, 12), st.sampled_from([0.0, 0.5, 2.0]))
def test_a_draw_takes_no_task_twice_and_is_the_same_again_from_a_checkpoint(ids, known, step, count, budget):
    tasks = [Task(id=name, input=name) for name in ids]
    pool = TaskPool(tasks, ADAPTIVE, budget, 3, [(0, count)], 100)
    drawn = pool.draw(step, known, ["a", "b"])
    together = [*drawn.own, *drawn.reserve]
    assert len(set(together)) == len(together) and set(together) <= set(ids)
    assert len(drawn.own) == min(count, len(ids)) and len(drawn.reserve) <= np.ceil(budget * count)
    again = msgspec.json.decode(msgspec.json.encode(known), type=dict[str, TaskFacts])
    assert TaskPool(tasks, ADAPTIVE, budget, 3, [(0, count)], 100).draw(step, again, ["b", "a"]) == drawn


def test_a_task_is_drawn_by_its_expected_variance():
    known = {"flat": of(0.0), "even": of(0.25)}
    flat, even, new = task_chances(places(["flat", "even", "new"]), known, ["a"], 0.0)
    average = 0.125
    assert [flat / new, even / new] == pytest.approx(
        [PRIOR * average / (8 + PRIOR) / average, (8 * 0.25 + PRIOR * average) / (8 + PRIOR) / average]
    )


def test_nothing_known_or_nothing_ever_different_draws_evenly():
    assert task_chances(places(["x", "y"]), {}, ["a"], 0.1).tolist() == [0.5, 0.5]
    assert task_chances(places(["x", "y"]), {"x": of(0.0)}, ["a"], 0.1).tolist() == [0.5, 0.5]


def test_each_role_has_an_equal_share_also_one_that_seldom_acts():
    ids = [f"t{i}" for i in range(10)]
    known = {name: of(0.25) for name in ids[:9]} | {"t9": of(0.01, role="b")}
    found = task_chances(places(ids), known, ["a", "b", "never"], 0.0)
    assert found[9] > 0.3  # b knows this task alone, whatever the size of its rewards
    assert found[9] < 0.5


def test_the_order_of_a_draw_follows_the_chances():
    weights = np.array([0.6, 0.3, 0.1])
    first = Counter(int(np.argmin(arrivals(weights, [seed]))) for seed in range(4000))
    assert [first[i] / 4000 for i in range(3)] == pytest.approx(weights.tolist(), abs=0.03)


def test_a_million_tasks_are_drawn_in_seconds():
    pool = TaskPool([Task(id=str(i), input=i) for i in range(1_000_000)], ADAPTIVE, 1.0, 0, [(0, 64)], 100)
    known = {str(i): of(0.25 * (i % 2)) for i in range(10_000)}
    began = time.process_time()
    assert len(set(pool.draw(7, known, ["a", "b"]).own)) == 64
    assert time.process_time() - began < 5.0


@given(st.lists(st.integers(0, 9), min_size=10, max_size=10, unique=True), st.integers(0, 20))
def test_an_even_pool_refills_with_other_tasks_and_leaves_the_steps_own_as_they_are(order, step):
    tasks = [Task(id=str(i), input=i) for i in order]
    plain = TaskPool(tasks, CurriculumConfig(), 0.0, 1, [(0, 4)], 100).draw(step, {}, [])
    drawn = TaskPool(tasks, CurriculumConfig(), 0.7, 1, [(0, 4)], 100).draw(step, {}, [])
    assert drawn.own == plain.own and not plain.reserve
    assert len(set(drawn.reserve)) == 3 and not {*drawn.reserve} & {*drawn.own}


@pytest.mark.parametrize(("tasks", "per_step", "budget"), [(60, 32, 1.0), (48, 32, 0.5), (100, 64, 0.5)])
def test_a_refill_draws_no_task_for_its_place_in_the_file(tasks, per_step, budget):
    """Also if a step and its refill ask for nearly all tasks: the first half of the file has half of the draws."""
    pool = TaskPool(
        [Task(id=str(i), input=i) for i in range(tasks)], CurriculumConfig(), budget, 0, [(0, per_step)], 100
    )
    taken: Counter[bool] = Counter()
    for step in range(300):  # a refill seldom takes more than the first few
        taken.update(int(name) < tasks / 2 for name in pool.draw(step, {}, []).reserve[:4])
    assert taken[True] / taken.total() == pytest.approx(0.5, abs=0.05)


def rewards_of_a_fixed_policy(solved, pool, steps=60):
    """Mean over steps of the reward that is shown, for a policy that solves each task with these chances."""
    rng = random.Random(1)
    tasks = [Task(id=f"t{i}", input=0) for i in range(200)]
    chance = {task.id: solved[i % len(solved)] for i, task in enumerate(tasks)}
    drawing = TaskPool(tasks, CurriculumConfig(pool=pool), 0.0, 0, [(0, 24)], 100)
    recipes, known, shown = Recipes(run=recipe("dr_mas")), {}, []
    for step in range(steps):
        drawn = drawing.draw(step, known, ["w"])
        samples = [
            Sample(
                id=f"{task}.{step}.{k}.0", task=task, rollout=f"{task}-{step}-{k}", role="w", turn=0, step=0,
                branch="x", prompt=task, policy=PolicyRef("p"), tokens=4, training_step=step,
                outcome={"team": float(rng.random() < chance[task])},
            )
            for task in drawn.own
            for k in range(8)
        ]  # fmt: skip
        known = with_step(known, Collected(samples=samples, calls={}, left_out={}), recipes)
        prepared = prepare(samples, recipes.run, context=StepContext(task_weights=drawn.task_weights))
        assert prepared.reward == pytest.approx(prepared.roles["w"].reward)
        shown.append(prepared.roles["w"].reward)
    return sum(shown) / steps


@pytest.mark.parametrize("solved", [(0.0, 0.5), (0.0, 0.3, 0.6, 1.0), (0.9, 1.0, 1.0, 0.5)])
@pytest.mark.parametrize("pool", ["even", "adaptive"])
def test_the_reward_of_a_step_is_that_of_all_tasks_whichever_are_drawn(solved, pool):
    assert rewards_of_a_fixed_policy(solved, pool) == pytest.approx(sum(solved) / len(solved), abs=0.03)


async def graded(task):
    """Tasks of three kinds: always right, never right, and as the model says."""
    said = await ask("first", f"say {task['letter']}")
    return {"easy": 1.0, "hard": 0.0}.get(task["kind"], sum(letter in "abcdefgh" for letter in said) / 4)


LETTERS = "abcdefghijkl"
GRADED = [
    {"id": f"{kind}-{letter}", "letter": letter, "kind": kind}
    for letter, kind in zip(LETTERS, ["easy", "hard", "easy", "hard", "mixed", "mixed"] * 2, strict=True)
]
SETTINGS = {
    "curriculum": {"pool": "adaptive"},
    "tasks_per_step": 4,
    "plan": {"k": 8},
    "learner": {"lr": 1e-4},
}


def drawn_in(trainer, run: str) -> dict[int, set[str]]:
    found = defaultdict(set)
    with contextlib.closing(SqliteStore.open(trainer.folder / run / "records.db")) as store:
        for episode in store.episodes(EpisodeFilters(phase="train")):
            found[episode.training_step].add(episode.task.id)
    return found


def state_of(trainer, run: str) -> Checkpoint:
    saved = load_checkpoint(trainer.folder / run / "checkpoints")
    assert saved is not None
    return saved[0]


def weights_of(trainer, run: str) -> dict[str, bytes]:
    """The files of the newest checkpoint, but for those with progress, which have unset bytes."""
    checkpoint = newest_checkpoint(trainer.folder / run / "checkpoints")
    assert checkpoint is not None
    files = {file.name: file.read_bytes() for file in checkpoint.glob("*.safetensors") if "progress" not in file.name}
    assert files
    return files


def test_a_run_comes_to_draw_the_tasks_that_differ(trainer):
    trainer(application(graded), GRADED, steps=12, **SETTINGS)
    late = Counter(
        name.partition("-")[0] for step, ids in drawn_in(trainer, "run").items() if step >= 4 for name in ids
    )
    assert late["mixed"] > 0.5 * late.total()  # a third of all tasks
    known = state_of(trainer, "run").tasks
    assert known["easy-a"].reward == 1.0 and known["easy-a"].roles["first"].variance == 0.0
    assert known["mixed-e"].roles["first"].variance > 0.0
    assert known["mixed-e"].roles["first"].rewards <= 8 / (1 - HALF)


def test_a_resumed_run_is_equal_to_the_bit(trainer):
    app = application(graded)
    settings = {**SETTINGS, "plan": {"k": 4}, "concurrency": 1, "sampling": {"repeatable": True}}
    trainer(app, GRADED, to="whole", steps=3, **settings)
    trainer(app, GRADED, to="broken", steps=2, **settings)
    trainer.resume(app, GRADED, to="broken", steps=3)
    assert drawn_in(trainer, "whole") == drawn_in(trainer, "broken")
    assert state_of(trainer, "whole").tasks == state_of(trainer, "broken").tasks
    for one, other in zip(trainer.metrics("whole"), trainer.metrics("broken"), strict=True):
        assert (one["rows"], one["left_out"], one["roles"]) == (other["rows"], other["left_out"], other["roles"])
    assert weights_of(trainer, "whole") == weights_of(trainer, "broken")


def test_steps_that_were_rolled_out_ahead_keep_their_tasks_in_a_resumed_run(trainer, monkeypatch):
    monkeypatch.setattr("cotune.config.train.STEPS_AHEAD", 2)
    app, settings = application(graded), {**SETTINGS, "plan": {"k": 4}, "mode": "async"}
    trainer(app, GRADED, to="whole", steps=5, **settings)
    trainer(app, GRADED, to="broken", steps=3, **settings)
    ahead = state_of(trainer, "broken").drawn
    trainer.resume(app, GRADED, to="broken", steps=5)
    drawn = drawn_in(trainer, "broken")
    assert sorted(ahead) == [3, 4]  # drawn by what was known after two steps and before
    assert {step: {*tasks.own} for step, tasks in ahead.items()} == {step: drawn[step] for step in ahead}
    assert [drawn[step] for step in range(5)] == [drawn_in(trainer, "whole")[step] for step in range(5)]
