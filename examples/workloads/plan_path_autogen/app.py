"""An AutoGen application: a navigator and a driver walk a grid together, and neither can do it alone.

The game and the team are those of `examples/plan_path`, as a group chat of three: up to five times the navigator says
a move or two, the driver presses controls, and the world moves the agent.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.plan_path_autogen.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from collections.abc import Sequence

from autogen_agentchat.agents import AssistantAgent, BaseChatAgent
from autogen_agentchat.base import Response
from autogen_agentchat.conditions import TextMentionTermination
from autogen_agentchat.messages import BaseChatMessage, TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core import CancellationToken
from autogen_core.model_context import ChatCompletionContext
from autogen_core.models import LLMMessage, UserMessage
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.plan_path.grid import (
    DRIVER,
    NAVIGATOR,
    ROUNDS,
    Board,
    carry_out,
    cell_of,
    driver_messages,
    grid_of,
    make_tasks,
    moves_of,
    navigator_messages,
)

TEMPERATURE = float(os.environ.get("PLAN_PATH_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")


class Walk:
    """State of a walk: its board, the cell the agent is on, and turns taken."""

    def __init__(self, task: Board) -> None:
        self.grid = grid_of(task)
        self.at = cell_of(task["start"])
        self.rounds = 0

    @property
    def reached(self) -> bool:
        """Whether the agent stands on the goal."""
        return self.at == self.grid.goal

    def press(self, controls: str) -> None:
        """Carry out what the driver pressed."""
        self.at = carry_out(self.grid, self.at, moves_of(self.grid, controls) or []).at
        self.rounds += 1


class Sight(ChatCompletionContext):
    """What an agent knows when it speaks: what it sees of the walk right now, instead of the whole conversation."""

    def __init__(self, walk: Walk) -> None:
        super().__init__()
        self.walk = walk

    async def get_messages(self) -> list[LLMMessage]:
        """The one message that the agent is asked with."""
        return [UserMessage(content=self.seen(str(self._messages[-1].content)), source="world")]

    def seen(self, heard: str) -> str:
        """The navigator sees the board."""
        return navigator_messages(self.walk.grid, self.walk.at)[-1]["content"]


class Controls(Sight):
    """The driver sees its controls and what the navigator said last."""

    def seen(self, heard: str) -> str:
        """Not the board."""
        return driver_messages(self.walk.grid, heard)[-1]["content"]


class World(BaseChatAgent):
    """Moves the agent as the driver wants it."""

    def __init__(self, walk: Walk) -> None:
        super().__init__("world", "Moves the agent.")
        self.walk = walk

    @property
    def produced_message_types(self) -> Sequence[type[BaseChatMessage]]:
        """Plain text."""
        return (TextMessage,)

    async def on_messages(self, messages: Sequence[BaseChatMessage], cancellation_token: CancellationToken) -> Response:
        """Carry out the last message."""
        self.walk.press(messages[-1].to_model_text())
        said = "reached" if self.walk.reached else "go on"
        return Response(chat_message=TextMessage(content=said, source=self.name))

    async def on_reset(self, cancellation_token: CancellationToken) -> None:
        """Nothing is kept."""


def model(role: str) -> OpenAIChatCompletionClient:
    """The model client that plays a role; served under the role's name."""
    return OpenAIChatCompletionClient(
        model=role,
        temperature=TEMPERATURE,
        max_tokens=6,
        api_key=API_KEY,
        model_info={
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )


navigator_model = model("navigator")
driver_model = model("driver")


def team_for(walk: Walk) -> RoundRobinGroupChat:
    """The team of one walk."""
    navigator = AssistantAgent(
        "navigator", navigator_model, system_message=NAVIGATOR, model_context=Sight(walk), description="Says moves."
    )
    driver = AssistantAgent(
        "driver", driver_model, system_message=DRIVER, model_context=Controls(walk), description="Presses controls."
    )
    ends = TextMentionTermination("reached", sources=["world"])
    members = [navigator, driver, World(walk)]
    return RoundRobinGroupChat(members, termination_condition=ends, max_turns=len(members) * ROUNDS)


async def solve(task: Board) -> Walk:
    """Walk one task to its end."""
    walk = Walk(task)
    await team_for(walk).run(task="walk")
    return walk


async def main() -> None:
    """Walk some tasks against whatever OPENAI_BASE_URL points at, and print how many reached the goal."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = list(make_tasks(options.tasks, options.seed))
    walks = await asyncio.gather(*(solve(task) for task in tasks))
    for task, walk in zip(tasks, walks, strict=True):
        print(f"{task['id']}: {'reached' if walk.reached else 'lost'} after {walk.rounds} turns")
    print(f"{sum(walk.reached for walk in walks)} of {len(walks)} reached the goal")


if __name__ == "__main__":
    asyncio.run(main())
