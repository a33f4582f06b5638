"""Games by text between roles, with nothing but the OpenAI SDK: each role asks the model of its name.

OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.self_play.app --tasks 4
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import random
from typing import Any

import openai

from examples.workloads.self_play import noughts
from examples.workloads.self_play.games import GAMES
from examples.workloads.self_play.turns import Messages, Said, Task

TEMPERATURE = float(os.environ.get("SELF_PLAY_TEMPERATURE", "1"))


@functools.cache
def client(url: str | None) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0)


async def say(role: str, messages: Messages, **params: Any) -> str:
    """A role's message."""
    completions = client(os.environ.get("OPENAI_BASE_URL")).chat.completions
    reply = await completions.create(model=role, messages=messages, temperature=TEMPERATURE, **params)
    return (reply.choices[0].message.content or "").strip()


async def play(task: Task) -> Said:
    """Play one game to its end. In tic-tac-toe a task may leave a seat to chance (`random`); a `logit_bias` goes to the
    model as it is."""
    game, said = GAMES[task["game"]], list[tuple[str, str]]()
    rng = random.Random(f"{task['id']} {task.get('round', 0)}")
    params = {"logit_bias": task["logit_bias"]} if "logit_bias" in task else {}
    while (role := game.turn(task, said)) is not None:
        if role == task.get("random"):
            text = str(rng.choice(noughts.free(noughts.played(said)[0])) + 1)
        else:
            text = await say(role, game.messages(task, said, role), max_tokens=game.MAX_TOKENS, **params)
        said.append((role, text))
    return said


async def main() -> None:
    """Play some games with whatever OPENAI_BASE_URL points at, and print what each role has won."""
    from examples.workloads.self_play.tasks import make_tasks
    from examples.workloads.self_play.verifier import outcome

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--game", choices=sorted(GAMES), help="one game only (default: each in its turn)")
    options = parser.parse_args()
    tasks = list(make_tasks(options.tasks, options.seed, game=options.game))
    played = await asyncio.gather(*(play(task) for task in tasks))
    won = [outcome(task, said) for task, said in zip(tasks, played, strict=True)]
    for task, numbers in zip(tasks, won, strict=True):
        print(f"{task['id']}: {', '.join(f'{name} {number:g}' for name, number in numbers.items())}")
    print(f"{sum(any(numbers.values()) for numbers in won)} of {len(won)} games won something for somebody")


if __name__ == "__main__":
    asyncio.run(main())
