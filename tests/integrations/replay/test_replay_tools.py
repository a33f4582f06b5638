"""Tools in a replay: run again, or given back as they were recorded."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.episodes.rollout import EpisodeBatch, rollout
from cotune.errors import WorkflowError
from cotune.records.structs import Episode, Task
from cotune.replay.script import Replay, read_script
from tests.integrations import replay_apps
from tests.integrations.recorded import Responder
from tests.integrations.replay.test_replay import Lab, reply

pytestmark = pytest.mark.usefixtures("nowhere")
COUNTER = itertools.count()
RAN: list[str] = []


@replay_apps.tool
def count(q: str) -> str:
    """Count; no two uses say the same."""
    RAN.append(q)
    return f"number {next(COUNTER)}"


@replay_apps.tool
async def acount(q: str) -> str:
    """Count; no two uses say the same."""
    RAN.append(q)
    return f"number {next(COUNTER)}"


async def counted(q: str) -> str:
    """Count; no two uses say the same."""
    RAN.append(q)
    return f"number {next(COUNTER)}"


@replay_apps.crew_tool("count")
def crew_count(q: str) -> str:
    """Count; no two uses say the same."""
    RAN.append(q)
    return f"number {next(COUNTER)}"


async def in_langgraph(task: Any) -> float:
    for name, tools in (("helper", [count]), ("other", [acount])):
        agent = replay_apps.create_agent(replay_apps.model, tools, name=name)
        await agent.ainvoke({"messages": [replay_apps.HumanMessage(f"q{task['n']}")]})
    return 1.0


async def in_autogen(task: Any) -> float:
    await replay_apps.agent("helper", tools=[counted], reflect_on_tool_use=True).run(task=f"q{task['n']}")
    return 1.0


async def in_crewai(task: Any) -> float:
    by = replay_apps.Agent(role="helper", goal="g", backstory="b", llm=replay_apps.llm, tools=[crew_count])
    asked = replay_apps.CrewTask(description=f"q{task['n']}", expected_output="e", agent=by)
    await replay_apps.Crew(agents=[by], tasks=[asked]).kickoff_async()
    return 1.0


def run(lab: Lab, numbers: Any, responder: Any, replays: Any = None, *, record_tools: bool) -> list[Episode]:
    tasks = [Task(id=str(n), input={"n": n}) for n in numbers]
    batch = EpisodeBatch(tasks=tasks, sink=lab.store, phase="trace", replays=replays or {}, record_tools=record_tools)
    RAN.clear()
    episodes = asyncio.run(rollout(lab.flow, batch, responder))
    lab.store.flush()
    return episodes


def again(lab: Lab, trunk: Episode, *, record_tools: bool = True, **fork: Any) -> Episode:
    replays = {(trunk.task.id, 1): Replay(script=read_script(lab.store, trunk.id), **fork)}
    (episode,) = run(lab, [trunk.task.input["n"]], lab.policy, replays, record_tools=record_tools)
    return episode


@pytest.mark.parametrize("app", [in_langgraph, in_autogen, in_crewai])
def test_tools_of_a_framework_give_back_what_they_returned(tmp_path: Path, app: Any):
    lab = Lab(tmp_path, app)
    (trunk,) = run(lab, [0], Responder(reply), record_tools=True)
    uses = 2 if app is in_langgraph else 1
    assert (trunk.error, len(RAN), len(trunk.results)) == (None, uses, uses)
    assert {"count", "acount", "counted"} >= {result.name for result in trunk.results}
    repeated = again(lab, trunk)
    assert (repeated.error, RAN, lab.policy.calls) == (None, [], [])
    assert {result.value for result in repeated.results} == {result.value for result in trunk.results}

    (trunk,) = run(lab, [1], Responder(reply), record_tools=False)
    assert (len(RAN), trunk.results) == (uses, ())
    diverged = again(lab, trunk, record_tools=False)
    assert len(RAN) >= 1 and diverged.blame == "divergence" and "recorded 'number " in diverged.error


@cotune.recorded
def price(item: str) -> dict[str, Any]:
    RAN.append(item)
    return {"item": item, "price": next(COUNTER)}


@cotune.recorded
async def odd(item: str) -> Any:
    RAN.append(item)
    return object()


async def shop(task: Any) -> float:
    for turn in range(2):
        found = price("pen")
        await replay_apps.model.ainvoke(f"{turn}: {found}")
    return 1.0


def test_a_recorded_function_is_repeated_up_to_the_fork_and_runs_after_it(tmp_path: Path):
    lab = Lab(tmp_path, shop)
    (trunk,) = run(lab, [0], Responder(reply), record_tools=False)
    assert RAN == ["pen", "pen"] and [result.name for result in trunk.results] == [f"{__name__}.price"] * 2
    assert again(lab, trunk).error is None and RAN == []
    branch = again(lab, trunk, fork=lab.call(trunk, "app", 0).id)
    assert (branch.error, RAN) == (None, ["pen"])
    (first, later), (_, was) = lab.store.calls(branch.id), lab.store.calls(trunk.id)
    assert first.messages == lab.store.calls(trunk.id)[0].messages and later.messages != was.messages


def test_what_is_no_json_runs_again_and_is_counted(tmp_path: Path):
    async def app(task: Any) -> float:
        await odd("x")
        await replay_apps.model.ainvoke("hello")
        return 1.0

    lab = Lab(tmp_path, app)
    (trunk,) = run(lab, [0], Responder(reply), record_tools=False)
    assert trunk.results == ()
    assert again(lab, trunk).error is None and RAN == ["x"]


def test_a_recorded_function_outside_an_episode_is_as_it_was():
    RAN.clear()
    assert price("cup")["item"] == "cup" and price.__name__ == "price" and RAN == ["cup"]
    assert type(asyncio.run(odd("x"))) is object
    with pytest.raises(WorkflowError, match="is a generator"):

        @cotune.recorded
        def numbers() -> Any:
            yield 1
