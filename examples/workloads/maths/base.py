"""Builds a base model that knows the words of sums and, mostly, what each role is for: warmed up on imperfect
demonstrations.

    python -m examples.workloads.maths.base --out runs/maths/base --seed 0
"""

from __future__ import annotations

import random
import re

from examples.tiny_model import Demonstration, base_builder, build_by_command
from examples.workloads.code.programs import program_in
from examples.workloads.maths.app import DIFFER, SYSTEM, Attempt
from examples.workloads.maths.tasks import SUMS, make_tasks
from examples.workloads.maths.verifier import Problem
from examples.workloads.sandbox.bubblewrap import Ran

STEPS, DEMONSTRATIONS = 700, 18000
ERRING_PROGRAM = 0.45
"""Share of the programs that have another number or sign in them."""
TRUST = 0.4
"""Share of the answers that are what the program printed; the judge's are as often the reasoner's."""
AT_ONCE = 0.25
"""Share of a single agent's messages that answer before they are shown any output, and of those that then do not."""
MENTAL = 40
"""How far an answer is from the right one, at most, where it was worked out without a program."""
BAD_FORM = 0.05
NUMBERS = range(-200, 301)
OPENS, CLOSES = "```python\nprint(", ")\n```"
ERROR = "SyntaxError: invalid syntax"
WORDS = (
    *(*SYSTEM.values(), OPENS, CLOSES, "State the final answer to the following arithmetic problem:", "=", "+", "-"),
    *(DIFFER, "The reasoner:", "The program:", "It wrote:", "There is no program.", "Answer:", "print(", ")"),
    *(*f"It wrote (exit, code 1: {ERROR}):".split(), *map(str, NUMBERS)),
    *("system", "user", "assistant"),
)
"""Numbers, signs, and each text of the application, a token each."""


def demonstration(rng: random.Random, task: Problem, role: str, *, begun: bool) -> Demonstration:
    """A role's answer, at the beginning or after a program was run."""
    attempt = Attempt(task["question"])
    begun = begun or role == "judge"
    if begun:
        attempt.reasoned = spoiled(rng, mental(rng, task))
        attempt.program = program_in(spoiled(rng, program(rng, task)))
        attempt.ran = ended(attempt.program)
    output = attempt.ran.stdout.strip() if attempt.ran and attempt.ran.ok else ""
    trusted = output if rng.random() < TRUST else ""
    seen = {
        "judge": [attempt.question, attempt.shown_answer, attempt.shown_program],
        "agent": [attempt.question, *([attempt.shown_program] if begun else [])],
    }
    again = [attempt.shown_program, attempt.shown_answer, DIFFER] if begun else []
    if role == "tool_user" or (role == "agent" and (rng.random() < AT_ONCE) == begun):
        answer = program(rng, task)
    elif role == "judge" and not trusted and rng.random() < TRUST / (1 - TRUST):
        answer = attempt.reasoned
    else:
        answer = f"Answer: {trusted}" if trusted else mental(rng, task)
    content = "\n\n".join(seen.get(role, [attempt.question, *again]))
    return [{"role": "system", "content": SYSTEM[role]}, {"role": "user", "content": content}], spoiled(rng, answer)


def program(rng: random.Random, task: Problem) -> str:
    """The sum as a program; with another number or sign now and then."""
    words = re.findall(r"\d+|[+-]", task["question"])
    if rng.random() < ERRING_PROGRAM:
        at = rng.randrange(len(words))
        words[at] = str(rng.randrange(10, 100)) if words[at].isdigit() else rng.choice("+-")
    return f"{OPENS} {' '.join(words)} {CLOSES}"


def mental(rng: random.Random, task: Problem) -> str:
    """About the right answer."""
    return f"Answer: {int(task['answer']) + rng.choice((0, rng.randint(-MENTAL, MENTAL)))}"


def ended(program: str | None) -> Ran | None:
    """How a program of the demonstrations ends: it is worked out here, as no sandbox is needed for a sum."""
    if program is None:
        return None
    found = re.fullmatch(r"print\( (\d+(?: [+-] \d+)*) \)\n", program)
    if found is None:
        return Ran(1, "exit", "", ERROR, False, 0.0)
    terms = found[1].replace("+ ", "+").replace("- ", "-").split()
    return Ran(0, "exit", f"{sum(map(int, terms))}\n", "", False, 0.0)


def spoiled(rng: random.Random, answer: str) -> str:
    """An answer; now and then, its words in another order."""
    return answer if rng.random() >= BAD_FORM else " ".join(rng.sample(answer.split(" "), len(answer.split(" "))))


def demonstrations(rng: random.Random, seed: int, count: int) -> list[Demonstration]:
    """Demonstrations of any of its roles, on tasks of the seed."""
    tasks = make_tasks(count, seed + 1000, kinds=SUMS)
    return [demonstration(rng, task, rng.choice(list(SYSTEM)), begun=rng.random() < 0.5) for task in tasks]


build = base_builder(lambda: WORDS, demonstrations, name="sums", steps=STEPS, count=DEMONSTRATIONS)

if __name__ == "__main__":
    build_by_command(build, STEPS)
