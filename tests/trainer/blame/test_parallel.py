"""Decisive calls of applications whose calls run at the same time, and the results of their tools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cotune
from cotune.recording.recorder import LiveCall
from cotune.storage.open_store import open_store
from tests.integrations import replay_apps
from tests.integrations.recorded import Responder
from tests.trainer.blame.office import ask


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address where nobody listens: calls that no responder answers fail."""
    monkeypatch.setenv("OPENAI_BASE_URL", "http://127.0.0.1:9/v1")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")


@pytest.fixture
def out(tmp_path: Path) -> str:
    return str(tmp_path / "blame")


@cotune.workflow
async def langgraph(task: Any) -> float:
    """A fan-out of three by `Send`, and a node that joins their answers."""
    state = await replay_apps.PARALLEL.ainvoke({"question": f"q{task['n']}", "said": []})
    return float("wrong" not in state["said"][-1])


@cotune.workflow
async def autogen(task: Any) -> float:
    """A flow whose two agents in the middle run side by side."""
    members = [replay_apps.agent(name) for name in ("start", "left", "right", "end")]
    builder = replay_apps.DiGraphBuilder()
    for member in members:
        builder.add_node(member)
    start, left, right, end = members
    builder.add_edge(start, left).add_edge(start, right).add_edge(left, end).add_edge(right, end)
    result = await replay_apps.GraphFlow(members, builder.build()).run(task=f"q{task['n']}")
    return float("wrong" not in result.messages[-1].to_text())


@cotune.workflow
async def crewai(task: Any) -> float:
    """Two tasks side by side, and one that has the answers of both."""
    one, two, join = (
        replay_apps.Agent(role=role, goal="g", backstory="b", llm=replay_apps.llm) for role in ("One", "Two", "Join")
    )

    def given(text: str, by: Any, **options: Any) -> Any:
        return replay_apps.CrewTask(description=f"{text} q{task['n']}", expected_output="e", agent=by, **options)

    tasks = [given("a", one, async_execution=True), given("b", two, async_execution=True)]
    crew = replay_apps.Crew(agents=[one, two, join], tasks=[*tasks, given("c", join, context=tasks)])
    return float("wrong" not in (await crew.kickoff_async()).raw)


def erring(parallel: tuple[str, ...]) -> Callable[[LiveCall], Any]:
    """The roles that run side by side err in the runs as it is, and not in forks. The last role repeats an error that
    it reads."""

    async def reply(call: LiveCall) -> str:
        await asyncio.sleep(0.05)  # so that the calls overlap
        errs = call.role in parallel and call.episode.phase == "blame own"
        if errs or "wrong" in str(call.messages):
            return f"wrong {random.random()}"
        return f"right {random.random()}"

    return reply


@pytest.mark.parametrize(
    ("app", "roles", "calls"),
    [(langgraph, ("worker",), 3), (autogen, ("left", "right"), 2), (crewai, ("One", "Two"), 2)],
)
def test_parallel_calls_are_one_place(out: str, app: Any, roles: tuple[str, ...], calls: int) -> None:
    responder = Responder(erring(roles))
    found = cotune.blame(app, [{"id": "t", "n": 1}], episodes="failed", out=out, responder=responder, runs=20)
    assert not any("did not repeat" in note for note in found.notes)
    (lost,) = found.episodes
    assert lost.call is not None and len(lost.parallel) == calls - 1
    assert set(lost.role.split(", ")) == set(roles)
    # All of them have the effect of the block.
    block = [effect for effect in lost.effects if effect.step in (lost.call, *lost.parallel)]
    assert len(block) == calls and len({effect.loss for effect in block}) == 1
    assert all(effect.parallel == calls for effect in block)
    with open_store(out, read_only=True) as store:
        for episode in store.episodes():
            if episode.fork is not None:
                made = [call for call in store.calls(episode.id) if call.role in roles]
                # A fork at the block draws all of its calls again; a later one repeats them all.
                assert len({call.replayed is None for call in made}) == 1


@cotune.workflow
async def branches_with_two_calls(task: Any) -> float:
    """Two branches side by side. Each writes, then checks its text; the slow one ends last."""

    async def branch(name: str) -> str:
        text = await ask(f"write-{name}", f"write {name} {task['n']}")
        return await ask(f"check-{name}", text)

    return float("wrong" not in " ".join(await asyncio.gather(branch("slow"), branch("quick"))))


def test_branches_that_make_a_second_call_in_the_block(out: str) -> None:
    async def reply(call: LiveCall) -> str:
        await asyncio.sleep(0.3 if call.role == "write-slow" else 0.03)
        errs = call.role == "write-quick" and call.episode.phase == "blame own"
        if errs or "wrong" in str(call.messages):
            return f"wrong {random.random()}"
        return f"right {random.random()}"

    task = [{"id": "t", "n": 1}]
    found = cotune.blame(branches_with_two_calls, task, episodes="failed", out=out, responder=Responder(reply), runs=20)
    assert not any("did not repeat" in note for note in found.notes)
    (lost,) = found.episodes
    assert lost.forks >= 6 and lost.call == 0 and lost.role == "write-slow, write-quick, check-quick"
    with open_store(out, read_only=True) as store:
        diverged = [one for one in store.episodes() if one.blame == "divergence"]
    assert not diverged


RAN: list[str] = []


@replay_apps.tool
def count(q: str) -> str:
    """Count."""
    RAN.append(q)
    return "counted"


@cotune.workflow
async def with_tool(task: Any) -> float:
    helper = replay_apps.create_agent(replay_apps.model, [count], name="helper")
    await helper.ainvoke({"messages": [replay_apps.HumanMessage(f"q{task['n']}")]})
    other = replay_apps.create_agent(replay_apps.model, [], name="writer")
    state = await other.ainvoke({"messages": [replay_apps.HumanMessage(f"q{task['n']}")]})
    return float("wrong" not in state["messages"][-1].content)


@pytest.mark.parametrize("tools", ["recorded", "run"])
def test_tools_in_the_repeated_part_of_a_fork(out: str, tools: Any) -> None:
    def reply(call: LiveCall) -> Any:
        if call.tools and call.turn == 0:
            arguments = '{"q": "all"}'
            called = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": arguments}}
            return {"role": "assistant", "content": "", "tool_calls": [called]}
        # The writer errs in the runs as it is, and not in forks.
        wrong = call.role == "writer" and call.episode.phase == "blame own"
        return f"{'wrong' if wrong else 'right'} {random.random()}"

    RAN.clear()
    found = cotune.blame(
        with_tool, [{"id": "t", "n": 1}], episodes="failed", out=out, responder=Responder(reply), runs=12, tools=tools
    )
    assert found.episodes[0].role == "writer"
    with open_store(out, read_only=True) as store:
        whole = [one for one in store.episodes() if one.phase == "blame own"]
        forks = [one for one in store.episodes() if one.fork is not None]
        at_first = sum(store.calls(one.id)[0].replayed is None for one in forks)
        again = sum(one.phase == "blame-rescored" for one in store.episodes())
    assert len(forks) > at_first and again == 1
    # Forks before the tool call run the tool; the others only with --tools run.
    repeated = len(forks) - at_first + again
    assert len(RAN) == len(whole) + at_first + (repeated if tools == "run" else 0)
