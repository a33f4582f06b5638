"""How the roles of an application err, for `benchmarks.blame_applications`: how often, and in which way."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from examples.gallery.warm import Message, says

KINDS = ("wrong fact", "dropped constraint", "bad format", "arithmetic slip")
NUMBER = re.compile(r"\d+")


class Example(Protocol):
    """An application with its right and wrong answers: a module of the gallery, or a `Structure`."""

    solve: Any

    def tasks(self, count: int, seed: int) -> Sequence[Mapping[str, Any]]: ...
    def expert(self, messages: Sequence[Mapping[str, Any]]) -> Message: ...
    def wrong(self, chance: random.Random, messages: Sequence[Mapping[str, Any]]) -> Message: ...


@dataclass(frozen=True)
class Errors:
    """How often each role errs."""

    natural: Mapping[str, float]
    """By role, the error rate without a fault. Such an error is of any kind."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """By faulty role, its error rate."""
    kind: str = ""
    """The kind of error that faulty roles make."""
    fixed: bool = False
    """Whether a faulty role always errs on this share of the tasks, and at its natural rate on the others. Else it errs
    in this share of its calls."""

    def answer(
        self, example: Example, role: str, messages: Sequence[Mapping[str, Any]], task: str, chance: random.Random
    ) -> Message:
        """The answer of a role to a call, drawn by `chance`: the expert's, or one that is wrong."""
        luck, kind = chance.random(), chance.choice(KINDS)
        errs = luck < self.natural[role]
        if role in self.faults:
            # A fixed fault draws by the task and the role alone, so every call of the task draws the same.
            of_fault = random.Random(f"{task} {role}").random() if self.fixed else luck
            if of_fault < self.faults[role]:
                errs, kind = True, self.kind
        right = example.expert(messages)
        return spoil(example, right, messages, kind, chance) if errs else right


def spoil(
    example: Example, right: Message, messages: Sequence[Mapping[str, Any]], kind: str, chance: random.Random
) -> Message:
    """The right answer with an error of this kind. An answer that has no room for it, such as an arithmetic slip in a
    text without a number, gets a wrong fact instead."""
    wrong = None
    if right.get("tool_calls"):
        wrong = _spoil_tool_call(right, kind, chance)
    elif kind != "wrong fact":
        wrong = says(_spoil_text(str(right["content"]), kind, chance))
    while wrong is None or _same(wrong, right):
        wrong = example.wrong(chance, messages)
    return wrong


def _spoil_tool_call(right: Message, kind: str, chance: random.Random) -> Message | None:
    """A tool call with a wrong argument, or one in words; None for a wrong fact, and if it has no argument."""
    function = right["tool_calls"][0]["function"]
    arguments = json.loads(function["arguments"])
    if kind == "bad format":
        words = " ".join([function["name"], *arguments.values()])
        return says(_spoil_text(words, kind, chance))
    if kind == "wrong fact" or not arguments:
        return None
    spoiled = {name: _spoil_text(value, kind, chance) for name, value in arguments.items()}
    call = {**right["tool_calls"][0], "function": {**function, "arguments": json.dumps(spoiled)}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _spoil_text(text: str, kind: str, chance: random.Random) -> str:
    if kind == "dropped constraint":
        # The last word stands for it, or the last letter of a single word.
        return text.rsplit(maxsplit=1)[0] if len(text.split()) > 1 else text[:-1]
    if kind == "arithmetic slip":
        numbers = list(NUMBER.finditer(text))
        if not numbers:
            return text
        number = chance.choice(numbers)
        slipped = int(number[0]) + chance.choice((-1, 1))
        return f"{text[: number.start()]}{slipped}{text[number.end() :]}"
    words = re.sub(r"\W+", " ", text).strip().upper()
    return f"** {words} **"


def _same(one: Message, other: Message) -> bool:
    """Whether two answers say the same: their texts, and their tool calls without the ids."""
    return (one.get("content") or "", functions_called(one)) == (other.get("content") or "", functions_called(other))


def functions_called(message: Message) -> list[Any]:
    """The functions that an answer calls, with their arguments."""
    return [call["function"] for call in message.get("tool_calls") or ()]
