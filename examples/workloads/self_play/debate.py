"""Two debaters argue for opposite answers to a question before a judge, who has not read the text that they have.

What a debater puts between double quotes is looked up in the text, and the judge sees whether it stands there.
"""

from __future__ import annotations

import re

from examples.workloads.self_play.turns import Messages, Said, Task

SIDES = {"affirmative": "yes", "negative": "no"}
"""The debaters, and the answer that each argues for."""
JUDGE = "judge"
ROUNDS = 2
"""Messages of each debater, before the judge decides."""
MAX_TOKENS = 512
LONGEST = 400
"""Characters of a debater's message; a longer one counts as nothing said."""
FOUND, MISSING = "[stands in the text]", "[does not stand in the text]"

DEBATER = (
    "You debate a question before a judge who has not read the text. You argue for the answer {side}, your opponent "
    "for the other. Put sentences of the text between double quotes: the judge sees whether they stand there. You have "
    "{rounds} messages of at most {longest} characters."
)
JUDGES = (
    "Two debaters argue for opposite answers to a question about a text that they have read and you have not. What "
    f"they quote was looked up: it is followed by {FOUND} or {MISSING}. Answer with yes or no, and nothing else."
)


def turn(task: Task, said: Said) -> str | None:
    """The debaters alternate, then the judge decides."""
    if len(said) < ROUNDS * len(SIDES):
        return list(SIDES)[len(said) % 2]
    return JUDGE if len(said) == ROUNDS * len(SIDES) else None


def messages(task: Task, said: Said, role: str) -> Messages:
    """The question, what was said, and for a debater the text."""
    seen = [f"Question: {task['question']}", *(f"{who}: {shown(task, text)}" for who, text in said)]
    if role == JUDGE:
        return _asked(JUDGES, [*seen, "Your verdict, yes or no?"])
    system = DEBATER.format(side=SIDES[role], rounds=ROUNDS, longest=LONGEST)
    return _asked(system, [f"Text: {' '.join(f'{fact}.' for fact in task['facts'])}", *seen, f"You are {role}."])


def shown(task: Task, text: str) -> str:
    """A debater's message as all see it: on one line, so that nobody speaks in the name of others, and without brackets
    but those that say what stands in the text."""
    line = " ".join(text.split()).replace("[", "(").replace("]", ")")
    if not line or len(line) > LONGEST:
        return "(says nothing)"
    return re.sub(r'"[^"]*"', lambda quote: f"{quote[0]} {FOUND if stands(task, quote[0]) else MISSING}", line)


def stands(task: Task, quote: str) -> bool:
    """Whether a quote is a sentence of the text."""
    return _plain(quote.strip('"')) in {_plain(fact) for fact in task["facts"]}


def quotes(text: str) -> list[str]:
    """What a message quotes."""
    return re.findall(r'"[^"]*"', " ".join(text.split()))


def verdict_in(text: str) -> str | None:
    """The verdict that a judge's message is; None where it is anything else than yes or no."""
    said = text.strip().rstrip(".").lower()
    return said if said in SIDES.values() else None


def _plain(sentence: str) -> str:
    return " ".join(sentence.split()).rstrip(".").lower()


def _asked(system: str, lines: list[str]) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": "\n".join(lines)}]
