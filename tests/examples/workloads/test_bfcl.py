"""Tool use by bfcl-eval's tasks: the benchmark's check, calls that are only read, and what messages are worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cotune.integrations.apps.activation import activate
from cotune.records.tasks import as_tasks
from examples.workloads.bfcl import tasks, train
from examples.workloads.bfcl.app import STEPS
from examples.workloads.bfcl.desk import Desk, parse
from examples.workloads.bfcl.expert import expert
from tests.examples.applications import check_knows_nothing_of_cotune, models_asked_by
from tests.integrations.recorded import Recorded

activate()
FOLDER = Path(tasks.__file__).parent


class Notes:
    def __init__(self) -> None:
        self.kept: list[str] = []

    def keep(self, text: str, times: int = 1) -> int:
        """Keep a note.

        Often.
        """
        self.kept += [text] * times
        return len(self.kept)

    def drop(self) -> None:
        raise OSError("no room")

    def _secret(self) -> None: ...


def test_a_desk_makes_calls_that_are_written_as_text() -> None:
    desk = Desk([Notes()], without=["drop"])
    assert desk.signatures == ["keep(text, times)"]
    assert (desk.describe("keep"), desk.describe("drop")) == ("keep(text, times): Keep a note.", "")
    assert desk.execute("keep(text='a', times=2)") == "2" and desk.objects[0].kept == ["a", "a"]
    for call in ("drop()", "_secret()", "keep(open('x'))", "keep.__class__()", "keep(", "('a')", "keep(" * 9000):
        assert desk.execute(call).startswith('{"error": ')
    assert Desk([Notes()]).execute("drop()") == '{"error": "no room"}'
    assert parse("f(1, b=[2])") == ("f", [1], {"b": [2]})


def test_the_right_calls_do_every_task_and_none_does_none() -> None:
    turns, whole = tasks.make_tasks("turns"), tasks.make_tasks("whole", held_out=True)
    assert (len(turns), len(tasks.make_tasks("turns", held_out=True)), len(whole)) == (255, 107, 30)
    assert not {task["id"].partition(".")[0] for task in turns} & {task["id"] for task in whole}
    assert len(as_tasks(turns)) == 255
    for task in [*turns[::10], *whole]:
        desk, right = tasks.open_desk(task), tasks.open_desk(task)
        for truth in task["truth"]:
            for call in truth:
                desk.execute(call)
            assert train.is_done(desk, right, truth), task["id"]
    idle = [train.is_done(tasks.open_desk(task), tasks.open_desk(task), task["truth"][0]) for task in whole]
    assert idle == [False] * 30


TRUTH = ["cd(folder='docs')", "mv(source='a', destination='b')"]


def test_what_a_tool_is_worth() -> None:
    worth = [train.chooser_reward(name, [], TRUTH) for name in ("cd", "mv", "cat", "done")]
    assert worth == [1.0, 0.5, -0.5, -0.5]
    assert train.chooser_reward("mv", ["cd(folder='x') -> 1"], TRUTH) == 1.0
    assert train.chooser_reward("done", ["cd() -> 1", "mv() -> 2"], TRUTH) == 1.0


def test_what_a_call_is_worth() -> None:
    from bfcl_eval.eval_checker.multi_turn_eval.func_source_code.gorilla_file_system import GorillaFileSystem

    desk = Desk([GorillaFileSystem()])
    said = ("mv('a', destination='b')", "mv(source='a', destination='c')", "mv('a', 'b', 'c')", "move a to b")
    assert [train.caller_reward(text, "mv", TRUTH, desk) for text in said] == [1.0, 0.5, -0.5, -0.5]
    assert train.caller_reward("ls()", "ls", TRUTH, desk) == 0.0


def test_the_application_knows_nothing_of_cotune_and_runs_alone() -> None:
    for name in ("app.py", "desk.py", "tasks.py"):
        check_knows_nothing_of_cotune(FOLDER / name)
    assert models_asked_by("examples.workloads.bfcl.app", answer="done", ends="no call\n") == {"chooser": 2}


@pytest.mark.parametrize(("right", "done"), [(True, 1.0), (False, 0.0)])
def test_a_request_is_done_call_by_call(right: bool, done: float) -> None:
    task = next(task for task in tasks.make_tasks("turns") if len(task["truth"][0]) == 2)
    calls = task["truth"][0] if right else task["truth"][0][:1]
    said = {"chooser": iter([*(call.partition("(")[0] for call in calls), "done"]), "caller": iter(calls)}
    record = Recorded()

    async def solve(_: Any) -> Any:
        return await train.solve(task)

    assert record(solve, lambda call: next(said[call.role])).rewards == {"team": done}
    assert record.roles == ["chooser", "caller"] * len(calls) + ["chooser"]


def test_what_the_expert_says_is_right() -> None:
    listed = [task for task in tasks.make_tasks("turns")[::8] if len(task["truth"][0]) <= STEPS]
    answers, record, rewards = expert(listed), Recorded(), set()
    for task in listed:

        async def solve(_: Any, task: Any = task) -> Any:
            return await train.solve(task)

        rewards.add(record(solve, lambda call: answers(call.messages)["content"]).rewards["team"])
    assert len(listed) > 25 and rewards == {1.0}
    assert {role: record.roles.count(role) for role in set(record.roles)}["caller"] >= len(listed)
