"""An application of three roles that pass a word on, and models that err as the test says."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import openai

import cotune
from cotune.errors import RunError
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Usage
from tests.integrations.provider import completion, json_reply

ROLES = ("planner", "writer", "checker")
WORDS = ("apple", "bread", "cedar", "delta", "eagle", "fjord", "grain", "hotel", "ivory", "joker")


def tasks(number: int) -> list[dict[str, str]]:
    return [{"id": f"t{place:02}", "word": WORDS[place % len(WORDS)]} for place in range(number)]


client = openai.AsyncOpenAI(base_url="http://localhost:9/v1", api_key="none")
"""Its calls are answered before they get there, by `Office.respond`."""


async def ask(role: str, text: str) -> str:
    messages: Any = [{"role": "system", "content": f"You are the {role}."}, {"role": "user", "content": text}]
    with cotune.role(role):
        reply = await client.chat.completions.create(model="small", messages=messages)
    return reply.choices[0].message.content or ""


def application(roles: tuple[str, ...] = ROLES) -> Any:
    @cotune.workflow
    async def office(task: Any) -> float:
        text = task["word"]
        for role in roles:
            text = await ask(role, text)
        return float(text == task["word"])

    return office


class Office:
    """Each role repeats the text, or errs at its rate. The model `good` never errs, any other errs as `small` does."""

    def __init__(self, rates: Mapping[str, float], seed: int = 0) -> None:
        self.rates = rates
        self.random = random.Random(seed)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.down: set[str] = set()
        """Models that answer nothing."""
        self.before: Callable[[], None] = lambda: None

    def say(self, model: str, messages: Sequence[Mapping[str, Any]]) -> str:
        """The answer of a model."""
        self.before()
        role = messages[0]["content"].removeprefix("You are the ").rstrip(".")
        self.asked[model, role] += 1
        if model != "good" and self.random.random() < self.rates.get(role, 0.0):
            return "wrong"
        return str(messages[1]["content"])

    async def respond(self, call: LiveCall) -> Answer:
        """Answer a call of the application as it is."""
        return self.answer("small", call)

    def answer(self, model: str, call: LiveCall) -> Answer:
        """Answer a call as this model. Raises RunError where it is down, as `OtherModel` does."""
        if model in self.down:
            raise RunError(f"{model} did not answer a call of role {call.role!r}.")
        text = self.say(model, (call.rewritten or call).messages)
        said = Candidate(index=0, text=text, message={"role": "assistant", "content": text})
        return Answer(candidates=(said,), usage=Usage(prompt_tokens=7, completion_tokens=3))

    def reply(self, body: dict[str, Any], number: int) -> tuple[int, str, list[Any]]:
        """Answer a request as a provider on a port."""
        text = self.say(body["model"], body["messages"])
        return json_reply(completion({"role": "assistant", "content": text}))
