"""The calls of a recorded episode as they can be answered again: read from the store, sent between processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from cotune.errors import RecordError
from cotune.recording.chance import Read, stored_reads
from cotune.recording.tape import Given
from cotune.records.answers import Answer
from cotune.records.structs import CallRecord
from cotune.storage.protocol import Store


class ScriptCall(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call: its request, its answer, and when it started and ended (seconds since the epoch).

    `messages` and `tools` are ids of bodies in the script. `fault` says why the answer cannot be given again; else "".
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
    """Id of the prompts that its role was edited by."""


class Script(msgspec.Struct, frozen=True):
    """The calls of a recorded episode in step order, the bodies of their messages and tools by id, what its tools
    returned, when it started (seconds since the epoch), what clock, uuid and random gave, where that is kept, and the
    LangGraph threads in which its calls were made."""

    episode: str
    calls: tuple[ScriptCall, ...]
    bodies: Mapping[str, Any]
    results: tuple[Given, ...] = ()
    started: float = 0.0
    reads: tuple[Read, ...] = ()
    threads: tuple[str, ...] = ()

    def asked(self, call: ScriptCall) -> tuple[list[Any], Any]:
        """Messages and tools of a call."""
        return [self.bodies[id] for id in call.messages], self.bodies[call.tools] if call.tools else None

    def before(self, fork: str) -> set[str]:
        """Ids of the calls that no answer to the call `fork` can have changed: those that began before it ended."""
        ended = next(call.ended for call in self.calls if call.id == fork)
        return {call.id for call in self.calls if call.started < ended and call.id != fork}


class Replay(msgspec.Struct, frozen=True, kw_only=True):
    """How an episode repeats another: from the script up to the call `fork`, where `answer`, or else whoever answers
    new calls, says something new. Without a fork all of it is from the script."""

    script: Script
    fork: str = ""
    answer: Answer | None = None

    @property
    def until(self) -> float:
        """When the recorded call at the fork ended: its answer cannot have changed anything that began before."""
        return next((call.ended for call in self.script.calls if call.id == self.fork), math.inf)


def read_script(store: Store, episode: str) -> Script:
    """The script of a recorded episode. Raises RecordError for one that is unknown or lacks records."""
    bodies: dict[str, Any] = {}
    calls = store.calls(episode)
    if not calls:
        raise RecordError(f"Episode {episode!r} has no recorded call.", "See the episodes with: cotune show.")
    for call in calls:
        for id in (*call.messages, *([call.tools] if call.tools else [])):
            if id not in bodies:
                bodies[id] = store.message(id)
    ended = store.episode(episode)
    return Script(
        episode,
        tuple(_script_call(store, call) for call in calls),
        bodies,
        tuple(Given(r.name, r.arguments, r.started, store.message(r.value)["result"]) for r in ended.results),
        ended.started,
        stored_reads(store.message(ended.chance)) if ended.chance else (),
        ended.threads,
    )


def _script_call(store: Store, call: CallRecord) -> ScriptCall:
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
    if call.redacted:
        return "a redactor changed what was stored of it"
    if call.status != "ok" or not call.candidates:
        return f"it had no answer ({call.error or call.status})"
    return ""
