"""The calls of a recorded episode in a form in which they can be answered again. A script can be sent between
processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.recording.chance import Read, stored_reads
from cotune.recording.tape import RecordedResult
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store


class ScriptCall(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call: its request, its answer, and the times of its start and end (seconds since the epoch).

    `messages` and `tools` are ids of bodies in the script. `fault` is the reason if the answer cannot be used again,
    else empty.
    """

    id: str
    role: str
    step: int
    turn: int
    model: str
    params: dict[str, Any]
    messages: tuple[str, ...]
    tools: str | None
    started: float
    ended: float
    answer: Answer
    fault: str = ""
    prompts: str = ""
    """Id of the prompts that edited its role."""


class Script(msgspec.Struct, frozen=True):
    """A recorded episode: its calls in step order, the bodies of their messages and tools by id, the results of its
    tools, its start (seconds since the epoch), the values of clock, uuid and random if they were recorded (`reads`),
    and the LangGraph threads of its calls."""

    episode: str
    calls: tuple[ScriptCall, ...]
    bodies: Mapping[str, Any]
    results: tuple[RecordedResult, ...] = ()
    started: float = 0.0
    reads: tuple[Read, ...] = ()
    threads: tuple[str, ...] = ()

    def messages_and_tools(self, call: ScriptCall) -> tuple[list[Any], Any]:
        """Messages and tools of a call."""
        messages = [self.bodies[id] for id in call.messages]
        tools = self.bodies[call.tools] if call.tools else None
        return messages, tools

    def unaffected_calls(self, fork: str) -> set[str]:
        """Ids of the calls that began before the call `fork` ended: its answer cannot have changed them."""
        ended = next(call.ended for call in self.calls if call.id == fork)
        return {call.id for call in self.calls if call.started < ended and call.id != fork}


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode repeats another one: calls before `fork` are answered from the script. The call `fork` gets the
    new `answer`, or without one is answered like a new call. Without a fork, all calls are answered from the script.
    The calls in `parallel`, which ran at the same time as the fork, are answered like new calls too."""

    script: Script
    fork: str = ""
    parallel: tuple[str, ...] = ()
    answer: Answer | None = None

    @property
    def until(self) -> float:
        """The time when the recorded call at the fork ended. Its answer cannot have changed anything that began
        before."""
        return next((call.ended for call in self.script.calls if call.id == self.fork), math.inf)


def read_script(store: Store, episode: str) -> Script:
    """Read everything that a replay of an episode needs: its requests and answers, results of tools, times and random
    values.

    Raises RecordError if the episode is unknown or records are missing.
    """
    bodies: dict[str, Any] = {}
    calls = store.calls(episode)
    if not calls:
        raise RecordError(f"Episode {episode!r} has no recorded call.", "See the episodes with: cotune show.")
    for call in calls:
        body_ids = list(call.messages)
        if call.tools:
            body_ids.append(call.tools)
        for id in body_ids:
            if id not in bodies:
                bodies[id] = store.message(id)
    episode_record = store.episode(episode)
    results: list[RecordedResult] = []
    for result in episode_record.results:
        value = store.message(result.value)["result"]
        results.append(RecordedResult(result.name, result.arguments, result.started, value))
    return Script(
        episode=episode,
        calls=tuple(_script_call(store, call) for call in calls),
        bodies=bodies,
        results=tuple(results),
        started=episode_record.started,
        reads=stored_reads(store.message(episode_record.chance)) if episode_record.chance else (),
        threads=episode_record.threads,
    )


def _script_call(store: Store, call: CallRecord) -> ScriptCall:
    """A recorded call with its grammar and the token ids of its prompt, to be answered without the store."""
    sampling = dict(call.sampling)
    if grammar := sampling.get("grammar"):
        sampling["grammar"] = store.message(grammar)
    return ScriptCall(
        id=call.id,
        role=call.role,
        step=call.step,
        turn=call.turn,
        model=call.model,
        params=call.params,
        messages=call.messages,
        tools=call.tools,
        prompts=call.prompts,
        started=call.started,
        ended=call.started + call.latency,
        answer=Answer(
            candidates=call.candidates,
            chosen=call.chosen or 0,
            prompt_ids=() if call.prompt is None else store.token_ids(call.prompt),
            policy=call.policy,
            usage=call.usage,
            sampling=sampling,
            replayed=call.id,
        ),
        fault=_fault(call),
    )


def _fault(call: CallRecord) -> str:
    """The reason why the answer of a call cannot be used again; empty if it can."""
    if call.redacted:
        return "a redactor changed what was stored of it"
    if call.status != "ok" or not call.candidates:
        return f"it had no answer ({call.error or call.status})"
    return ""
