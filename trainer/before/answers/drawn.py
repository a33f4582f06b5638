"""Answers drawn for one run: tool calls by the run's policy, values of schemas, and texts that prompts may expect."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.recording.recorder import LiveCall
from cotune.sampling.request_params import function_of
from cotune.trainer.before.answers.examples import shown_form, shown_json
from cotune.trainer.before.answers.prompts import answer_words, listed_names, names_in, own_text
from cotune.trainer.before.answers.responder import Message
from cotune.trainer.before.answers.values import NEXT_AGENT, Draw, draw_value

MOST_RANDOM_CALLS = 2
"""Most calls of one tool by one role in a run that draws its tools at random."""


class DrawnAnswers:
    """The answers of run number `run`. The run decides about tools:

    run 0        each tool once, then text; a tool that delegates once for each name that it knows
    run 1        no tool, unless the request demands one
    run 2        as run 0, in reverse order
    later runs   at random

    The same run draws the same answers again, in whichever order roles call.
    """

    def __init__(self, run: int, call_tools: bool = True) -> None:
        self.run = run
        self.call_tools = call_tools
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """Answers so far by episode, role and kind: the name of a tool, the schema of a reply, or text."""

    def __call__(self, call: LiveCall) -> Callable[[int], Message]:
        """The candidates of a call, by index."""
        tool = self.tool_of(call)
        if tool is not None:
            first = self.count(call, f"tool {tool['name']}")
            return lambda index: tool_call(call, tool, self.draw(call, first + index), index)
        first = self.count(call, f"reply {call.params.get('response_format')}")
        return lambda index: {"role": "assistant", "content": reply_text(call, self.draw(call, first + index), index)}

    def count(self, call: LiveCall, kind: str) -> int:
        key = call.episode.id, call.role, kind
        self.counts[key] += 1
        return self.counts[key] - 1

    def draw(self, call: LiveCall, count: int) -> Draw:
        return Draw(self.run, call.role, count, names_in(own_text(call.messages), agent_names(call)))

    def tool_of(self, call: LiveCall) -> Mapping[str, Any] | None:
        """The function that the answer calls, or None for an answer in text."""
        functions = {}
        for tool in call.tools or ():
            function = function_of(tool)
            if function.get("name"):
                functions[function["name"]] = function
        demanded = demanded_function(call.params.get("tool_choice"))
        if demanded in functions:
            return functions[demanded]
        if not functions or call.params.get("tool_choice") == "none":
            return None
        order = list(functions.values())
        usable = []
        if self.call_tools and self.run != 1:
            usable = [function for function in order if self.may_call(call, function)]
        if self.run > 2 and usable:
            chance = random.Random(f"{self.run} {call.role} {call.turn}")
            return chance.choice([*usable, None] if demanded is None else usable)
        if self.run == 2:
            usable.reverse()
        if usable:
            return usable[0]
        # A request that demands a call gets the last tool: frameworks put the one that ends a loop there.
        return order[-1] if demanded is not None else None

    def may_call(self, call: LiveCall, function: Mapping[str, Any]) -> bool:
        """Whether the role has not called the tool as often yet as it does in this run."""
        most = MOST_RANDOM_CALLS if self.run > 2 else 1
        _, names = delegates(function, agent_names(call))
        return self.counts[call.episode.id, call.role, f"tool {function['name']}"] < max(most, len(names))


def tool_call(call: LiveCall, function: Mapping[str, Any], draw: Draw, index: int) -> Message:
    about = str(function.get("description") or "")
    arguments = draw_value(function.get("parameters") or {"type": "object"}, draw, about) or {}
    parameter, names = delegates(function, agent_names(call))
    if parameter:
        arguments[parameter] = names[(draw.run + draw.count) % len(names)]
    text = msgspec.json.encode(arguments).decode()
    asked = {"id": f"call_{call.id}_{index}", "type": "function"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{**asked, "function": {"name": function["name"], "arguments": text}}],
    }


def reply_text(call: LiveCall, draw: Draw, index: int) -> str:
    """An answer in text or JSON."""
    response_format = call.params.get("response_format")
    prompt = own_text(call.messages)
    if isinstance(response_format, Mapping) and response_format.get("type") == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema") or {"type": "object"}
        return msgspec.json.encode(draw_value(schema, draw, prompt)).decode()
    if (example := shown_json(prompt, draw)) is not None:
        return example
    if isinstance(response_format, Mapping) and response_format.get("type") == "json_object":
        return "{}"

    # Texts take turns: first the form that the prompt shows, then words that it or the framework waits for.
    parts = call.episode.parts
    agents = names_in(prompt, agent_names(call))
    texts = [shown_form(prompt) or f"drawn answer {index + 1}"]
    texts += agents if len(agents) > 1 else []
    texts += answer_words(prompt)
    texts += parts.words if parts else []
    others = [name for name in agent_names(call) if name != call.role]
    texts += others if len(others) > 1 else []
    return draw.choose(list(dict.fromkeys(texts)), "text")


def agent_names(call: LiveCall) -> list[str]:
    """How the framework names the parts of the application."""
    return [part.name for part in call.episode.parts.known] if call.episode.parts else []


def delegates(function: Mapping[str, Any], agents: Sequence[str]) -> tuple[str, list[str]]:
    """The parameter of a tool that names who works next, and the names that it may have; empty for other tools."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    for name, schema in properties.items():
        if not isinstance(schema, Mapping) or schema.get("enum") or schema.get("type", "string") != "string":
            continue
        if not NEXT_AGENT.search(name):
            continue
        text = f"{function.get('description') or ''}\n{schema.get('description') or ''}"
        names = [agent for agent in dict.fromkeys(agents) if agent in text] or listed_names(text)
        if names:
            return name, names
    return "", []


def demanded_function(tool_choice: Any) -> str | None:
    """The function that must be called, "" if any must be, None if none must be."""
    if isinstance(tool_choice, Mapping):
        function = tool_choice.get("function") or tool_choice
        return str(function["name"]) if isinstance(function, Mapping) and function.get("name") else None
    return "" if tool_choice in ("required", "any") else None
