"""Agents without a name that share a role: said, with where each is run; counted; and what names them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from langchain.agents import create_agent
from langgraph.prebuilt import create_react_agent

import cotune
from tests.integrations.graphs import HELLO, asays, chain, model, scripted
from tests.integrations.recorded import Recorded

pytestmark = pytest.mark.usefixtures("nowhere")


def line_after(fn: Any, offset: int) -> str:
    fn = inspect.unwrap(fn)
    return f"{__file__}:{fn.__code__.co_firstlineno + offset} in {fn.__name__}"


def test_two_agents_that_the_workflow_runs_are_told_with_their_places(record: Recorded) -> None:
    planner, coder = create_agent(model, [], system_prompt="plan"), create_agent(model, [], system_prompt="code")

    def solve(task: Any) -> int:
        planner.invoke(HELLO)
        coder.invoke(HELLO)
        coder.invoke(HELLO)
        return 1

    live = record(solve, scripted()).live
    assert record.roles == ["model", "model", "model"]
    assert live.warnings == {"shared_role": 2}
    first, second = line_after(solve, 1), line_after(solve, 2)
    assert live.explained["shared_role"] == (
        f"Two agents without a name share the role 'model': one in {first}, one in {second}. Give each agent a "
        "name, or run it inside `with cotune.role(...)`; else one policy is trained for all."
    )


def test_agents_that_one_line_runs_are_told_too(record: Recorded) -> None:
    agents = [create_react_agent(model, []), create_react_agent(model, [])]

    async def solve(task: Any) -> int:
        for agent in agents:
            await agent.ainvoke(HELLO)
        return 1

    live = record(solve, scripted()).live
    assert (record.roles, live.warnings) == (["agent", "agent"], {"shared_role": 1})
    assert live.explained["shared_role"].startswith(
        f"Several agents without a name share the role 'agent', or one agent is created again for each run: "
        f"{line_after(solve, 2)} runs them."
    )


def test_agents_that_tasks_run_are_told_though_nobody_knows_who_started_them(record: Recorded) -> None:
    agents = [create_agent(model, []), create_agent(model, [])]

    async def solve(task: Any) -> int:
        await asyncio.gather(*(agent.ainvoke(HELLO) for agent in agents))
        return 1

    live = record(solve, scripted()).live
    assert live.warnings == {"shared_role": 1}
    assert "one in an asyncio task or a thread, one in an asyncio task" in live.explained["shared_role"]


def once(agent: Any) -> Callable[[Any], int]:
    def solve(task: Any) -> int:
        for _ in range(3):
            agent.invoke(HELLO)
        return 1

    return solve


def named(name: str, agent: Any) -> None:
    with cotune.role(name):
        agent.invoke(HELLO)


def apart(task: Any) -> int:
    """All ways in which such agents have names."""
    create_agent(model, [], name="planner").invoke(HELLO)
    create_agent(model, [], name="coder").invoke(HELLO)
    named("first", create_agent(model, []))
    named("second", create_agent(model, []))
    create_agent(model, []).invoke(HELLO)
    chain(("draft", create_agent(model, []))).invoke(HELLO)
    asyncio.run(chain(asays).ainvoke(HELLO))
    return 1


@pytest.mark.parametrize(
    ("solve", "roles"),
    [
        (once(create_agent(model, [])), ["model"] * 3),
        (apart, ["planner", "coder", "first", "second", "model", "draft", "asays"]),
    ],
)
def test_agents_that_are_one_or_have_names_are_not_told(solve: Any, roles: list[str], record: Recorded) -> None:
    live = record(solve, scripted()).live
    assert (record.roles, live.warnings) == (roles, {})
