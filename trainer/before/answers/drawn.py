"""Answers drawn for one run: tool calls by the run's policy, values of schemas, and texts that prompts may expect."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cotune.recording.recorder import LiveCall
from cotune.sampling.request_params import function_of
from cotune.trainer.before.answers.examples import shown_form, shown_json
from cotune.trainer.before.answers.prompts import answer_words, names_in, own_text
from cotune.trainer.before.answers.responder import Message
from cotune.trainer.before.answers.values import NEXT_AGENT, Draw, draw_value


class DrawnAnswers:
    """The answers of run number `run`. The run decides about tools:

    run 0        each tool once, then text; a tool that delegates once for each name that it knows
    run 1        no tool, unless the request demands one
    run 2        as run 0, in reverse order
    later runs   at random, each tool at most twice

    The same run draws the same answers again, in whichever order roles call.
    """

    def __init__(self, run: int, call_tools: bool = True) -> None:
        self.run = run
        self.call_tools = call_tools
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """Answers so far by episode, role and kind: the name of a tool, the schema of a reply, or text."""

    def __call__(self, call: LiveCall) -> Callable[[int], Message]:
        """Return a function from the index of a candidate of this call to its message: a tool call or a text.

        Answers of the same kind (tool, or form of the reply) are counted for each role, so that they differ.
        """
        function = self.function_of(call)
        if function is None:
            kind = str(call.params.get("response_format"))
            agents = names_in(own_text(call.messages), agent_names(call))
        else:
            kind = function["name"]
            agents = delegates(call, function)
        key = call.episode.id, call.role, kind
        answers_before = self.counts[key]
        self.counts[key] += 1

        def message(index: int) -> Message:
            draw = Draw(self.run, call.role, answers_before + index, agents)
            if function is None:
                return {"role": "assistant", "content": reply_text(call, draw, index)}
            return tool_call(function, draw, f"call_{call.id}_{index}")

        return message

    def function_of(self, call: LiveCall) -> Mapping[str, Any] | None:
        """The function that the answer calls, or None for an answer in text."""
        # 1. The functions that the request allows, and whether it demands a call.
        all_functions = [function_of(tool) for tool in call.tools or ()]
        functions = [function for function in all_functions if function.get("name")]
        choice = call.params.get("tool_choice")
        if isinstance(choice, Mapping):
            chosen_name = (choice.get("function") or choice).get("name")
            functions = [function for function in functions if function["name"] == chosen_name] or functions
        if not functions or choice == "none":
            return None
        demanded = isinstance(choice, Mapping) or choice in ("required", "any")

        # 2. The function that this run calls. The docstring of the class says what each run does about tools.
        usable: list[Mapping[str, Any] | None] = []
        if self.call_tools and self.run != 1:
            usable += [function for function in functions if self.may_call(call, function)]
        if not usable:
            # A request that demands a call gets the last tool: frameworks put the one that ends a loop there.
            return functions[-1] if demanded else None
        if self.run == 0:
            return usable[0]
        if self.run == 2:
            return usable[-1]
        if not demanded:
            usable.append(None)
        return random.Random(f"{self.run} {call.role} {call.turn}").choice(usable)

    def may_call(self, call: LiveCall, function: Mapping[str, Any]) -> bool:
        """Whether the role may call the tool once more in this run."""
        most_calls = 2 if self.run > 2 else 1
        # A tool that delegates is called once for each agent that it knows.
        most_calls = max(most_calls, len(delegates(call, function)))
        return self.counts[call.episode.id, call.role, function["name"]] < most_calls


def tool_call(function: Mapping[str, Any], draw: Draw, id: str) -> Message:
    """A message that calls a function with drawn arguments. `id` is the id of the tool call."""
    parameters = function.get("parameters") or {"type": "object"}
    arguments = draw_value(parameters, draw, str(function.get("description") or "")) or {}
    text = msgspec.json.encode(arguments).decode()
    called = {"id": id, "type": "function", "function": {"name": function["name"], "arguments": text}}
    return {"role": "assistant", "content": None, "tool_calls": [called]}


def reply_text(call: LiveCall, draw: Draw, index: int) -> str:
    """An answer in text, or in JSON if the request or the prompt asks for it. `index` numbers the call's candidates."""
    requested = call.params.get("response_format")
    response_format: Mapping[str, Any] = requested if isinstance(requested, Mapping) else {"type": "text"}
    kind = response_format.get("type")
    prompt = own_text(call.messages)
    if kind == "json_schema":
        schema = (response_format.get("json_schema") or {}).get("schema") or {"type": "object"}
        return msgspec.json.encode(draw_value(schema, draw, prompt)).decode()
    if (example := shown_json(prompt, draw)) is not None:
        return example
    if kind == "json_object":
        return "{}"

    # Texts take turns: first the form that the prompt shows, then words that it or the framework waits for, and names
    # of agents, one of which a supervisor may be asked to choose.
    texts = [shown_form(prompt) or f"drawn answer {index + 1}"]
    if len(draw.agents) > 1:
        texts += draw.agents
    texts += answer_words(prompt)
    if call.episode.parts:
        texts += call.episode.parts.words
    other_agents = [name for name in agent_names(call) if name != call.role]
    if len(other_agents) > 1:
        texts += other_agents
    return draw.choose(list(dict.fromkeys(texts)), "text")


def agent_names(call: LiveCall) -> list[str]:
    """The names that the framework gives to the parts of the application; empty if it lists none."""
    return [part.name for part in call.episode.parts.known] if call.episode.parts else []


def delegates(call: LiveCall, function: Mapping[str, Any]) -> list[str]:
    """The agents that a tool may hand work to, by a parameter that names who works next; none for other tools."""
    properties = (function.get("parameters") or {}).get("properties") or {}
    for name, schema in properties.items():
        if NEXT_AGENT.search(name) and isinstance(schema, Mapping) and schema.get("type", "string") == "string":
            text = f"{function.get('description') or ''}\n{schema.get('description') or ''}"
            if names := names_in(text, agent_names(call)):
                return names
    return []
