"""Whether a problem is solved, and what each role's message is worth.

An answer in the wrong form is wrong. Where the right answer is a number, only a number is right, compared exactly;
anything else is an expression, which math-verify compares.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from fractions import Fraction
from typing import TypedDict

from examples.workloads.maths.answers import answer_in, number, plain, printed
from examples.workloads.maths.equal import Comparer
from examples.workloads.sandbox.bubblewrap import Ran

BAD_FORM = -0.5
KNOWN = 0.5
"""What a program of a single agent earns by printing the right answer, which is then still to be said."""
_COMMAND = re.compile(r"\\(?:[A-Za-z]+|.)")
_WORD = re.compile(r"[A-Za-z]{3,}")
_ALLOWED = {
    rf"\{name}" for name in ("frac", "dfrac", "tfrac", "sqrt", "pi", "cdot", "left", "right", "{", "}", ",", "!")
}
"""Commands that an answer may have without the right one having them: nothing that is left to be worked out."""
_ALIKE = {r"\leq": r"\le", r"\ge": r"\le", r"\geq": r"\le", r"\ln": r"\log", r"\dbinom": r"\binom"}
"""Commands that may stand for another."""
_NO_MORE = ";=<>±!"
"""Signs of lists, chains, ranges and factorials: no more of them than in the right answer."""


class Problem(TypedDict):
    """A task: the question, the right answer, and how far a number may be from it (`0`: not at all)."""

    id: str
    kind: str
    question: str
    answer: str
    tolerance: str


def right(answer: str | None, task: Problem) -> bool:
    """Whether an answer, as read from a message or a program's output, is in the right form and right."""
    gold = plain(task["answer"]) or ""
    value = number(gold, worked_out=False)
    if answer is None or value is None:
        return answer is not None and _in_form(answer, gold, task["question"]) and _equal(gold, answer)
    found = number(answer)
    return found is not None and abs(found - value) <= Fraction(task["tolerance"])


def readable(gold: str) -> bool:
    """Whether anything can be right where this is the right answer: it is a number, or math-verify reads it."""
    return number(gold, worked_out=False) is not None or _equal(gold, gold)


def reasoner_reward(message: str, task: Problem) -> dict[str, float]:
    """`team` is 1 for the right answer, `local` punishes the wrong form."""
    return _worth(answer_in(message), task)


def tool_reward(ran: Ran | None, task: Problem) -> dict[str, float]:
    """`team` is 1 for a program that prints the right answer and nothing else; `local` punishes no program, one that
    did not come to its end, and output that is not one line."""
    return _worth(printed(ran) if ran else None, task)


def judge_reward(message: str, task: Problem) -> dict[str, float]:
    """`team` is the outcome, whoever the answer was copied from; `local` punishes the wrong form."""
    return _worth(answer_in(message), task)


def agent_reward(message: str, ran: Ran | None, before: Ran | None, task: Problem) -> dict[str, float]:
    """A single agent's message: as an answer, or by its program. `team` is half a point for a program that prints the
    right answer, and nothing where the one `before` did already; `local` as for the others."""
    if ran is None:
        return _worth(answer_in(message), task)
    worth = tool_reward(ran, task)
    shown = before is not None and tool_reward(before, task)["team"] == 1
    return {"team": 0.0 if shown else KNOWN * worth["team"], "local": worth["local"]}


def _worth(answer: str | None, task: Problem) -> dict[str, float]:
    return {"team": float(right(answer, task)), "local": BAD_FORM if answer is None else 0.0}


def _in_form(answer: str, gold: str, question: str) -> bool:
    """Whether an answer could be one of this kind: one value, or as many as there are, and worked out."""
    if "$" in answer or ("." in answer and "." not in gold):
        return False
    if not _commands(answer) <= _ALLOWED | _commands(gold):
        return False
    bare, bare_gold = (_COMMAND.sub(" ", text).replace("<", ">") for text in (answer, gold))
    if not set(_WORD.findall(bare)) <= set(_WORD.findall(bare_gold)):
        return False
    counts, most = Counter(bare), Counter(bare_gold)
    if any(counts[sign] > most[sign] for sign in _NO_MORE) or counts[","] != most[","]:
        return False
    if _brackets(answer) != _brackets(gold):
        return False
    quoted = "".join(answer.split()) in "".join(question.split())
    return not quoted or "".join(answer.split()) == "".join(gold.split())


def _commands(text: str) -> set[str]:
    return {_ALIKE.get(command, command) for command in _COMMAND.findall(text)}


def _brackets(text: str) -> str:
    """How an interval or a tuple begins and ends, so that (1, 2) is not [1, 2] or 1, 2; nothing of a value or a set."""
    bare = re.sub(r"\\(?:left|right)|\s", "", text)
    return "" if "," not in bare else bare[0] + bare[-1] if bare[0] in "([" else ""


@functools.cache
def comparer() -> Comparer:
    """The one of this process."""
    return Comparer()


@functools.lru_cache(4096)
def _equal(gold: str, answer: str) -> bool:
    return comparer().equal(gold, answer)
