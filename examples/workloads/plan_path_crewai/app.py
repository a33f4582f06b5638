"""A CrewAI application: a navigator and a driver walk a grid together, and neither can do it alone.

The game and the team are those of `examples/plan_path`, as a flow with two agents: up to five times the navigator says
a move or two and the driver presses controls.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.plan_path_crewai.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
from typing import Any

os.environ.setdefault("CREWAI_DISABLE_TELEMETRY", "true")
os.environ.setdefault("CREWAI_TRACING_ENABLED", "false")
os.environ.setdefault("CREWAI_DISABLE_VERSION_CHECK", "true")

from crewai import LLM, Agent
from crewai.events.utils.console_formatter import set_suppress_console_output
from crewai.flow.flow import Flow, listen, router, start
from pydantic import BaseModel

from examples.plan_path.grid import ROUNDS, carry_out, cell_of, grid_of, make_tasks, moves_of, table, view

TEMPERATURE = float(os.environ.get("PLAN_PATH_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
set_suppress_console_output(True)
logging.getLogger("crewai.llms.base_llm").setLevel(logging.ERROR)


class Walk(BaseModel):
    """State of a walk: the task, the cell the agent is on, what the navigator said last, and turns taken."""

    task: dict[str, Any] = {}
    at: list[int] = []
    message: str = ""
    rounds: int = 0
    reached: bool = False

    @property
    def position(self) -> tuple[int, int]:
        """The cell the agent is on: the start, before anybody moved."""
        return cell_of(self.at or self.task["start"])


def member(role: str, goal: str, backstory: str) -> Agent:
    """An agent whose model is served under the name of its role."""
    llm = LLM(model=role, provider="openai", temperature=TEMPERATURE, max_tokens=6, api_key=API_KEY)
    return Agent(role=role, goal=goal, backstory=backstory, llm=llm)


navigator = member("navigator", "say moves", "You navigate.")
driver = member("driver", "press controls", "You drive.")


async def said(agent: Agent, prompt: str) -> str:
    """What an agent says. CrewAI raises for an empty answer; here it is one that says nothing."""
    try:
        return (await agent.kickoff_async(prompt)).raw
    except ValueError as error:
        if "None or empty" not in str(error):
            raise
        return ""


class PlanPath(Flow[Walk]):
    """One walk; `state.reached` tells how it ended."""

    suppress_flow_events = True

    @start("again")
    async def say(self) -> None:
        """The navigator says a move or two."""
        self.state.message = await said(navigator, view(grid_of(self.state.task), self.state.position))

    @listen(say)
    async def press(self) -> None:
        """The driver presses the controls, and the agent moves."""
        walk = self.state
        grid = grid_of(walk.task)
        pressed = await said(driver, f"controls {table(grid)}\nsaid {walk.message}")
        effect = carry_out(grid, walk.position, moves_of(grid, pressed) or [])
        walk.at, walk.rounds, walk.reached = list(effect.at), walk.rounds + 1, effect.reached

    @router(press)
    def onward(self) -> str:
        """Another turn, until the goal is reached or the turns are over."""
        return "over" if self.state.reached or self.state.rounds >= ROUNDS else "again"


async def walk(task: dict[str, Any]) -> Walk:
    """Walk one task to its end."""
    flow = PlanPath()
    await flow.kickoff_async(inputs={"task": task})
    return flow.state


async def main() -> None:
    """Walk some tasks against whatever OPENAI_BASE_URL points at, and print how many reached the goal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    states = await asyncio.gather(*(walk(task) for task in make_tasks(options.tasks, options.seed)))
    for state in states:
        print(f"{state.task['id']}: {'reached' if state.reached else 'lost'} after {state.rounds} turns")
    print(f"{sum(s.reached for s in states)} of {len(states)} reached the goal")


if __name__ == "__main__":
    asyncio.run(main())
