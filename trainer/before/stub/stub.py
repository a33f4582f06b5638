"""A policy without a model: short made-up candidates, to see how an application calls before anything is loaded."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from cotune.algorithms.recipes import Attribution
from cotune.errors import WorkflowError
from cotune.json_values import json_or_none
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.plans import Plan
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import Completion, Sampler, SamplingParams, TokenBytes
from cotune.sampling.request_params import function_of
from cotune.sampling.responder import PolicyResponder
from cotune.sampling.scoring import AnyScorer
from cotune.trainer.before.stub.fitting import AS_IT_FITS, Manner, form_shown, lessons
from cotune.trainer.before.stub.json_example import example, fits
from cotune.trainer.before.stub.words import asked_json, choices_of, listed, names_in, prompt_text

ENDLESS = "on one task and did not stop"
"""Part of the error of an episode that makes more calls than it may."""
_TOOL = "tool "
_STOPPED_AFTER = 4
"""Times the call limit after which even an application that swallows the refusal is stopped."""


@dataclass(eq=False, kw_only=True)
class StubResponder:
    """Answers every call by itself; nothing is contacted. Plan, scorers and selection work as in training.

    A call with tools gets, once per episode, role and tool, a tool call with small arguments, so that loops over
    tools end; a tool that hands over is called once for each name it knows. One that asks for JSON gets a value of its
    schema; any other one of `answers` in turn, or a short text, or a name or word that its prompt offers. Choices
    rotate from call to call, beginning at `variant`, so that branches are taken and loops end; `branched` tells whether
    there was one. So does the tool that is called first, from one variant to the next. A tool whose result names valid
    values is called once more, with one. `manner` says how else answers are made up.
    `limit` bounds the calls of an episode: past it the episode fails. `sampling` are parameters of the policy, whatever
    the application asks.
    """

    plan: Plan | None = None
    scorers: Mapping[str, AnyScorer] = field(default_factory=dict)
    attribution: Attribution = field(default_factory=Attribution)
    own: Mapping[str, Attribution] = field(default_factory=dict)
    provider_roles: Collection[str] = ()
    answers: Sequence[str] = ()
    manner: Manner = AS_IT_FITS
    limit: int = 64
    sampling: Mapping[str, Any] | None = None
    variant: int = 0
    meeting: threading.Barrier | None = None
    """Where the first call waits, a second at most, for that of another run: so that both overlap."""
    calls: Counter[str] = field(default_factory=Counter, init=False)
    """Calls by episode, refused ones too."""
    branched: bool = field(default=False, init=False)
    """Whether an answer was one of several that could have led elsewhere."""
    ways: bool = field(default=False, init=False)
    """Whether another tool could have been called first."""
    offered: set[tuple[str, str]] = field(default_factory=set, init=False)
    """Role and name of the tools that calls had."""
    _again: set[tuple[str, str, str]] = field(default_factory=set, init=False)
    _made: Counter[tuple[str, str, str]] = field(default_factory=Counter, init=False)
    """How often a role of an episode was answered with a tool (by its name after `_TOOL`), with JSON, or with text."""

    @property
    def called(self) -> set[tuple[str, str]]:
        """Role and name of the tools that answers called."""
        return {(role, what.removeprefix(_TOOL)) for _, role, what in self._made if what.startswith(_TOOL)}

    async def respond(self, call: LiveCall) -> Answer:
        """Made-up candidates with the rewards of the role's scorer."""
        self._bound(call)
        if self.meeting is not None and self.calls.total() == 1:
            with contextlib.suppress(threading.BrokenBarrierError):
                await asyncio.to_thread(self.meeting.wait, 1.0)  # the other may run in another event loop
        made = _Made(self, call)
        provided = call.role in self.provider_roles
        if provided:
            call.unsupported_reason = ""
        inner = PolicyResponder(
            cast(Sampler, made),
            made,
            {call.role: PolicyRef("stub")},
            plan=None if provided else self.plan,
            scorers={} if provided else self.scorers,
            attribution=self.attribution,
            own=self.own,
            override=self.sampling,
        )
        answer = await inner.respond(call)
        assert answer is not None
        return msgspec.structs.replace(answer, policy=None, prompt_ids=()) if provided else answer

    def tool_for(self, call: LiveCall) -> Mapping[str, Any] | None:
        """The function that the answer calls: the first that this role has not called enough yet; None for a text.

        Where the application demands a call and none is left, the last one: frameworks put the tool that ends a loop
        there.
        """
        functions = {f["name"]: f for f in map(function_of, call.tools or ()) if f.get("name")}
        choice = call.params.get("tool_choice")
        forced = _forced(choice)
        self.offered |= {(call.role, name) for name in functions}
        if forced in functions:
            return functions[forced]
        if not self.manner.call_tools or not functions or choice == "none":
            return None
        again, lesson = _correction(call)
        key = call.episode.id, call.role, again
        if lesson and again in functions and key not in self._again:  # its result names valid values
            self._again.add(key)
            return functions[again]
        names = _names(call)
        ordered = list(functions.values())
        first = (self.variant + self.variant // len(ordered)) % len(ordered)  # out of step with what else rotates
        self.ways = self.ways or len(ordered) > 1
        for function in (*ordered[first:], *ordered[:first]):
            often = max(1, len(names_in(function, names)[1]))
            if self._made[call.episode.id, call.role, f"{_TOOL}{function['name']}"] < often:
                return function
        return ordered[-1] if forced is not None else None

    def turn(self, call: LiveCall, what: str) -> int:
        """How often this role was answered with `what` before, from where this stub begins."""
        key = call.episode.id, call.role, what
        self._made[key] += 1
        return self.variant + self._made[key] - 1

    def _bound(self, call: LiveCall) -> None:
        self.calls[call.episode.id] += 1
        count = self.calls[call.episode.id]
        if count > _STOPPED_AFTER * self.limit:
            raise asyncio.CancelledError(f"the application made {self.limit} calls {ENDLESS}")
        if count > self.limit:
            raise WorkflowError(
                f"The application made {self.limit} calls {ENDLESS}; the last one by {call.role!r}.",
                "Made-up answers may never say what ends its loop: pass a text that does (--answer), or raise --calls.",
            )


class _Made:
    """Sampler and chat format of one call: a candidate's token ids are the bytes of its message."""

    def __init__(self, stub: StubResponder, call: LiveCall) -> None:
        self._stub = stub
        self._call = call
        self._function = stub.tool_for(call)
        self.tool = None if self._function is None else str(self._function["name"])
        self._schema = _schema_of(call.params.get("response_format")) if self._function is None else None
        self._turn = stub.turn(call, self._asked())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        **_: Any,
    ) -> list[int]:
        return list(_bytes([messages, tools]))

    def images(self, messages: Sequence[Mapping[str, Any]]) -> tuple[bytes, ...]:
        return ()

    @property
    def image_tokens(self) -> tuple[int, ...]:
        return ()

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
        top = [tuple(((id, -1.0),) for id in ids) if params.top_logprobs else () for ids in drawn]
        return [Completion(ids, (-1.0,) * len(ids), "stop", only) for ids, only in zip(drawn, top, strict=True)]

    def token_bytes(self, token_ids: Sequence[int]) -> list[TokenBytes]:
        return [TokenBytes(bytes([id])) for id in token_ids]

    def parse(self, token_ids: Sequence[int], stop: Sequence[str] = (), **_: Any) -> tuple[str, dict[str, Any], str]:
        message = msgspec.json.decode(bytes(token_ids))
        return message["content"] or "", message, "tool_calls" if message.get("tool_calls") else "stop"

    def _asked(self) -> str:
        """The kind of answer; answers of one kind take turns."""
        if self.tool is not None:
            return f"{_TOOL}{self.tool}"
        return f"json {self._call.params['response_format']}" if self._schema is not None else "text"

    def _message(self, index: int) -> dict[str, Any]:
        if self._function is not None:
            arguments = _text(self._arguments(self._function, index))
            function = {"name": self.tool, "arguments": arguments}
            called = {"id": f"call_{self._call.id}_{index}", "type": "function", "function": function}
            return {"role": "assistant", "content": None, "tool_calls": [called]}
        return {"role": "assistant", "content": self._content(index)}

    def _arguments(self, function: Mapping[str, Any], index: int) -> dict[str, Any]:
        schema = function.get("parameters") or {"type": "object"}
        name, found = _correction(self._call)
        manner = self._stub.manner
        if found and name == self.tool:
            manner = msgspec.structs.replace(manner, instead={**manner.instead, **found})
        made = self._value(schema, index, manner, str(function.get("description") or "")) or {}
        parameter, names = names_in(function, _names(self._call))
        return {**made, parameter: names[(self._turn + index) % len(names)]} if parameter else made

    def _content(self, index: int) -> str:
        variant, stub, call = self._turn + index, self._stub, self._call
        if self._schema is not None:
            return _text(self._value(self._schema, index, stub.manner))
        if stub.answers:
            return stub.answers[(call.turn + index) % len(stub.answers)]
        asked = asked_json(call.messages, variant, _names(call), stub.manner)
        if asked is not None:
            stub.branched = True
            return asked
        if isinstance(call.params.get("response_format"), Mapping):
            return stub.manner.put("{}", variant, plain=True)
        if stub.manner.form and (shown := form_shown(prompt_text(call.messages))):
            return shown
        words = call.episode.parts.words if call.episode.parts else ()
        offered = choices_of(call.messages, _names(call), words)
        choices = offered if offered and stub.manner.form else ["", *offered]
        stub.branched = stub.branched or len(choices) > 1
        made = f"stub answer {index + 1}"
        told = stub.manner.put(made, variant, plain=True)
        return told if told != made else choices[variant % len(choices)] or made

    def _value(self, schema: Mapping[str, Any], index: int, manner: Manner, about: str = "") -> Any:
        """One of the given answers that fits a schema, else a made-up one."""
        variant, answers = self._turn + index, self._stub.answers
        given = [value for answer in answers if isinstance(value := json_or_none(answer), dict) and fits(schema, value)]
        if given:
            return given[variant % len(given)]
        names = listed(prompt_text(self._call.messages), _names(self._call))
        same_texts = [example(schema, variant + i, ["a"]) for i in range(2)]
        self._stub.branched = self._stub.branched or same_texts[0] != same_texts[1] or len(names) > 1
        return example(schema, variant, answers, names, manner=manner, about=about)


def _correction(call: LiveCall) -> tuple[str, dict[str, list[str]]]:
    """The tool whose result is the last message, and what to say in place of what, so far as that result tells."""
    if len(call.messages) < 2 or call.messages[-1].get("role") != "tool":
        return "", {}
    id = call.messages[-1].get("tool_call_id")
    asked = (one for message in reversed(call.messages[-8:]) for one in message.get("tool_calls") or ())
    function = next((one.get("function") or {} for one in asked if one.get("id") == id), {})
    arguments = json_or_none(str(function.get("arguments")))
    if not isinstance(arguments, dict):
        return "", {}
    texts = [value for value in arguments.values() if isinstance(value, str)]
    return str(function.get("name")), lessons(prompt_text(call.messages[-1:]), texts)


def _names(call: LiveCall) -> list[str]:
    """How the application's parts are called."""
    return [part.name for part in call.episode.parts.known] if call.episode.parts else []


def _schema_of(asked: Any) -> Mapping[str, Any] | None:
    """The schema of a response format; None where it has none."""
    if not isinstance(asked, Mapping) or asked.get("type") != "json_schema":
        return None
    return (asked.get("json_schema") or {}).get("schema") or {"type": "object"}


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
