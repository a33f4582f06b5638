"""Builds a base model that knows the words of the corpus and, mostly, what each role is for: warmed up on imperfect
demonstrations.

    python -m examples.workloads.search.base --out runs/search/base --seed 0
"""

from __future__ import annotations

import random

from examples.tiny_model import Demonstration, base_builder, build_by_command
from examples.workloads.search.app import ALONE, ANSWERER, READER, WRITER
from examples.workloads.search.tasks import (
    GOODS,
    PEOPLE,
    PROVINCES,
    QUESTIONS,
    SIGHTS,
    TOWNS,
    TRADES,
    Question,
    make_tasks,
)

STEPS, DEMONSTRATIONS = 400, 12000
ERRING = {"writer": 0.45, "reader": 0.4, "answerer": 0.4, "agent": 0.45}
"""Share of a role's answers that name anything that was mentioned."""
NAMES = (*PEOPLE, *TRADES, *TOWNS, *SIGHTS, *PROVINCES, *GOODS)
_SENTENCES = (
    *(
        *QUESTIONS,
        WRITER,
        READER,
        ANSWERER,
        ALONE,
        "search answer",
        "system user assistant question notes says passage nothing found",
    ),
    *(document["text"] for task in make_tasks(1, 0) for document in task["documents"]),
)
WORDS = tuple(dict.fromkeys([*NAMES, *(word for text in _SENTENCES for word in text.split())]))
"""The words of the corpus and of the prompts, a token each."""


def demonstration(rng: random.Random, task: Question, role: str) -> Demonstration:
    """A role's answer at a random moment of a question that goes well so far."""
    hops = len(task["facts"])
    known = {"writer": rng.randrange(hops), "agent": rng.randrange(hops + 1)}.get(role, hops)
    texts = {document["title"]: document["text"] for document in task["documents"]}
    noted = [f"{title} says {fact}" for title, fact in zip(task["evidence"], task["facts"], strict=True)][:known]
    if role == "agent":
        seen = "\n".join(["notes", *(texts[title] for title in task["evidence"][:known])])
        right = task["answer"] if known == hops else task["evidence"][known]
    elif role == "reader":
        hop = rng.randrange(hops)
        seen, right = f"passage {texts[task['evidence'][hop]]}", task["facts"][hop]
    else:
        seen = "\n".join(["notes", *noted])
        right = task["evidence"][known] if role == "writer" else task["answer"]
    mentioned = [word for word in f"{task['question']} {seen}".split() if word in NAMES]
    answer = rng.choice(mentioned) if rng.random() < ERRING[role] else right
    if role == "agent":
        answer = f"{'answer' if known == hops or rng.random() < ERRING[role] / 3 else 'search'} {answer}"
    system = {"writer": WRITER, "reader": READER, "answerer": ANSWERER, "agent": ALONE}[role]
    content = f"question {task['question']}\n{seen}"
    return [{"role": "system", "content": system}, {"role": "user", "content": content}], answer


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of all roles in turn, on tasks of the seed."""
    tasks, roles = list(make_tasks(count, seed + 1000)), list(ERRING)
    return [demonstration(rng, task, roles[number % len(roles)]) for number, task in enumerate(tasks)]


build = base_builder(lambda: WORDS, demonstrations, name="search", steps=STEPS, count=DEMONSTRATIONS)

if __name__ == "__main__":
    build_by_command(build, STEPS)
