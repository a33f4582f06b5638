"""Episodes run to their end, with a sink that is a list and responders made of a function."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

from cotune.episodes.episode import Outcome, run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord, Candidate, PolicyRef, Record, Task, Usage

POLICY = PolicyRef("p", 3)


class Sink(list[Record]):
    def write(self, records: list[Record]) -> None:
        self.extend(records)

    def calls(self) -> list[CallRecord]:
        return sorted((r for r in self if isinstance(r, CallRecord)), key=lambda call: call.step)


class Responder:
    """Answers with what `reply(call)` returns, or raises: a text, a message, an Answer, None; sync or async."""

    def __init__(self, reply: Callable[[LiveCall], Any]) -> None:
        self.reply = reply
        self.calls: list[LiveCall] = []

    async def respond(self, call: LiveCall) -> Answer | None:
        self.calls.append(call)
        value = self.reply(call)
        if inspect.isawaitable(value):
            value = await value
        return value if value is None or isinstance(value, Answer) else answer(value)


def answer(*said: str | dict[str, Any], chosen: int = 0) -> Answer:
    return Answer(
        candidates=tuple(candidate(i, text) for i, text in enumerate(said)),
        chosen=chosen,
        prompt_ids=(5, 6, 7),
        policy=POLICY,
        usage=Usage(3, 2 * len(said)),
    )


def candidate(index: int, said: str | dict[str, Any]) -> Candidate:
    message = said if isinstance(said, dict) else {"role": "assistant", "content": said}
    return Candidate(
        index=index,
        text=str(message.get("content") or ""),
        message=message,
        token_ids=(10 + index, 2),
        logprobs=(-0.5, -0.25),
        finish_reason="tool_calls" if message.get("tool_calls") else "stop",
    )


def tool_call(name: str, arguments: dict[str, Any], call_id: str = "call_1") -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"id": call_id, "type": "function", "function": function}


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


async def episode(fn: Any, reply: Callable[[LiveCall], Any] | None = None, sink: Sink | None = None) -> Outcome:
    """Run a function (or a graph's workflow) as an episode of the task {"q": 1}."""
    made = fn if hasattr(fn, "cotune") else workflow(fn)
    return await run_episode(
        workflow_of(made),
        Task(id="t", input={"q": 1}),
        sink=Sink() if sink is None else sink,
        responder=Responder(reply) if reply else None,
    )


class Recorded:
    """Runs episodes and keeps what they recorded."""

    def __init__(self) -> None:
        self.sink = Sink()

    def __call__(self, fn: Any, reply: Callable[[LiveCall], Any] | None = None) -> Outcome:
        """Run one episode to its end and require that it ended well."""
        outcome = self.any(fn, reply)
        if outcome.error is not None:
            raise outcome.error
        return outcome

    def any(self, fn: Any, reply: Callable[[LiveCall], Any] | None = None) -> Outcome:
        """Run one episode, however it ends."""
        return asyncio.run(episode(fn, reply, self.sink))

    @property
    def calls(self) -> list[CallRecord]:
        return self.sink.calls()

    @property
    def roles(self) -> list[str]:
        return [call.role for call in self.calls]

    @property
    def statuses(self) -> list[str]:
        return [call.status for call in self.calls]
