"""The base model of the checker: a vocabulary of words and whole numbers, and a warm-up that teaches it yes and no.

python -m examples.two_bases.base --out runs/two_bases/checker
"""

from __future__ import annotations

import random

from examples.tiny_model import Demonstration, base_builder, build_by_command
from examples.word_problems.app import CHECKER
from examples.word_problems.tasks import make_tasks

STEPS = 120
SEED = 1
"""The seed of the problems that it is warmed up on: not those of the training."""
NUMBERS = range(-200, 1000)


def words() -> list[str]:
    """Its vocabulary: all else that a planner writes is unknown to it."""
    asked = {word for task in make_tasks(60, seed=SEED) for word in task["question"].split()}
    sums = ["Sum:", "Result:", "error", "+", "-", "*", "(", ")", *map(str, NUMBERS)]
    return ["system", "user", "assistant", CHECKER, "yes", "no", *sums, *sorted(asked)]


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Problems with a right or a wrong value, and the verdict."""
    shown: list[Demonstration] = []
    for task in make_tasks(count, seed=seed + SEED):
        right = rng.random() < 0.5
        value = task["answer"] if right else str(int(task["answer"]) + rng.randint(1, 20))
        content = f"{task['question']}\nSum: {value}\nResult: {value}"
        messages = [{"role": "system", "content": CHECKER}, {"role": "user", "content": content}]
        shown.append((messages, "yes" if right else "no"))
    return shown


build = base_builder(words, demonstrations, name="checker", steps=STEPS, count=600, batch=32)

if __name__ == "__main__":
    build_by_command(build, STEPS)
