"""Word problems from reasoning-gym's generators: sums in figures, and legs of animals.

python -m examples.word_problems.tasks --tasks 512 > tasks.jsonl
python -m examples.word_problems.tasks --tasks 200 --skip 512 > held_out.jsonl
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator, Mapping
from typing import Any, TypedDict

KINDS: dict[str, dict[str, Any]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "max_digits": 2},
    "basic_arithmetic": {
        "min_terms": 2,
        "max_terms": 3,
        "max_digits": 2,
        "operators": ("+", "-", "*"),
        "format_style": "natural",
    },
    "leg_counting": {"min_animals": 1, "max_animals": 2, "max_instances": 9},
}
"""Generators and their settings; tasks take turns between them."""


class Problem(TypedDict):
    """A task: the generator that it is from, the question, and the right answer, a whole number."""

    id: str
    kind: str
    question: str
    answer: str


def make_tasks(count: int, skip: int = 0, seed: int = 0, kinds: Mapping[str, dict[str, Any]] = KINDS) -> list[Problem]:
    """`count` problems of all kinds in turn, after the first `skip`; no question comes twice in a seed's sequence."""
    streams = itertools.cycle([_problems(kind, settings, seed) for kind, settings in kinds.items()])
    questions: set[str] = set()
    tasks: list[Problem] = []
    while len(tasks) < skip + count:
        task = next(task for task in next(streams) if task["question"] not in questions)
        questions.add(task["question"])
        tasks.append(task)
    return tasks[skip:]


def _problems(kind: str, settings: dict[str, Any], seed: int) -> Iterator[Problem]:
    import reasoning_gym  # here, as it takes seconds and the application does not need it

    dataset = reasoning_gym.create_dataset(kind, seed=seed, size=10**6, **settings)
    for number in range(len(dataset)):
        entry = dataset[number]
        question = entry["question"].strip().splitlines()[-1]  # without the lines that only introduce it
        yield {"id": f"{kind}-{seed}-{number}", "kind": kind, "question": question, "answer": entry["answer"]}


def main() -> None:
    """Print tasks, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first so many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.skip, options.seed):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
