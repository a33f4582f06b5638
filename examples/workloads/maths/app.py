"""An AutoGen application: a reasoner works a problem out, a tool user writes a program for it, a judge answers.

The program runs in a sandbox. While its output and the reasoner's answer differ both see the other's, and go on, for up
to four turns; then the judge sees both, and says what the answer is. A single agent writes programs too, sees what they
print, and answers; one without a tool just answers.

    OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -m examples.workloads.maths.app --tasks 3
"""

from __future__ import annotations

import argparse
import asyncio
import os
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.model_context import BufferedChatCompletionContext
from autogen_ext.models.openai import OpenAIChatCompletionClient

from examples.workloads.code.programs import program_in, run
from examples.workloads.maths.answers import agree, answer_in
from examples.workloads.sandbox.bubblewrap import Ran

TURNS = 4
SHOWN = 600
"""Characters of a program's output that the roles are shown."""
API_KEY = os.environ.get("OPENAI_API_KEY", "none")
FORM = (
    "End with the line `Answer: X`, where X is the answer alone: a number such as 42, -0.5 or 3/7 in lowest terms, "
    "without a unit, or LaTeX such as 2\\sqrt{3}; nothing in it is left to be worked out."
)
PROGRAM = (
    "Write a Python program that solves the problem and prints its answer on one line, and nothing else: a whole "
    "number, an exact decimal, or a fraction of `fractions.Fraction`. It has the standard library only and nothing to "
    "read. Answer with the whole program between ```python and ``` marks."
)
SYSTEM = {
    "reasoner": f"Solve the problem step by step. {FORM}",
    "tool_user": PROGRAM,
    "judge": f"A reasoner and a program have worked on the problem; each may be wrong. Decide. {FORM}",
    "agent": (
        f"Solve the problem. Either have it worked out by a program, up to {TURNS} times, and see what it prints. "
        f"{PROGRAM} Or say the answer. {FORM}"
    ),
}
DIFFER = "They differ. Find out which is wrong."


class Solver(AssistantAgent):
    """A role at a problem, which remembers nothing but what it is asked."""

    def __init__(self, role: str, attempt: Attempt) -> None:
        context = BufferedChatCompletionContext(buffer_size=1)
        super().__init__(role, MODELS[role], system_message=SYSTEM[role], model_context=context)
        self.attempt = attempt

    async def say(self, *seen: str) -> str:
        """Its message on what it sees."""
        result = await self.run(task="\n\n".join(seen))
        return result.messages[-1].to_text()


class Attempt:
    """A problem while it is worked on: the newest answer of the reasoner, the newest program and how it ended."""

    def __init__(self, question: str) -> None:
        self.question = question
        self.reasoned = ""
        self.program: str | None = None
        self.ran: Ran | None = None
        self.verdict = ""
        self.turns = 0

    async def solve(self) -> Attempt:
        """Work on it until both agree or the turns are over, and have it judged."""
        reasoner, tool_user, judge = (Solver(role, self) for role in ("reasoner", "tool_user", "judge"))
        while self.turns < TURNS and not self.agreed:
            again = [self.shown_program, self.shown_answer, DIFFER]
            seen = [self.question, *(again if self.turns else [])]
            self.turns += 1
            self.reasoned = await reasoner.say(*seen)
            await self.execute(await tool_user.say(*seen))
        self.verdict = await judge.say(self.question, self.shown_answer, self.shown_program)
        return self

    async def solve_alone(self) -> Attempt:
        """The same with a single agent, until it has answered: after so many programs, its next message is the last."""
        agent = Solver("agent", self)
        self.verdict = await agent.say(self.question)
        while self.turns < TURNS and answer_in(self.verdict) is None:
            self.turns += 1
            await self.execute(self.verdict)
            self.verdict = await agent.say(self.question, self.shown_program)
        return self

    async def solve_without_tool(self) -> Attempt:
        """The same with nobody but the reasoner, who answers once."""
        self.verdict = await Solver("reasoner", self).say(self.question)
        return self

    async def execute(self, message: str) -> None:
        """Run the program of a message, if there is one."""
        self.program = program_in(message)
        self.ran = None if self.program is None else await asyncio.to_thread(run, self.program)

    @property
    def agreed(self) -> bool:
        """Whether the reasoner and the program have the same answer."""
        return self.ran is not None and agree(self.reasoned, self.ran)

    @property
    def shown_answer(self) -> str:
        """The reasoner's message, for the others."""
        return f"The reasoner:\n{self.reasoned}"

    @property
    def shown_program(self) -> str:
        """The program and its output, for the others."""
        if self.program is None or self.ran is None:
            return "There is no program."
        ended = "" if self.ran.ok else f" ({self.ran.ended}, code {self.ran.code}: {self.ran.stderr[-SHOWN:]})"
        return f"The program:\n{self.program}\nIt wrote{ended}:\n{self.ran.stdout[:SHOWN]}"


def model(role: str) -> OpenAIChatCompletionClient:
    """The model client that plays a role; served under the role's name."""
    info: Any = dict.fromkeys(("vision", "function_calling", "json_output", "structured_output"), False)
    return OpenAIChatCompletionClient(
        model=role, temperature=1, api_key=API_KEY, model_info={**info, "family": "unknown"}
    )


MODELS = {role: model(role) for role in SYSTEM}


async def main() -> None:
    """Solve problems with whatever OPENAI_BASE_URL points at, and print how many answers are right."""
    from examples.workloads.maths.tasks import make_tasks
    from examples.workloads.maths.verifier import right

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tasks", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    tasks = make_tasks(options.tasks, options.seed)
    attempts = await asyncio.gather(*(Attempt(task["question"]).solve() for task in tasks))
    answers = [answer_in(attempt.verdict) for attempt in attempts]
    for task, attempt, answer in zip(tasks, attempts, answers, strict=True):
        print(f"{task['id']}: {answer or 'no answer'} after {attempt.turns} turns, {task['answer']} is right")
    print(f"{sum(map(right, answers, tasks))} of {len(tasks)} are right")


if __name__ == "__main__":
    asyncio.run(main())
