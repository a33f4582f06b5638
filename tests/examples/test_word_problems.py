"""The word problems: their tasks, the calculator, what messages are worth, and a demo that was stopped and goes on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cotune.integrations.apps.activation import activate
from cotune.records.tasks import as_tasks
from examples.stages import Stages
from examples.word_problems import app, tasks, train
from examples.word_problems.calculator import NOT_A_SUM, calculate
from tests.examples.applications import check_knows_nothing_of_cotune, models_asked_by
from tests.integrations.recorded import Recorded

activate()
FOLDER = Path(tasks.__file__).parent


def test_a_sum_is_calculated_and_anything_else_is_none() -> None:
    assert calculate(" 3 * 4 + 2 * 6 ") == "24"
    assert calculate("( 20 - -5 ) * -2") == "-50"
    others = ("", "7 legs", "7 +", "3 / 2", "2 ** 9", "1.5 + 1", "True + 1", "f(1)", "(" * 500 + "1" + ")" * 500)
    assert [calculate(text) for text in others] == [NOT_A_SUM] * len(others)


def test_tasks_take_turns_repeat_with_their_seed_and_never_ask_twice() -> None:
    made = tasks.make_tasks(60)
    assert [task["kind"] for task in made[:4]] == ["chain_sum", "basic_arithmetic", "leg_counting", "chain_sum"]
    assert tasks.make_tasks(20, skip=40) == made[40:]
    assert tasks.make_tasks(60, seed=1)[0] != made[0]
    assert len({task["question"] for task in made}) == len({task["id"] for task in made}) == 60
    assert len(as_tasks(made)) == 60
    assert made[2]["question"].startswith("Now, how many legs are there in total if you have ")
    for task in made:
        assert json.loads(json.dumps(task)) == task and str(int(task["answer"])) == task["answer"]
    for task in made[:60:3]:  # chain_sum: the sum stands in the question
        assert calculate(task["question"].partition(":")[2].removesuffix("=")) == task["answer"]


TASK: tasks.Problem = {"id": "t", "kind": "leg_counting", "question": "Legs of 3 dogs, 2 bees?", "answer": "24"}


def test_what_a_sum_is_worth() -> None:
    assert train.planner_reward("3 * 4 + 2 * 6", TASK) == {"team": 1.0, "local": 0.5}
    assert train.planner_reward("3 + 1", TASK) == {"team": 0.0, "local": 0.375}
    assert train.planner_reward("24", TASK) == {"team": 1.0, "local": 0.25}
    assert train.planner_reward("There are 24", TASK) == {"team": 0.0, "local": 0.0}


def test_what_a_verdict_is_worth() -> None:
    assert [app.verdict(text) for text in ("Yes, it is", "no.", "Well", "")] == [True, False, None, None]
    assert train.checker_reward("Yes", right=True) == train.checker_reward("No", right=False) == {"team": 1, "local": 0}
    assert train.checker_reward("No", right=True) == {"team": 0, "local": 0}
    assert train.checker_reward("Well", right=False) == {"team": 0, "local": -0.5}


def test_the_application_knows_nothing_of_cotune_and_runs_alone() -> None:
    for name in ("app.py", "calculator.py", "tasks.py"):
        check_knows_nothing_of_cotune(FOLDER / name)
    asked = models_asked_by("examples.word_problems.app", answer="yes", ends="0 of 2 are right\n")
    assert asked == {"planner": 2, "checker": 2}  # "yes" is no sum, and is accepted


@pytest.mark.parametrize(
    ("planned", "judged", "reward"),
    [
        (["3 + 1", "3 * 4 + 2 * 6"], ["no", "Yes."], 1.0),
        (["3 * 4 + 2 * 6"], ["yes"], 1.0),
        (["3 + 1"], ["yes"], 0.0),
        (["3 * 4 + 2 * 6", "so"], ["no", "hm"], 0.0),
    ],
)
def test_what_the_checker_accepts_is_the_answer_and_a_rejected_sum_is_planned_once_more(
    planned: list[str], judged: list[str], reward: float
) -> None:
    said, record = {"planner": iter(planned), "checker": iter(judged)}, Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(TASK)

    assert record(solve, lambda call: next(said[call.role])).rewards == {"team": reward}
    assert record.roles == ["planner", "checker"] * len(planned)


def test_a_stage_that_is_done_is_not_run_again_and_one_that_was_stopped_is(tmp_path: Path) -> None:
    asked: list[str] = []

    def work(name: str) -> Any:
        asked.append(name)
        if asked == ["record", "train"]:
            raise KeyboardInterrupt
        return {"made_by": name}

    def demo() -> Stages:
        stages = Stages(tmp_path / "stages.json", Console(quiet=True))
        for name in ("record", "train"):
            assert stages.once(name, f"cotune {name}", lambda name=name: work(name)) == {"made_by": name}
        return stages

    with pytest.raises(KeyboardInterrupt):
        demo()
    before = json.loads((tmp_path / "stages.json").read_text())
    assert "result" in before["record"] and "result" not in before["train"]
    took = demo().took()
    assert asked == ["record", "train", "train"]
    assert took["seconds"].keys() == {"record", "train", "total"}
    assert 0.01 < took["peak_gb"] < 20
    assert demo().took() == took
