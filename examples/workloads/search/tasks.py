"""Questions that take two or three documents to answer, over a small corpus that is made up for each of them.

Nothing can be known by heart: the same names are in every corpus, and what is said of them differs. Questions of public
data sets, each with its own documents, can be downloaded.

    python -m examples.workloads.search.tasks --tasks 512 --seed 0 > tasks.jsonl
    python -m examples.workloads.search.tasks --download hotpotqa --tasks 2000
"""

from __future__ import annotations

import argparse
import functools
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NotRequired, TypedDict

from examples.workloads.data_files import DatasetError
from examples.workloads.downloads import Reader, add_download, download_tasks

PEOPLE = ("Ada", "Bram", "Cleo", "Dara", "Emil", "Fenn", "Gus", "Hana", "Ivo", "Juno")
TRADES = ("baker", "clerk", "diver", "miller", "potter", "tailor")
TOWNS = ("Amber", "Birch", "Coral", "Delph", "Elm", "Fjord", "Grove", "Heath")
SIGHTS = ("bridge", "castle", "harbour", "market", "mill", "tower")
PROVINCES = ("North", "East", "South", "West", "Centre")
GOODS = ("copper", "linen", "olives", "salt", "silk", "timber", "wine")

SETS = ("hotpotqa", "2wiki", "musique")
"""Public data sets whose questions come with documents."""
BAMBOOGLE = "bamboogle"
"""A public data set without documents."""

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
    `facts` is what each of them says. Questions of public data sets may have further right answers in `also`, more
    `searches` than the application's own number, and no evidence, where the answer alone counts."""

    id: str
    question: str
    documents: list[Document]
    answer: str
    evidence: list[str]
    facts: list[str]
    also: NotRequired[list[str]]
    searches: NotRequired[int]


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
    """Print questions, one line of JSON each, or download public data sets and write a file for each split."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=512)
    parser.add_argument("--seed", type=int, default=0)
    add_download(parser, [*SETS, BAMBOOGLE], "search")
    parser.add_argument("--corpus", type=Path, help="documents for bamboogle: JSON lines with title and text")
    options = parser.parse_args()
    if options.download is not None:
        try:
            download(options)
        except DatasetError as error:
            raise SystemExit(str(error)) from None
        return
    for task in make_tasks(options.tasks, options.seed):
        print(json.dumps(task))


def download(options: argparse.Namespace) -> None:
    """Download public data sets. Raises DatasetError."""
    from examples.workloads.search import datasets  # which needs this module's types

    names = options.download or [*SETS, *([BAMBOOGLE] if options.corpus else [])]
    readers: dict[str, Reader] = dict(datasets.READERS)
    if BAMBOOGLE in names:
        if options.corpus is None:
            raise DatasetError("Bamboogle has questions without documents: pass --corpus FILE, rows of title and text.")
        readers[BAMBOOGLE] = functools.partial(datasets.bamboogle, corpus=datasets.read_corpus(options.corpus))
    download_tasks(options, names, readers)


if __name__ == "__main__":
    main()
