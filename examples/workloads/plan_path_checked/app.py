"""A CrewAI application: a planner says a path through a board with walls, a path checker walks it with a tool.

The tool walks a path cell by cell, or not at all where it hits a wall, leaves the board or comes back to a cell. The
planner sees the goal and what came of the last path; the checker sees the path and the walls, and may cut it or correct
it. They have four turns.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.plan_path_checked.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")
os.environ.setdefault("CREWAI_DISABLE_VERSION_CHECK", "true")

from crewai import LLM, Agent
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai.flow.flow import Flow, listen, router, start
from crewai.tools import BaseTool
from pydantic import BaseModel, Field

from examples.workloads.plan_path_checked.board import (
    TURNS,
    Board,
    Cell,
    checker_sees,
    moves_in,
    parsed,
    planner_sees,
    traced,
)
from examples.workloads.plan_path_checked.tasks import SIZE, make_tasks

TEMPERATURE = float(os.environ.get("PLAN_PATH_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
set_suppress_console_output(True)
logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)

FORBIDDEN = "A path that hits a wall, leaves the board or comes back is not walked."
MEMBERS = {
    "planner": ("say a path to the goal", f"You answer with moves: up, right, down, left. {FORBIDDEN}"),
    "checker": ("walk what is free of the path", f"You call walk, once. {FORBIDDEN}"),
    "agent": ("walk to the goal", f"You call walk, once. {FORBIDDEN}"),
}
"""By role: goal and backstory."""


class Walk(BaseModel):
    """State of a task: the cell it has come to, the path said last, what came of the last path, all that were tried."""

    task: dict[str, Any] = {}
    at: list[int] = []
    said: str = ""
    report: str = "nothing"
    paths: list[list[str]] = []
    turns: int = 0

    @property
    def board(self) -> Board:
        """The board of the task."""
        return parsed(self.task["rows"])[0]

    @property
    def position(self) -> Cell:
        """The cell it has come to: the start, before anybody walked."""
        return (self.at[0], self.at[1]) if self.at else parsed(self.task["rows"])[1]

    @property
    def reached(self) -> bool:
        """Whether that is the goal."""
        return self.position == self.board.goal


class Given(BaseModel):
    """What the tool is called with."""

    path: str = Field(description="moves, such as: up up right")


class WalkTool(BaseTool):
    """Walks a path; what came of it is the answer of the agent that called it."""

    name: str = "walk"
    description: str = "Walk a path, cell by cell."
    args_schema: type[BaseModel] = Given
    result_as_answer: bool = True
    cache_function: Callable[..., bool] = lambda given, result: False
    go: Callable[[str], str]

    def _run(self, path: str) -> str:
        return self.go(path)


def model(role: str) -> LLM:
    """The model that plays a role; served under the role's name."""
    return LLM(model=role, provider="openai", temperature=TEMPERATURE, api_key=API_KEY)


MODELS = {role: model(role) for role in MEMBERS}


def member(role: str, tools: Sequence[BaseTool] = (), llm: Any = None) -> Agent:
    """An agent of the crew. One whose call of a tool fails is not asked for another."""
    goal, backstory = MEMBERS[role]
    return Agent(
        role=role, goal=goal, backstory=backstory, llm=llm or MODELS[role], tools=list(tools), max_iter=1, cache=False
    )


async def said(agent: Agent, prompt: str) -> str:
    """What an agent says. CrewAI raises for an empty answer; here it is one that says nothing."""
    try:
        return (await agent.kickoff_async(prompt)).raw
    except ValueError as error:
        if "None or empty" not in str(error):
            raise
        return ""


planner = member("planner")


class Walking(Flow[Walk]):
    """One task, walked by the paths that the tool is called with."""

    suppress_flow_events = True

    def walk(self, path: str) -> str:
        """Walk a path if nothing is wrong with it, and say what came of it."""
        state, moves = self.state, moves_in(path)
        if moves is None:
            return "no moves"
        state.paths.append(moves)
        found = traced(state.board, state.position, moves)
        if found.fault:
            return f"{found.fault} after {len(found.cells)}"
        state.at = list(found.cells[-1])
        return f"walked {len(found.cells)}"

    async def asked_to_walk(self, role: str, seen: str) -> None:
        """An agent that may walk; it has walked nothing where it did not call the tool."""
        tried = len(self.state.paths)
        report = await said(member(role, [WalkTool(go=self.walk)]), seen)
        self.state.report = report if len(self.state.paths) > tried else "nothing"
        self.state.turns += 1

    @property
    def onward(self) -> str:
        """Another turn, until the goal is reached or the turns are over."""
        return "over" if self.state.reached or self.state.turns >= TURNS else "again"


class PlanPath(Walking):
    """The planner and the path checker."""

    @start("again")
    async def plan(self) -> None:
        """The planner says a path."""
        state = self.state
        state.said = await said(planner, planner_sees(state.board, state.position, state.report))

    @listen(plan)
    async def check(self) -> None:
        """The checker walks it, or what it makes of it."""
        state = self.state
        path = state.said.strip().rpartition("\n")[2]
        await self.asked_to_walk("checker", checker_sees(state.board, state.position, path))

    @router(check)
    def next_turn(self) -> str:
        """Another turn, or the end."""
        return self.onward


class Alone(Walking):
    """The same with one agent, which sees everything and walks."""

    @start("again")
    async def act(self) -> None:
        """The agent walks."""
        state = self.state
        await self.asked_to_walk("agent", planner_sees(state.board, state.position, state.report))

    @router(act)
    def next_turn(self) -> str:
        """Another turn, or the end."""
        return self.onward


async def solve(task: dict[str, Any]) -> Walk:
    """Walk one task to its end."""
    flow = PlanPath()
    await flow.kickoff_async(inputs={"task": task})
    return flow.state


async def main() -> None:
    """Walk some tasks against whatever OPENAI_BASE_URL points at, and print how many reached the goal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--size", type=int, default=SIZE, help="cells of a side (default: %(default)s)")
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.seed, size=options.size)
    states = await asyncio.gather(*(solve(dict(task)) for task in tasks))
    for state in states:
        ended = "reached" if state.reached else "lost"
        print(f"{state.task['id']}: {ended} after {state.turns} turns (shortest path: {state.task['shortest']} moves)")
    print(f"{sum(state.reached for state in states)} of {len(states)} reached the goal")


if __name__ == "__main__":
    asyncio.run(main())
