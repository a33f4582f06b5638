"""An application of two roles whose outcome needs both prompts to be better, and models that obey simple rules."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import openai

import cotune
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Usage

CITIES = ("Oslo", "Lima", "Kyoto", "Accra", "Quito", "Turin", "Hanoi", "Perth")
PLANNER = "You plan journeys for a small travel office. Say what the customer wants."
WRITER = "You write the reply that a customer of the travel office gets."
NAME_CITY, REPEAT = "Name the city.", "Repeat what you are told."
RULES = (NAME_CITY, REPEAT, "Be polite to everybody.", "Use short words.")

client = openai.AsyncOpenAI(base_url="http://localhost:9/v1", api_key="none")


def tasks(number: int, start: int = 0) -> list[dict[str, Any]]:
    return [{"id": f"t{n}", "city": CITIES[n % len(CITIES)], "days": n} for n in range(start, start + number)]


async def ask(role: str, system: str, text: str) -> str:
    with cotune.role(role):
        messages: Any = [{"role": "system", "content": system}, {"role": "user", "content": text}]
        reply = await client.chat.completions.create(model="office", messages=messages)
    return reply.choices[0].message.content or ""


def application() -> Any:
    @cotune.workflow
    async def solve(task: Any) -> float:
        plan = await ask("planner", PLANNER, f"{task['days']} days in {task['city']}, please.")
        return float(task["city"] in await ask("writer", WRITER, plan))

    @solve.scorer("planner")
    def names(candidate: Any, call: Any, task: Any) -> float:
        return float(task["city"] in candidate.text)

    @solve.scorer("writer")
    def repeats(candidate: Any, call: Any, task: Any) -> Any:
        right = float(call.messages[-1]["content"] in candidate.text)
        return cotune.Feedback(right, "it says all" if right else "it leaves out what the planner said")

    return solve


def answer(text: str) -> Answer:
    said = Candidate(index=0, text=text, message={"role": "assistant", "content": text}, finish_reason="stop")
    return Answer(candidates=(said,), usage=Usage(prompt_tokens=20, completion_tokens=5))


class Office:
    """Answers both roles by the rules that it finds in their system messages."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []
        self.before: Callable[[], None] = lambda: None

    async def respond(self, call: LiveCall) -> Answer:
        self.before()
        system, user = (message["content"] for message in (call.rewritten or call).messages[:2])
        self.asked.append((call.role, system))
        if call.role == "planner":
            return answer(f"a journey to {user.split()[3].strip(',')}" if NAME_CITY in system else "a journey")
        return answer(f"Of course: {user}." if REPEAT in system else "We will see to it.")


class Reflector:
    """Adds one of the rules to the text, without a look at the runs."""

    def __init__(self, rules: tuple[str, ...] = RULES, seed: int = 0) -> None:
        self.rules = rules
        self.random = random.Random(seed)
        self.requests: list[str] = []

    async def respond(self, call: LiveCall) -> Answer:
        request = call.messages[-1]["content"]
        self.requests.append(request)
        now = request.partition("<text>\n")[2].partition("\n</text>")[0]
        rule = self.rules[random.Random(f"{now} {len(request)}").randrange(len(self.rules))]
        return answer(f"I thought about it.\n<new-text>\n{now} {rule}\n</new-text>")
