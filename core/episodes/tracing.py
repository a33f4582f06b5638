"""Tracing: record the LLM calls of any code, without a workflow, in memory or in a records file."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import Token
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypedDict, Unpack

import msgspec

from cotune.collect.open_sink import is_collector, open_collector
from cotune.collect.sink import Collector, CollectorRecords, Rates, check_rates
from cotune.episodes.later_feedback import check_key
from cotune.episodes.trace_sinks import FileRecords, MemoryRecords, TraceSink
from cotune.errors import ConfigError, RecordError, WorkflowError, error_text
from cotune.near_names import check_arguments
from cotune.prompts.edits import Prompts
from cotune.prompts.file import read_prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.carrying import carry_context
from cotune.recording.context import current_episode
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.recording.redaction import Redactor, check_redactor
from cotune.recording.rewards import reward_records
from cotune.recording.roles import RolesFunction, roles_function
from cotune.records.structs import CallRecord, CallStatus, Task
from cotune.records.tasks import task_of
from cotune.sampling.scoring import Feedback, components, split_feedback
from cotune.storage.protocol import Store

_ENDED = (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit)


class TracedCall(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded call. `messages` are the application's own, after redactors; `sent` are the messages with edited
    prompts (without edits the same). `answer` is the assistant message that the application got, None without one."""

    id: str
    role: str
    step: int
    turn: int
    status: CallStatus
    error: str | None
    attempts: tuple[str, ...]
    model: str
    params: Mapping[str, Any]
    messages: list[Any]
    sent: list[Any]
    tools: Any
    answer: dict[str, Any] | None
    parents: tuple[str, ...]
    streamed: bool
    latency: float
    record: CallRecord
    """The whole record, with all candidates."""

    @property
    def text(self) -> str:
        """The text of the answer; empty without an answer."""
        chosen = self.record.chosen
        return "" if chosen is None else self.record.candidates[chosen].text


class RecordingOptions(TypedDict, total=False):
    """How a trace stores its calls: keyword arguments of `cotune.trace`."""

    app: str
    sample: Rates
    durable: bool
    redactor: Redactor | None


class Recording:
    """The destination of a trace's calls: memory, a records file, or a collector."""

    def __init__(
        self,
        address: str | Path | None,
        *,
        app: str = "",
        sample: Rates | None = None,
        durable: bool = False,
        redactor: Redactor | None = None,
    ) -> None:
        """`address` is a records file or a collector's address (default: COTUNE_COLLECTOR; without it, memory). `Trace`
        explains the other arguments."""
        if address is None:
            address = os.environ.get("COTUNE_COLLECTOR") or None
        self._address = address
        self._collector: Collector | None = None
        if isinstance(address, str) and is_collector(address):
            self._collector = open_collector(address, app)
        if self._collector is None and sample is not None:
            raise ConfigError("sample", sample, "needs a collector", "Leave it out, or trace to its address.")
        self._sample = check_rates(1.0 if sample is None else sample)
        self._durable = durable
        self.app = "" if self._collector is not None else app
        """The application of the episodes; empty for a collector, which adds the name itself."""
        self.redactors = () if redactor is None else (check_redactor(redactor),)

    def open_sink(self) -> TraceSink:
        """Open the destination of the calls."""
        if self._collector is not None:
            return CollectorRecords(self._collector, self._sample)
        return MemoryRecords() if self._address is None else FileRecords(self._address, self._durable)


class Trace:
    """Records every LLM call made inside a `with` or `async with` block, in any thread or task that it starts.

    With a `path`, it adds the calls to that records file (or to `records.db` in that folder); without one it keeps them
    in memory. A process that is killed loses the calls of its last moment. With `durable=True`, an answer reaches the
    application only after its call is committed, which takes some milliseconds.

    `path` may be the address of a collector (`cotune collect`), such as "https://collector:4319". Without a path,
    COTUNE_COLLECTOR is used if it is set. `app` names the application (default: COTUNE_APP), and COTUNE_TOKEN is the
    token. `sample` is the share of episodes to keep, or a share for each role. A call is on the disk when the
    application gets its answer, and reaches the collector within seconds, or as soon as the collector can be reached.

    `key` is the application's own name for this piece of work, such as an order number: `cotune.feedback` finds the
    episode by it. `task` is a text, or any JSON value as in a tasks file. Inside an episode, calls still belong to that
    episode, and are recorded here as well. `roles` names the role of each call: a function of a CallRequest, or
    `"caller"` for the name of your function that makes the call. `prompts` is a file of edited prompts, which the calls
    are sent with. `redactor` changes messages before they are recorded.

    Raises RunError or ConfigError for a file that cannot be used, WorkflowError unless `roles` is a roles function, and
    for prompts inside an episode that has its own.
    """

    def __init__(
        self,
        path: str | Path | None = None,
        *,
        task: Any = None,
        name: str = "trace",
        key: str = "",
        roles: RolesFunction | str | None = None,
        prompts: Prompts | str | Path | None = None,
        **recording: Unpack[RecordingOptions],
    ) -> None:
        """Check the arguments, which the class explains. Only a collector is opened before the block begins."""
        check_arguments(recording, RecordingOptions.__annotations__)
        self._recording = Recording(path, **recording)
        self._key = check_key(key)
        self.name = name
        self.task = task_of(task, name)
        self._roles = roles_function(roles)
        self._prompts = prompts if prompts is None or isinstance(prompts, Prompts) else read_prompts(prompts)
        self._sink: TraceSink | None = None
        self._live: LiveEpisode | None = None
        self._token: Token[LiveEpisode | None]

    @property
    def id(self) -> str:
        """Id of the episode in the records."""
        return self._episode().id

    @property
    def calls(self) -> list[TracedCall]:
        """The calls that have ended so far, in the order of their start."""
        with self._reading() as records:
            return [_traced_call(call, records) for call in records.calls(self.id)]

    @property
    def rewards(self) -> Mapping[str, float]:
        """The rewards of the episode so far, by name."""
        with self._reading() as records:
            return records.rewards([self.id]).get(self.id, {})

    @property
    def feedback(self) -> Mapping[str, str]:
        """The texts given with the rewards, by the name of the reward."""
        with self._reading() as records:
            return records.feedback([self.id]).get(self.id, {})

    @property
    def warnings(self) -> Mapping[str, int]:
        """The number of warnings by kind: things that could not be recorded, or not exactly."""
        return dict(self._episode().warnings)

    def reward(self, value: float | Feedback | None = None, /, **named: float) -> None:
        """Give the episode a reward, inside the block or after it: a number (`team`) or named numbers. Use
        `cotune.Feedback` to add a text.

        If a name is repeated, the last reward counts. Raises WorkflowError unless each is a finite number.
        """
        source = "The reward of a trace"
        sink = self._sink
        live = self._episode()
        value, text = split_feedback(value, source)
        rewards: dict[str, Any] = {}
        if isinstance(value, Mapping):
            rewards.update(value)
        elif value is not None:
            rewards["team"] = value
        rewards.update(named)
        assert sink is not None
        sink.write(reward_records(live.id, components(rewards, source), text, redaction=live.redaction))

    def __enter__(self) -> Self:
        """Begin the episode. Inside another episode it records copies of the calls of that episode (`Within`)."""
        if self._live is not None:
            raise WorkflowError("This trace has been used.", "Create another one: with cotune.trace(...) as t.")
        outer = current_episode.get()
        # Before the sink is opened: after an error here, nobody would close it.
        if self._prompts is not None and outer is not None and outer.prompting is not None:
            remedy = "Remove prompts= here, or from the code that runs the episode."
            raise WorkflowError("This trace has prompts, and so has the episode around it.", remedy)
        for activate in hooks.activators:
            activate()
        # Texts that the outer episode hides must not be stored here either.
        redactors: list[Redactor] = []
        if outer is not None and outer.redaction is not None:
            redactors += outer.redaction.redactors
        redactors += self._recording.redactors
        options: dict[str, Any] = {
            "workflow": self.name,
            "app": self._recording.app,
            "key": self._key,
            "redactors": tuple(redactors),
            "prompts": self._prompts,
        }
        self._sink = self._recording.open_sink()
        if outer is None:
            self._live = LiveEpisode(self._sink, self.task, roles=self._roles, **options)
        else:
            self._live = Within(outer, self._sink, self.task, roles=self._roles or outer.roles, **options)
        # A roles function may ask which functions started the task that makes a call.
        carry_context(remember_starters=self._live.roles is not None)
        self._token = current_episode.set(self._live)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the episode and close its destination. The status of the episode depends on the exception that leaves the
        block: "ok" without one, "cancelled" for a cancellation or Ctrl-C, else "error"."""
        live = self._episode()
        with contextlib.suppress(ValueError):  # raised if the block was entered in another context
            current_episode.reset(self._token)
        if error is None:
            live.end("ok")
        elif isinstance(error, _ENDED):
            live.end("cancelled", error=type(error).__name__)
        else:
            live.end("error", error=error_text(error))
        assert self._sink is not None
        self._sink.close()

    async def __aenter__(self) -> Self:
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, traceback)

    def _reading(self) -> AbstractContextManager[MemoryRecords | Store]:
        """The records so far, open for reading. Raises RecordError before the block."""
        self._episode()
        assert self._sink is not None
        return self._sink.reading()

    def _episode(self) -> LiveEpisode:
        """The episode of the trace. Raises RecordError before the block."""
        if self._live is None:
            raise RecordError("The trace has not begun.", "Use it as a block: with cotune.trace(...) as t.")
        return self._live


trace = Trace
"""Opens a `Trace`, which records every LLM call made inside a `with` or `async with` block:

```python
with cotune.trace("records.db", task={"question": "2 + 2"}) as t:
    graph.invoke({"question": "2 + 2"})
    t.reward(1.0)

for call in t.calls:
    print(call.role, call.turn, call.status, call.answer)
```
"""


class Within(LiveEpisode):
    """An episode inside another one: calls belong to the outer episode, and copies of them are recorded here too."""

    def __init__(self, outer: LiveEpisode, sink: Any, task: Task, **options: Any) -> None:
        """`outer` is the episode around this one. Its provider or responder answers the calls."""
        super().__init__(
            sink,
            task,
            responder=outer.responder,
            loop=outer.loop,
            offline=outer.offline,
            fixed_embeddings=outer.fixed_embeddings,
            **options,
        )
        self.outer = outer
        # Shared, because integrations note facts about calls, and the outer episode makes them.
        self.notes = outer.notes
        self._prompting_of_trace = self.prompting
        if self.prompting is None:
            self.prompting = outer.prompting

    def start(self, caller: CallerContext, body: Mapping[str, Any]) -> LiveCall:
        """Start a call in the outer episode, and return it. A copy of it starts in this episode, and ends together with
        it."""
        call = self.outer.start(caller, body)
        role_in_prompts = call.role
        try:
            copy = super().start(caller, body)
        except RecordError:
            pass  # a call after the end of the block belongs only to the outer episode
        else:
            call.copies = (*call.copies, copy)
            role_in_prompts = copy.role  # this episode's own roles function may give the call another role
        # The outer episode's call is sent, so the prompts of this trace must edit that one.
        if self._prompting_of_trace is not None:
            self._prompting_of_trace.edit(call, body, self.warn, role_in_prompts)
        return call

    def edit(self, call: LiveCall, body: Mapping[str, Any]) -> None:
        """Do nothing: a copy takes over the edits of the outer episode's call at its end."""

    def warn(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Count the warning in both episodes."""
        super().warn(kind, message, error)
        self.outer.warn(kind, message, error)


_SHARED_FIELDS = (
    "id", "role", "step", "turn", "status", "error", "attempts", "model", "params", "parents", "streamed", "latency",
)  # fmt: skip
"""Fields of a record that a traced call has too."""


def _traced_call(call: CallRecord, records: MemoryRecords | Store) -> TracedCall:
    """The call with its messages and tools read from `records`."""
    return TracedCall(
        **{name: getattr(call, name) for name in _SHARED_FIELDS},
        messages=[records.message(name) for name in call.messages],
        sent=[records.message(name) for name in call.messages_out],
        tools=records.message(call.tools) if call.tools else None,
        answer=None if call.chosen is None else call.candidates[call.chosen].message,
        record=call,
    )
