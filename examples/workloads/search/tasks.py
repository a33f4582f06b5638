"""Questions that take two or three documents to answer, over a small corpus that is made up for each of them.

Nothing can be known by heart: the same names are in every corpus, and what is said of them differs.

    python -m examples.workloads.search.tasks --tasks 512 --seed 0 > tasks.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from typing import TypedDict

PEOPLE = ("Ada", "Bram", "Cleo", "Dara", "Emil", "Fenn", "Gus", "Hana", "Ivo", "Juno")
TRADES = ("baker", "clerk", "diver", "miller", "potter", "tailor")
TOWNS = ("Amber", "Birch", "Coral", "Delph", "Elm", "Fjord", "Grove", "Heath")
SIGHTS = ("bridge", "castle", "harbour", "market", "mill", "tower")
PROVINCES = ("North", "East", "South", "West", "Centre")
GOODS = ("copper", "linen", "olives", "salt", "silk", "timber", "wine")

QUESTIONS: dict[str, tuple[str, ...]] = {
    "For what is the town known where {} was born?": ("town", "sight"),
    "In which province was {} born?": ("town", "province"),
    "What does the province sell in which {} lies?": ("province", "goods"),
    "What does the province sell in which {} was born?": ("town", "province", "goods"),
}
"""Questions, and what has to be found out for each, one after the other."""


class Document(TypedDict):
    """A page of the corpus."""

    title: str
    text: str


class Question(TypedDict):
    """A task. `evidence` are the titles of the documents that say the answer, in the order in which they are found;
    `facts` is what each of them says, and the last is the answer."""

    id: str
    question: str
    documents: list[Document]
    answer: str
    evidence: list[str]
    facts: list[str]


def make_tasks(count: int, seed: int) -> Iterator[Question]:
    """`count` questions with ids, the same for the same seed; other seeds give held-out ones."""
    rng = random.Random(f"search {seed}")
    for number in range(count):
        yield _make_task(rng, f"{seed}-{number}")


def _make_task(rng: random.Random, name: str) -> Question:
    said: dict[str, dict[str, str]] = {}
    for province in PROVINCES:
        said[province] = {"goods": rng.choice(GOODS)}
    for town in TOWNS:
        said[town] = {"province": rng.choice(PROVINCES), "sight": rng.choice(SIGHTS)}
    for person in PEOPLE:
        said[person] = {"town": rng.choice(TOWNS), "trade": rng.choice(TRADES)}
    asked, relations = rng.choice(list(QUESTIONS.items()))
    subject = rng.choice(PEOPLE if relations[0] == "town" else TOWNS)
    evidence, facts = [], []
    at = subject
    for relation in relations:
        evidence.append(at)
        at = said[at][relation]
        facts.append(at)
    documents: list[Document] = [{"title": title, "text": _text(title, what)} for title, what in said.items()]
    rng.shuffle(documents)
    question = asked.format(subject)
    return {
        "id": name,
        "question": question,
        "documents": documents,
        "answer": at,
        "evidence": evidence,
        "facts": facts,
    }


def _text(title: str, what: dict[str, str]) -> str:
    if "goods" in what:
        return f"The province {title} sells {what['goods']} to all others."
    if "province" in what:
        return f"The town {title} lies in {what['province']} and has a {what['sight']} known to all."
    return f"The {what['trade']} {title} was born in {what['town']} long ago."


def main() -> None:
    """Print questions, one line of JSON each."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for task in make_tasks(options.tasks, options.seed):
        print(json.dumps(task))


if __name__ == "__main__":
    main()
