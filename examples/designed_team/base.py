"""The base model: it knows the form of designs and answers, and often errs in both.

python -m examples.designed_team.base --out runs/designed_team/base
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from examples.designed_team.app import INSTRUCTION, Agent, agent_messages, designer_messages
from examples.designed_team.tasks import OPERATIONS, OPERATIONS_OF_A_TASK, SIZE, apply
from examples.tiny_model import Demonstration, build_base, build_by_command

STEPS = 600
SIZE_OF_MODEL = {"hidden_size": 64, "intermediate_size": 128}
"""0.1M parameters."""
NAMES = ("flipper", "ada", "bob", "cleo", "dan", "solver")
NUMBERS = tuple(map(str, range(SIZE)))

DIVIDED = 0.4
"""Share of neighbouring operations that a demonstrated design gives to two agents, not to one."""
ERRING_OPERATION = 0.15
"""Share of operations in a design that are random ones."""
UNREADABLE = 0.1
"""Share of designs without names."""
OPERATIONS_OF_AN_AGENT = (1, 1, 1, 2, 2, 3)
ERRING_ANSWER = 0.25
"""Share of answers that are random numbers."""


def words() -> list[str]:
    """A token for each word, and one for the designer's instruction."""
    return [INSTRUCTION, *OPERATIONS, *NAMES, *NUMBERS, ":", ";", "system", "user", "assistant"]


def demonstrations(rng: random.Random, count: int) -> list[Demonstration]:
    """Designs and answers. A design has about five times as many tokens, so there are five answers for each."""
    return [answer_shown(rng) if number % 6 else design_shown(rng) for number in range(count)]


def design_shown(rng: random.Random) -> Demonstration:
    """A design that divides the work somehow, often with a wrong operation."""
    asked = rng.choices(sorted(OPERATIONS), k=OPERATIONS_OF_A_TASK)
    agents: list[list[str]] = [[]]
    for operation in asked:
        if agents[-1] and rng.random() < DIVIDED:
            agents.append([])
        erring = rng.random() < ERRING_OPERATION
        agents[-1].append(rng.choice(sorted(OPERATIONS)) if erring else operation)
    names = rng.sample(NAMES, len(agents))
    if rng.random() < UNREADABLE:
        names = [""] * len(agents)
    parts = [f"{name} : {' '.join(work)}".strip() for name, work in zip(names, agents, strict=True)]
    return designer_messages(asked), " ; ".join(parts)


def answer_shown(rng: random.Random) -> Demonstration:
    """The number after one to three operations, sometimes a wrong one."""
    operations = rng.choices(sorted(OPERATIONS), k=rng.choice(OPERATIONS_OF_AN_AGENT))
    number = rng.choice(NUMBERS)
    answer = rng.choice(NUMBERS) if rng.random() < ERRING_ANSWER else apply(operations, number)
    return agent_messages(Agent(rng.choice(NAMES), tuple(operations)), number), answer


def build(
    folder: Path,
    *,
    seed: int = 0,
    steps: int = STEPS,
    count: int = 6000,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> None:
    """Build, warm up and save the base model as a Hugging Face folder; the same for the same seed."""
    rng = random.Random(f"designed team {seed}")
    shown = demonstrations(rng, count)
    build_base(folder, words(), shown, rng, seed=seed, steps=steps, report=report, **SIZE_OF_MODEL)


if __name__ == "__main__":
    build_by_command(build, STEPS)
