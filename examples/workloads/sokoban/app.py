"""An AutoGen application: a planner and an executor push boxes onto goals, and neither can do it alone.

The planner sees boxes and goals and says which box to push where; the executor sees the player and walks. Up to four
times each; a level that nothing can solve any more is given up.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.sokoban.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os

from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.workloads.sokoban.game import (
    ALONE,
    EXECUTOR,
    PLANNER,
    TURNS,
    Level,
    agent_sees,
    carried_out,
    deadlocked,
    executor_sees,
    moves_in,
    parsed,
    planner_sees,
    solved,
)

TEMPERATURE = float(os.environ.get("SOKOBAN_TEMPERATURE", "1"))
API_KEY = os.environ.get("OPENAI_API_KEY", "none")


class Game:
    """A level as it is played: where all is, and the moves so far."""

    def __init__(self, task: Level) -> None:
        self.floor, self.position = parsed(task["rows"])
        self.moves: list[str] = []

    @property
    def over(self) -> bool:
        """Whether the level is solved, or cannot be."""
        return solved(self.floor, self.position) or deadlocked(self.floor, self.position)

    def play(self, message: str) -> None:
        """Make the moves of a message; one that is anything else does nothing."""
        moves = moves_in(message) or []
        self.position, _ = carried_out(self.floor, self.position, moves)
        self.moves += moves


class Player(AssistantAgent):
    """A role at a game, which remembers nothing but what it is asked."""

    def __init__(self, role: str, system_message: str, game: Game) -> None:
        context = BufferedChatCompletionContext(buffer_size=1)
        super().__init__(role, MODELS[role], system_message=system_message, model_context=context)
        self.game = game

    async def say(self, seen: str) -> str:
        """Its message on what it sees."""
        result = await self.run(task=seen)
        return result.messages[-1].to_text()


def model(role: str) -> OpenAIChatCompletionClient:
    """The model client that plays a role; served under the role's name."""
    return OpenAIChatCompletionClient(
        model=role,
        temperature=TEMPERATURE,
        api_key=API_KEY,
        model_info={
            "vision": False,
            "function_calling": False,
            "json_output": False,
            "structured_output": False,
            "family": "unknown",
        },
    )


MODELS = {role: model(role) for role in ("planner", "executor", "agent")}


async def solve(task: Level) -> Game:
    """Play one level to its end."""
    game = Game(task)
    planner, executor = Player("planner", PLANNER, game), Player("executor", EXECUTOR, game)
    for _ in range(TURNS):
        said = await planner.say(planner_sees(game.floor, game.position))
        game.play(await executor.say(executor_sees(game.floor, game.position, said)))
        if game.over:
            break
    return game


async def solve_alone(task: Level) -> Game:
    """The same with one agent, which sees everything and walks."""
    game = Game(task)
    agent = Player("agent", ALONE, game)
    for _ in range(TURNS):
        game.play(await agent.say(agent_sees(game.floor, game.position)))
        if game.over:
            break
    return game


async def main() -> None:
    """Play some levels against whatever OPENAI_BASE_URL points at, and print how many are solved."""
    from examples.workloads.sokoban.tasks import make_tasks

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = list(make_tasks(options.tasks, options.seed))
    games = await asyncio.gather(*(solve(task) for task in tasks))
    for task, game in zip(tasks, games, strict=True):
        ended = "solved" if solved(game.floor, game.position) else "stuck" if game.over else "out of turns"
        print(f"{task['id']}: {ended} after {len(game.moves)} moves")
    print(f"{sum(solved(game.floor, game.position) for game in games)} of {len(games)} are solved")


if __name__ == "__main__":
    asyncio.run(main())
