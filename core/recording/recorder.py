"""The recorder: turns the calls of an application into records, while it runs.

    LiveEpisode: one run of the application        -> Episode, RewardRecord (team)
      LiveCall: one call, by step, role and turn   -> CallRecord
        CallerContext: who calls, and what it read -> role, parents
        messages, tools                            -> Message, each once per episode
        Answer: all candidates, one chosen         -> Candidate, RewardRecord
          prompt_ids                               -> Segment: only what no earlier prompt of the role has
      Tape: results of tools; Chance: clock, uuid  -> Message, ToolResult

A call starts under the episode's lock, which numbers it, and ends once: then its records go to the sink in one write.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NoReturn, Protocol

from msgspec.structs import replace

from cotune.errors import CotuneError, RecordError, TooManyCalls, WorkflowError
from cotune.prompts.edits import Prompts
from cotune.recording.app_parts import Parts
from cotune.recording.call_records import CallerContext, CallRecords, PendingCall, SentMessage
from cotune.recording.chance import MOST_VALUES, Chance
from cotune.recording.edits import Prompting
from cotune.recording.redaction import Redaction, Redactor
from cotune.recording.rewards import reward_records
from cotune.recording.roles import RolesFunction, context_of_role, warn_of_shared
from cotune.recording.tape import Tape, tool_at_work
from cotune.records.answers import Answer, well_formed
from cotune.records.failure_cause import FailureCause
from cotune.records.ids import new_id
from cotune.records.structs import (
    CallRecord,
    CallStatus,
    Episode,
    EpisodeStatus,
    FeedbackRecord,
    Fork,
    Record,
    RewardRecord,
    Task,
)
from cotune.runtime.forks import survives_fork
from cotune.runtime.warn_once import warn_once

log = logging.getLogger("cotune")
INTERRUPTED = "The episode was stopped, by Ctrl-C or its time-out: this call is not answered."
_PATIENCE = 10
"""Number of refused calls after which cotune assumes that the application ignores errors."""


class Responder(Protocol):
    """Answers calls instead of the application's own provider."""

    async def respond(self, call: LiveCall) -> Answer | None:
        """Answer a call, or return None to let the application's own provider answer."""
        ...


class Sink(Protocol):
    """Takes the records of the recorder. Every `Store` is a sink."""

    def write(self, records: Sequence[Record]) -> None: ...


class TurnCounter:
    """Numbers the calls of an episode from 0: `step` counts all calls, `turn` the calls of one role."""

    def __init__(self) -> None:
        self.steps = 0
        self._turns: dict[str, int] = {}

    def count_call(self, role: str) -> tuple[int, int]:
        """The step and turn of a call that starts now."""
        step = self.steps
        turn = self._turns.get(role, 0)
        self.steps = step + 1
        self._turns[role] = turn + 1
        return step, turn


class LiveCall(PendingCall):
    """A call that has not ended; scorers see it as `call`. It ends once, by `finish` or `fail`."""

    __slots__ = (
        "cancel", "copies", "ended", "episode", "on_wire", "outage", "stage", "state", "task", "unsupported_reason",
    )  # fmt: skip

    def __init__(
        self, episode: LiveEpisode, caller: CallerContext, step: int, turn: int, body: Mapping[str, Any]
    ) -> None:
        """`body` is a chat request in OpenAI form; `episode` numbers the call with `step` and `turn`."""
        super().__init__(episode.id, caller, step, turn, body)
        self.started = episode.time_at(self.began)
        self.episode = episode
        self.task = episode.task
        self.state = caller.state
        """Input state of the node that makes the call (LangGraph), or `AgentState`, or `CrewState`; else None."""
        self.copies: tuple[LiveCall, ...] = ()
        """The same call in episodes inside this one (`cotune.trace`); they end with it."""
        self.ended = False
        self.outage = False
        """Whether the infrastructure failed the call."""
        self.on_wire = False
        """Whether a wire request has been sent for the call."""
        self.unsupported_reason = ""
        """The part of the request that no policy supports, so that only the application's own provider can answer it;
        else empty."""
        self.stage = "no answer yet"
        """The progress of the call, as a phrase for error messages."""
        self.cancel: Callable[[], object] | None = None
        """Stops the work on an answer when the episode ends first. Set by `cancel_by`."""

    def read(self, body: Mapping[str, Any]) -> None:
        """Take messages, tools and parameters from the body of a chat request in OpenAI form."""
        self._take(body)
        self.episode._records.link(self)

    def cancel_by(self, cancel: Callable[[], object]) -> None:
        """Set the function that ends the work on the answer when the episode is stopped. It must be safe from any
        thread. If the episode has been stopped since the call started, it is called at once.
        """
        with self.episode._lock:
            self.cancel = cancel
            is_stopped = self in self.episode._stopped
        if is_stopped:
            cancel()

    def earlier(self) -> list[bytes]:
        """Packed token paths of this role's earlier calls, longest first; empty if the messages contain no reply."""
        for message in self.messages:
            if message.get("role") == "assistant":
                return self.episode._records.paths(self.role)
        return []

    def finish(self, answer: Answer) -> None:
        """Record the call with all its candidates and rewards. Ignored if the call has already ended."""
        self.episode._end(self, answer, "ok", answer.error)

    def fail(self, status: CallStatus, error: str, part: Answer | None = None, *, outage: bool = True) -> None:
        """Record the call as failed. Its episode continues unless the application stops.

        `part` is the answer so far: it is recorded and never trained on. `outage` is whether the infrastructure failed
        the call; it is ignored if the application cancelled the call.
        """
        self.episode._end(self, part, status, error, outage=outage and status != "cancelled")

    def ends_like(self, call: LiveCall, answer: Answer | None, status: CallStatus, error: str | None) -> None:
        """End this call, a copy of `call` in an inner episode, in the same way, with the messages and parameters that
        `call` has now."""
        self.messages = call.messages
        self.tools = call.tools
        self.model = call.model
        self.params = call.params
        self.streamed = call.streamed
        self.attempts = call.attempts
        self.sent = list(map(SentMessage, call.messages))
        self.prompts = call.prompts
        self.unedited = call.unedited
        self.rewritten = call.rewritten
        self.episode._end(self, answer, status, error)


@dataclass(eq=False, repr=False)
class LiveEpisode:
    """An episode in progress. Numbers calls under a lock; safe from any thread."""

    sink: Sink
    task: Task
    _: KW_ONLY
    workflow: str
    responder: Responder | None = None
    loop: asyncio.AbstractEventLoop | None = None
    """The event loop that runs `responder.respond` when the application calls from a thread without a loop."""
    phase: str = "trace"
    training_step: int | None = None
    rollout: int = 0
    offline: bool = False
    """Whether a call that the responder does not answer is refused, instead of being sent to the application's
    provider."""
    fixed_embeddings: bool = False  # see `EpisodeOptions`
    redactors: Sequence[Redactor] = ()
    keep_token_ids: bool = False
    parts: Parts | None = None
    """Collects the parts of the application from integrations; None if they are not needed."""
    roles: RolesFunction | None = None
    """Names the roles of calls that `cotune.role` does not name."""
    prompts: Prompts | None = None
    """Edits the prompts of its calls."""
    app: str = ""
    """Name of the deployed application."""
    key: str = ""
    """The application's own name for this episode."""
    max_calls: int | None = None
    """Maximum number of calls. A further call fails the episode."""

    def __post_init__(self) -> None:
        """Begin the episode: give it an id, and set up its locks, its counters and its redaction."""
        self.id = new_id()
        self.started = time.time()
        self._began = time.monotonic()
        self.failures: dict[str, int] = {}
        """Number of failed calls by status, including calls whose error the application swallowed."""
        self.warnings: dict[str, int] = {}
        """Number of warnings of the recorder by kind. Each kind is logged once per process."""
        self.explained: dict[str, str] = {}
        """The first message of each kind of warning."""
        self.fatal: CotuneError | None = None
        """An error that must fail the episode even when the application swallows it."""
        self._refused_calls = 0
        """Number of calls beyond `max_calls`."""
        self.stop_soon: Callable[[], object] = lambda: None
        """Ends the workflow, which may continue to call in spite of errors. Safe from any thread."""
        self.outage = False
        """Whether the infrastructure failed the last call that ended: then it is blamed for a failure of the
        episode."""
        self.outages: list[BaseException] = []
        """The errors in the application from calls that the infrastructure failed."""
        self.notes: dict[str, Any] = {}
        """Working state of integrations, by integration, for the time of the episode."""
        self.tape = Tape()
        self.chance: Chance | None = None
        """The values of clock, uuid and random, if they are recorded."""
        self.fork: Fork | None = None
        """The point at which this episode differs from the episode that it repeats, once it has reached it."""
        self.ended = False
        # Reentrant: the garbage collector may close a half-read stream, and so end a call, at any point.
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._ending = 0
        self._turns = TurnCounter()
        self._threads: set[str] = set()
        self._open: dict[str, LiveCall] = {}
        self._stopped: list[LiveCall] = []
        self.interrupted = False
        """Whether the episode was stopped, by Ctrl-C or its time-out. Then its further errors are ignored."""
        self.redaction = Redaction(self.redactors, self.keep_token_ids, self.warn) if self.redactors else None
        """Changes records before they are stored. Scorers, responders and the application see the original values."""
        self._records = CallRecords(self.redaction, self._lock, self.warn)
        self.prompting: Prompting | None = None
        """Edits calls when they start; None without edits."""
        if self.prompts is not None:
            prompting = Prompting(self.prompts)
            if prompting.id:  # empty if the prompts edit nothing
                self.prompting = prompting
        self.gateway = ""
        """Address at which a child process reaches this episode, while `cotune.gateway()` is open."""
        self.forked = False
        """Whether this is a copy in a child process that the application forked. It cannot record anything."""
        survives_fork(self)

    def now(self) -> float:
        """Seconds since the epoch by the episode's own clock, which never steps back.

        The clock of the computer may step back: NTP sets it, and a virtual machine when it resumes.
        """
        return self.time_at(time.monotonic())

    def time_at(self, monotonic: float) -> float:
        """Seconds since the epoch, by the episode's own clock, at a reading of `time.monotonic`."""
        return self.started + (monotonic - self._began)

    def start(self, caller: CallerContext, body: Mapping[str, Any]) -> LiveCall:
        """Open a call of `caller` with the chat request `body`, and give it its step and turn. Raises RecordError if
        the episode has ended, or has made `max_calls` calls.

        An error of the roles function fails the episode, not the call: the application still gets an answer.
        """
        # 1. The role.
        if self.roles is not None:
            module_of_function = self.notes.setdefault("callers", {})
            try:
                caller = context_of_role(self.roles, caller, body, module_of_function, self.warn)
            except WorkflowError as error:
                self.fatal = self.fatal or error
                text = f"A call keeps the role {caller.role!r}: the roles function failed."
                self.warn("unidentified_call", text, error.__cause__)
        if caller.nameless is not None:
            first_agent_of_role = self.notes.setdefault("nameless", {})
            warn_of_shared(caller, first_agent_of_role, self.warn)

        # 2. The call.
        with self._lock:
            self._require_in_progress()
            if self.max_calls is not None and self._turns.steps >= self.max_calls:
                self._refuse_further_call(self.max_calls)
            step, turn = self._turns.count_call(caller.role)
            call = LiveCall(self, caller, step, turn, body)
            self._open[call.id] = call
            caller.calls += 1
            if (tool := tool_at_work.get().use) is not None:
                tool.calls += 1
            if caller.thread is not None:
                self._threads.add(caller.thread)
            self._records.link(call)  # under the lock: this call cannot have read calls that end later

        # 3. The edits of its prompts.
        if self.prompting is not None:
            self.edit(call, body)
        return call

    def _require_in_progress(self) -> None:
        """Raise RecordError if the episode takes no further calls."""
        if self.forked:
            raise RecordError(
                "The call was made in a child process that the application forked, where no run reaches it.",
                "Make it in a thread, or let the child call the address that `with cotune.gateway()` gives.",
            )
        if self.interrupted:
            raise RecordError(INTERRUPTED)
        if self.ended:
            raise RecordError(f"Episode {self.id} has ended.", "Wait for every call before the workflow returns.")

    def _refuse_further_call(self, max_calls: int) -> NoReturn:
        """Fail the episode, which has made `max_calls` calls and asks for one more. Raises RecordError, or
        CancelledError if the application has ignored this error many times."""
        cause = f"The episode made {max_calls} calls and asks for another one: its answers do not end it."
        remedy = "End it in the application after some turns, or raise max_calls (--set max_calls=N)."
        self.fatal = TooManyCalls(cause, remedy)
        self.stop_soon()
        self._refused_calls += 1
        if self._refused_calls > _PATIENCE and asyncio._get_running_loop() is not None:
            # The application catches every error and calls again at once. So the event loop never gets a turn, which
            # `stop_soon` needs. `except Exception` does not catch this error.
            raise asyncio.CancelledError(cause)
        raise RecordError(cause, remedy)

    def edit(self, call: LiveCall, body: Mapping[str, Any]) -> None:
        """Edit the prompts of a call with the request `body`, if the episode has edits for its role."""
        if self.prompting is not None:
            self.prompting.edit(call, body, self.warn)

    def warn(self, kind: str, message: str, error: BaseException | None = None) -> None:
        """Count a warning for the user, and log each kind once per process.

        `message` must not quote the application's content. The text of an `error` is logged at level DEBUG only, unless
        it is an OSError.
        """
        if error is not None:
            log.debug("%s", message, exc_info=error)
            message = f"{message} ({error!r})" if isinstance(error, OSError) else f"{message} ({type(error).__name__})"
        with self._lock:
            self.warnings[kind] = self.warnings.get(kind, 0) + 1
            self.explained.setdefault(kind, message)
        warn_once(kind, "%s", message)  # outside of the lock, as a handler may block

    def pending(self) -> list[str]:
        """A phrase for each call that is open, or was open when the episode was stopped."""
        with self._lock:
            calls = self._stopped or self._open.values()
            return [f"turn {call.turn} of role {call.role!r} was open ({call.stage})" for call in calls]

    def stop(self) -> None:
        """Cancel the open calls, which are recorded as cancelled, and refuse further ones. Call `end` afterwards."""
        with self._lock:
            self.ended = True
            unanswered = list(self._open.values())
            self._stopped += unanswered
            # Read under the lock: a call that sets its `cancel` later sees in `_stopped` that it must be called.
            cancels = [call.cancel for call in unanswered]
        for call, cancel in zip(unanswered, cancels, strict=True):
            if cancel is not None:
                cancel()
            call.fail("cancelled", "the episode ended before the call did")

    def after_fork(self) -> None:
        """Stop recording in a forked child process, as only the parent records. Locks are replaced, because a thread
        that held one does not exist in the child and would never release it.
        """
        self.forked = self.ended = True
        self._lock = threading.RLock()
        self._idle = threading.Condition(self._lock)
        self._ending = 0
        self._open = {}
        self._records = CallRecords(self.redaction, self._lock, self.warn)
        self.sink = Nowhere()

    def end(
        self,
        status: EpisodeStatus,
        *,
        rewards: Mapping[str, float] | None = None,
        metrics: Mapping[str, float] | None = None,
        feedback: str = "",
        error: str | None = None,
        blame: FailureCause | None = None,
    ) -> Episode:
        """Write the record of the episode to the sink, with its team rewards and their `feedback`. Open calls are
        cancelled and recorded before it. Returns the record of the episode."""
        # Other threads may be writing the records of their calls: the episode's record must be the last.
        self.stop()
        with self._idle:
            self._idle.wait_for(lambda: not self._ending)

        # Results of tools, and values of clock, uuid and random, are stored as messages that the record refers to.
        is_changed_by_redactor = None if self.redaction is None else self.redaction.changes
        bodies, results = self.tape.records(is_changed_by_redactor)
        chance = None
        if self.chance is not None:
            chance = self.chance.record()
            if chance is not None:
                bodies.append(chance)
            if self.chance.dropped:
                text = f"Of clock, uuid and random only the first {MOST_VALUES:,} values of an episode are kept."
                self.warn("unfrozen", text)

        stored_task = self.task
        stored_error = error
        if self.redaction is not None:
            stored_task = self.redaction.task(self.task)
            stored_error = self.redaction.text(error)
        record = Episode(
            id=self.id,
            task=stored_task,
            workflow=self.workflow,
            phase=self.phase,
            training_step=self.training_step,
            rollout=self.rollout,
            status=status,
            error=stored_error,
            blame=blame,
            started=self.started,
            latency=time.monotonic() - self._began,
            calls=self._turns.steps,
            metrics=dict(metrics or {}),
            fork=self.fork,
            results=results,
            chance=chance.id if chance else None,
            threads=tuple(sorted(self._threads)),
            prompts="" if self.prompting is None else self.prompting.id,
            app=self.app,
            key=self.key,
        )
        team_rewards = reward_records(self.id, rewards or {}, feedback, redaction=self.redaction)
        self._write([*bodies, *team_rewards, record])
        return record

    def _end(
        self, call: LiveCall, answer: Answer | None, status: CallStatus, error: str | None, *, outage: bool = False
    ) -> None:
        """Record the end of a call with its `answer`, or with the answer so far if it failed. Copies of the call in
        inner episodes end with it.

        A second end of the same call is ignored: a time-out may end a call that is just being answered. `outage` is
        whether the infrastructure failed the call.
        """
        # Only a provider or a client may send a malformed answer; the answers of policies are built by cotune.
        if answer is not None and answer.policy is None and not call.ended:
            answer, fault = well_formed(answer)
            if fault and status == "ok":
                status = "malformed"
                error = fault
        with self._lock:
            if call.ended:
                return
            call.ended = True
            # `end` waits until no call is between this point and its write, so that the episode is written last.
            self._ending += 1
            self._open.pop(call.id, None)
            if status != "ok":
                self.failures[status] = self.failures.get(status, 0) + 1
            call.outage = outage
            self.outage = outage  # always of the last call that has ended
        try:
            try:
                records = self._records.records_of(call, answer, status, error)
            except Exception as broken:  # noqa: BLE001 - the application must still get its answer
                self.warn("unrecorded", f"The content of a call of role {call.role!r} could not be recorded.", broken)
                records = self._records.records_without_content(call, broken)
            self._write(records)
            for copy in call.copies:
                copy.ends_like(call, answer, status, error)
        finally:
            with self._lock:
                self._ending -= 1
                if self.ended:
                    self._idle.notify_all()

    def _write(self, records: list[Record]) -> None:
        """Write records to the sink. If it fails, records are lost, but the application still gets its answer."""
        if self.app:
            with_app = (CallRecord, RewardRecord, FeedbackRecord)  # `end` sets the `app` of the Episode
            records = [replace(record, app=self.app) if isinstance(record, with_app) else record for record in records]
        try:
            self.sink.write(records)
        except Exception as broken:  # noqa: BLE001
            self.warn("lost", f"The store refused {len(records)} records.", broken)


class Nowhere:
    """A sink that drops all records."""

    def write(self, records: Sequence[Record]) -> None: ...
