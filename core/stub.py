"""A policy without a model: short made-up candidates, to see how an application calls before anything is loaded."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any, cast

import msgspec

from cotune.errors import WorkflowError
from cotune.example_json import example
from cotune.plans import Plan
from cotune.recipes import Attribution
from cotune.recorder import Answer, LiveCall
from cotune.records import PolicyRef
from cotune.respond import PolicyResponder
from cotune.sampler import Completion, Sampler, SamplingParams
from cotune.scoring import Scorer

_PATIENCE = 4
"""Times the call limit after which even an application that swallows the refusal is stopped."""


class StubResponder:
    """Answers every call by itself; nothing is contacted. Plan, scorers and selection work as in training.

    A call with tools gets, once per episode, role and tool, a tool call with minimal arguments, so that loops over
    tools end; one that asks for JSON gets the smallest value of its schema; any other one of `answers` in turn, or a
    short text. `limit` bounds the calls of an episode: past it the episode fails.
    """

    def __init__(
        self,
        *,
        plan: Plan | None = None,
        scorers: Mapping[str, Scorer] | None = None,
        attribution: Attribution | None = None,
        provider_roles: Collection[str] = (),
        answers: Sequence[str] = (),
        call_tools: bool = True,
        limit: int = 64,
    ) -> None:
        self.plan = plan
        self.scorers = scorers or {}
        self.attribution = attribution
        self.provider_roles = provider_roles
        self.answers = answers
        self.call_tools = call_tools
        self.limit = limit
        self.calls: Counter[str] = Counter()
        """Calls by episode, refused ones too."""
        self._used: set[tuple[str, str, str]] = set()

    async def respond(self, call: LiveCall) -> Answer:
        """Made-up candidates with the rewards of the role's scorer."""
        self._bound(call)
        made = _Made(self, call)
        provided = call.role in self.provider_roles
        if provided:
            call.obstacle = ""
        inner = PolicyResponder(
            cast(Sampler, made),
            made,
            {call.role: PolicyRef("stub")},
            plan=None if provided else self.plan,
            scorers={} if provided else self.scorers,
            attribution=self.attribution,
        )
        answer = await inner.respond(call)
        assert answer is not None
        if made.tool is not None:
            self._used.add((call.episode.id, call.role, made.tool))
        return msgspec.structs.replace(answer, policy=None, prompt_ids=()) if provided else answer

    def tool_for(self, call: LiveCall) -> Mapping[str, Any] | None:
        """The function that the answer calls: the first that this role has not called yet; None for a text.

        Where the application demands a call and none is left, the last one: frameworks put the tool that ends a loop
        there.
        """
        functions = {f["name"]: f for f in map(_function, call.tools or ()) if f.get("name")}
        choice = call.params.get("tool_choice")
        forced = _forced(choice)
        if forced in functions:
            return functions[forced]
        if not self.call_tools or not functions or choice == "none":
            return None
        fresh = [f for name, f in functions.items() if (call.episode.id, call.role, name) not in self._used]
        if fresh:
            return fresh[0]
        return list(functions.values())[-1] if forced is not None else None

    def _bound(self, call: LiveCall) -> None:
        self.calls[call.episode.id] += 1
        count = self.calls[call.episode.id]
        if count > _PATIENCE * self.limit:
            raise asyncio.CancelledError(f"the application went on after {self.limit} calls")
        if count > self.limit:
            raise WorkflowError(
                f"The application made {self.limit} calls on one task and did not stop; the last one by {call.role!r}.",
                "Made-up answers may never say what ends its loop: pass a text that does (--answer), or raise --calls.",
            )


class _Made:
    """Sampler and chat format of one call: a candidate's token ids are the bytes of its message."""

    def __init__(self, stub: StubResponder, call: LiveCall) -> None:
        self._stub = stub
        self._call = call
        chosen = stub.tool_for(call)
        self._function = chosen
        self.tool = None if chosen is None else str(chosen["name"])

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **_: Any,
    ) -> list[int]:
        return list(_bytes([messages, tools]))

    def reads(self, option: str) -> bool:
        return True

    def grammar(
        self, asked: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, prompt: Sequence[int]
    ) -> str:
        return ""

    async def sample(
        self, prompt_token_ids: Sequence[int], n: int, params: SamplingParams, policy: PolicyRef
    ) -> list[Completion]:
        drawn = [tuple(_bytes(self._message(i))) for i in range(n)]
        return [Completion(ids, (-1.0,) * len(ids), "stop") for ids in drawn]

    def parse(self, token_ids: Sequence[int], stop: Sequence[str] = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        message = msgspec.json.decode(bytes(token_ids))
        return message["content"] or "", message, "tool_calls" if message.get("tool_calls") else "stop"

    def _message(self, index: int) -> dict[str, Any]:
        if self._function is not None:
            arguments = _text(example(self._function.get("parameters") or {"type": "object"}, index) or {})
            function = {"name": self.tool, "arguments": arguments}
            called = {"id": f"call_{self._call.id}_{index}", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [called]}
        return {"role": "assistant", "content": self._content(index)}

    def _content(self, index: int) -> str:
        asked = self._call.params.get("response_format")
        if isinstance(asked, Mapping) and asked.get("type") == "json_schema":
            return _text(example((asked.get("json_schema") or {}).get("schema") or {"type": "object"}, index))
        answers = self._stub.answers
        if answers:
            return answers[(self._call.turn + index) % len(answers)]
        if isinstance(asked, Mapping) and asked.get("type") == "json_object":
            return "{}"
        return f"stub answer {index + 1}"


def _function(tool: Any) -> Mapping[str, Any]:
    """The function of a tool in OpenAI form; empty for a tool that is none (a hosted one)."""
    found = tool.get("function") if isinstance(tool, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _forced(choice: Any) -> str | None:
    """The function that must be called, "" where any must be, None where none must."""
    if isinstance(choice, Mapping):
        named = choice.get("function") or choice
        return str(named["name"]) if isinstance(named, Mapping) and named.get("name") else None
    return "" if choice in ("required", "any") else None


def _bytes(value: Any) -> bytes:
    return msgspec.json.encode(value, enc_hook=str)


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
