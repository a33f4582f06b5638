"""Whether a question is answered, and what each role's message is worth."""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

from examples.workloads.search.index import Index, last_line
from examples.workloads.search.tasks import Question

BAD_FORMAT = -0.5


def normalised(text: str) -> list[str]:
    """Words in lower case without punctuation and articles (as SQuAD compares answers; Rajpurkar et al., 2016)."""
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def exact(answer: str, right: str) -> bool:
    """Whether an answer is the right one and nothing else."""
    return normalised(answer) == normalised(right)


def f1(answer: str, right: str) -> float:
    """Harmonic mean of the shares of words in common; an answer that lists every possibility has little of it."""
    said, wanted = Counter(normalised(answer)), Counter(normalised(right))
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total()) if common else 0.0


def right_answers(task: Question) -> list[str]:
    """All answers that are right."""
    return [task["answer"], *task.get("also", [])]


def evidence_found(task: Question, retrieved: Sequence[str]) -> float:
    """The share of the documents that say the answer which is among the titles that were retrieved; 1 if the data set
    does not say which they are."""
    if not task["evidence"]:
        return 1.0
    return len(set(task["evidence"]) & set(retrieved)) / len(task["evidence"])


def supported(task: Question, retrieved: Sequence[str]) -> bool:
    """Whether all documents that say the answer were retrieved."""
    return evidence_found(task, retrieved) == 1.0


def solved(task: Question, answer: str, retrieved: Sequence[str]) -> bool:
    """Whether the answer is right and rests on what was retrieved: one that is only guessed is wrong."""
    return any(exact(answer, right) for right in right_answers(task)) and supported(task, retrieved)


def query_reward(task: Question, index: Index, retrieved: Sequence[str], text: str) -> dict[str, float]:
    """`team` is 1 for finding the next document that is needed, half for a later one; `local` punishes no query."""
    found = index.best(last_line(text))
    if found is None:
        return {"team": 0.0, "local": BAD_FORMAT}
    missing = [title for title in task["evidence"] if title not in retrieved]
    if found["title"] not in missing:
        return {"team": 0.0, "local": 0.0}
    return {"team": 1.0 if found["title"] == missing[0] else 0.5, "local": 0.0}


def reader_reward(task: Question, title: str, passage: str, text: str) -> dict[str, float]:
    """`team` is how well the note says what this document has to do with the question (F1); a note on a document that
    is not needed is worth nothing; `local` punishes words that are not in the passage."""
    note = last_line(text)
    words = normalised(note)
    local = 0.0 if words and set(words) <= set(normalised(passage)) else BAD_FORMAT
    facts = dict(zip(task["evidence"], task["facts"], strict=True))
    return {"team": f1(note, facts[title]) if title in facts else 0.0, "local": local}


def agent_reward(task: Question, index: Index, retrieved: Sequence[str], text: str) -> dict[str, float]:
    """A single agent's message: as a query after `search`, as an answer after `answer`."""
    asked, _, rest = last_line(text).partition(" ")
    if asked == "search":
        return query_reward(task, index, retrieved, rest)
    return answer_reward(task, retrieved, rest) if asked == "answer" else {"team": 0.0, "local": BAD_FORMAT}


def answer_reward(task: Question, retrieved: Sequence[str], text: str) -> dict[str, float]:
    """`team` is F1 with the right answer, and one point more for exactly that one; nothing without its evidence."""
    if not supported(task, retrieved):
        return {"team": 0.0, "local": 0.0}
    answer = last_line(text)
    best = max(f1(answer, right) + exact(answer, right) for right in right_answers(task))
    return {"team": best, "local": 0.0}
