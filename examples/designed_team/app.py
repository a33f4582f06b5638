"""An application whose team a model designs: a designer names agents and divides the work, and these agents do it.

The work is a list of operations on a number. The designer sees the operations and writes a team:

    flipper : mirror ; ada : double jump

Each agent then gets the number of the agent before it, and the operations that the designer gave it. It knows nothing
of the other agents. The designer chooses the names. Each agent asks for a model of its own name.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.designed_team.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

import openai

from examples.designed_team.tasks import OPERATIONS, make_tasks

DESIGNER = "designer"
INSTRUCTION = 'Divide the work among agents, for example "flipper : mirror ; ada : double jump"'
MOST_AGENTS = 4
"""A design with more agents cannot be read."""


@dataclass(frozen=True)
class Agent:
    """One agent of a team: the name that the designer invented, and the operations that it carries out."""

    name: str
    operations: tuple[str, ...]


@functools.cache
def client(url: str) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)


async def ask(model: str, messages: Sequence[dict[str, str]], max_tokens: int) -> str:
    """The answer of the model that plays an agent; served under the agent's name."""
    reply = await client(os.environ["OPENAI_BASE_URL"]).chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=max_tokens,
    )
    return reply.choices[0].message.content or ""


def designer_messages(operations: Sequence[str]) -> list[dict[str, str]]:
    return [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": " ".join(operations)}]


def agent_messages(agent: Agent, number: str) -> list[dict[str, str]]:
    system = f"{agent.name} : {' '.join(agent.operations)}"
    return [{"role": "system", "content": system}, {"role": "user", "content": number}]


async def design(operations: Sequence[str]) -> list[Agent]:
    """Let the designer write a team. Returns no agents if its answer cannot be read."""
    return read_design(await ask(DESIGNER, designer_messages(operations), max_tokens=24))


def read_design(text: str) -> list[Agent]:
    """The agents of a design, in order; none if a part of it is not `name : operation ...`.

    An agent cannot have the designer's name: its model would be asked, and its answers would count as designs.
    """
    agents: list[Agent] = []
    for part in text.split(";"):
        name, _, work = part.partition(":")
        operations = tuple(work.split())
        name = name.strip()
        if len(name.split()) != 1 or name == DESIGNER:
            return []
        if not operations or not set(operations) <= OPERATIONS.keys():
            return []
        agents.append(Agent(name, operations))
    return agents if len(agents) <= MOST_AGENTS else []


async def execute(agents: Sequence[Agent], number: str) -> str:
    """Pass the number through the team, from agent to agent. Returns the last answer."""
    for agent in agents:
        number = await ask(agent.name, agent_messages(agent, number), max_tokens=3)
    return number.strip()


async def main() -> None:
    """Do some tasks with whatever OPENAI_BASE_URL points at, and print how many are right."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    options = parser.parse_args()
    right = 0
    for task in make_tasks(options.tasks, seed=1):
        agents = await design(task["operations"])
        answer = await execute(agents, task["number"]) if agents else ""
        right += answer == task["answer"]
        print(f"{task['id']}: {', '.join(agent.name for agent in agents) or 'no team'} say {answer or 'nothing'}")
    print(f"{right} of {options.tasks} are right")


if __name__ == "__main__":
    asyncio.run(main())
