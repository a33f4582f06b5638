"""The base model of the checker: a small vocabulary of its own, and a warm-up that teaches it yes and no.

python -m examples.two_bases.base --out runs/two_bases/checker
"""

from __future__ import annotations

import random

from transformers import PreTrainedTokenizerFast

from examples.tiny_model import Demonstration, base_builder, build_by_command, byte_tokenizer
from examples.word_problems.app import CHECKER
from examples.word_problems.tasks import make_tasks

STEPS = 120
SEED = 1
"""The seed of the problems for its warm-up, which are not the problems of the training."""
VOCABULARY = 640


def tokenizer() -> PreTrainedTokenizerFast:
    """Return its tokenizer, learned from the prompts of a checker."""
    shown = demonstrations(random.Random(SEED), SEED, 600)
    return byte_tokenizer([f"{m['role']}\n{m['content']}" for messages, _ in shown for m in messages], VOCABULARY)


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


build = base_builder(tokenizer, demonstrations, name="checker", steps=STEPS, count=600, batch=32)

if __name__ == "__main__":
    build_by_command(build, STEPS)
