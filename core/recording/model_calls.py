"""A call that a framework's model makes: opened, answered by the episode's responder or observed, and ended.

The answer comes from whatever thread or event loop the call is made in.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import selectors
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cotune.errors import CotuneError, RecordError, SamplerError, WorkflowError, error_text
from cotune.recording.context import current_episode, identify, opened_call
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.failure_cause import is_refused_request
from cotune.records.structs import CallStatus
from cotune.runtime.loop_watch import running_context
from cotune.runtime.thread_frames import thread_frame
from cotune.runtime.user_code import context_value

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError)
"""Exceptions for a request or an answer in another form than an integration expects."""
_CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError, KeyboardInterrupt, GeneratorExit)
_DETAIL = 500
"""Maximum length of a recorded error message, in characters."""
_FILES_THAT_WAIT = (
    threading.__file__,
    socket.__file__,
    selectors.__file__,
    subprocess.__file__,
    "httpcore/_backends/sync.py",
)
"""Files whose functions take long only when they wait."""
LOOP_CHECK = 0.1
"""Seconds between two checks of an episode's loop that has not started to answer a call from another thread. The loop
may be blocked for ever: the application waits on it for that thread (a synchronous graph with parallel nodes, run
inside a coroutine), or for the gateway of its own episode with a synchronous client."""


def open_call(request: Callable[[], Mapping[str, Any] | None]) -> LiveCall | None:
    """Open a call of the current episode. `request` returns its body, a chat request in OpenAI form.

    Returns None if there is nothing to record: outside an episode, inside an open call, or if `request` returns None.
    If the call cannot be recorded, it is counted, and None is returned too. With a responder, which would have to
    answer it, the error is raised instead: the error of `request`, or RecordError.
    """
    episode = current_episode.get()
    if episode is None or opened_call.get() is not None:
        return None
    try:
        body = request()
        return None if body is None else episode.start(identify(), body)
    except (RecordError, *UNREADABLE) as error:
        if episode.responder is not None:
            raise
        warn_unrecorded(episode, error)
        return None


def warn_unrecorded(episode: LiveEpisode, error: Exception) -> None:
    """Count a call that is not recorded: `forked_call` in a forked child, else `late_call` for a RecordError and
    `unread_call` for an unreadable request."""
    if episode.forked:
        episode.warn("forked_call", f"It is not recorded: {error}")
    elif isinstance(error, RecordError):
        episode.warn("late_call", f"A call was made after its episode had ended and is not recorded. {error}")
    else:
        episode.warn("unread_call", "A request could not be read and is not recorded.", error)


def ask(call: LiveCall) -> Answer | None:
    """End the call with the responder's answer, in a thread that may wait. None if no responder answers it.

    Errors of the responder are recorded and raised.
    """
    try:
        response = answer_blocking(call)
    except BaseException as error:
        record_failure(call, error)
        raise
    if response is not None:
        call.finish(response)
    return response


async def ask_async(call: LiveCall, begun: Awaitable[Answer | None] | None = None) -> Answer | None:
    """Like `ask`, on an event loop. `begun` is a call of `answer` that has already started, if any."""
    try:
        response = await (begun or answer(call))
    except BaseException as error:
        record_failure(call, error)
        raise
    if response is not None:
        call.finish(response)
    return response


@contextmanager
def observed(call: LiveCall) -> Iterator[None]:
    """A block where the application's own model answers the call. A request that the model sends belongs to the
    call, and an exception in the block fails the call."""
    with context_value(opened_call, call):
        try:
            yield
        except BaseException as error:
            fail_with_error(call, error)
            raise


def fail_with_error(call: LiveCall, error: BaseException, part: Answer | None = None) -> None:
    """Fail the call with an error that the application gets too. `part` is the answer so far."""
    call.fail(*reason_of(error), part, outage=not is_refused_request(error))
    if call.outage:
        call.episode.outages.append(error)


def step(call: LiveCall, source: Iterator[Any]) -> Any:
    """The next part of a stream; None at its end.

    The call is open (`opened_call`) only inside this function, because the application's code runs between two steps.
    """
    with context_value(opened_call, call):
        return next(source, None)


async def step_async(call: LiveCall, source: AsyncIterator[Any]) -> Any:
    """Like `step`, for an asynchronous stream."""
    with context_value(opened_call, call):
        return await anext(source, None)


def end_call(
    call: LiveCall,
    returned: Any,
    read: Callable[[Any], Answer],
    read_part: Callable[[Any], Answer | None] = lambda returned: None,
) -> None:
    """End the call with the model's result `returned`. Does nothing if the call has ended, for example with the HTTP
    request that the model sent.

    `read` makes an Answer of the result. If it fails, the application is not affected: the call is recorded as
    malformed, with the partial answer that `read_part` makes of the result.
    """
    if call.ended:
        return
    try:
        response = read(returned)
    except Exception as error:  # noqa: BLE001
        _, recorded_text = reason_of(error)
        call.fail("malformed", recorded_text, read_part(returned), outage=False)
    else:
        call.finish(response)


async def answer(call: LiveCall) -> Answer | None:
    """The answer of the episode's responder; None if no responder answers. Raises the errors of the responder.

    The responder runs on the episode's loop, even if the call is made on another loop. If the episode's loop is
    blocked, it runs on a third loop (`_side_loop`).
    """
    episode = call.episode
    if episode.responder is None:
        return None
    running_loop = asyncio.get_running_loop()
    if episode.loop is None or episode.loop is running_loop:
        task = asyncio.current_task()
        if task is not None:  # the end of the episode cancels this task, perhaps from another thread
            call.cancel_by(functools.partial(running_loop.call_soon_threadsafe, task.cancel))
        return await _respond_outside_episode(call)

    # The call is made on another loop than the episode's.
    request = _Request(call, episode.loop)
    try:
        await request.wait_for_start()
    except asyncio.CancelledError:
        request.answer.cancel()
        raise
    return await asyncio.wrap_future(request.answer_or_ask_side_loop())


def answer_blocking(call: LiveCall) -> Answer | None:
    """Like `answer`, for a thread that waits. If the episode's own loop is blocked until this call returns, the
    responder runs on another loop, and the warning `blocked_loop` counts it."""
    episode = call.episode
    if episode.responder is None:
        return None
    if episode.loop is None:  # the episode has no loop of its own that could be blocked
        request = _Request(call, _side_loop())
        return request.answer.result()
    request = _Request(call, episode.loop)
    # If this code runs on the episode's loop, it blocks the loop itself, so the loop will not start the work.
    blocks_loop = asyncio._get_running_loop() is episode.loop
    if not blocks_loop:
        request.wait_for_start_blocking()
    return request.answer_or_ask_side_loop().result()


class _Request:
    """A responder's work on an answer on a loop, which may be blocked by the thread that waits for the answer."""

    def __init__(self, call: LiveCall, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._waiting_frame: FrameType | None = None
        """The frame in which the loop's thread waited at the last check (`_frame_of_wait`)."""
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.answer = asyncio.run_coroutine_threadsafe(self._run(), loop)
        call.cancel_by(self.answer.cancel)

    async def _run(self) -> Answer | None:
        if not self._started.set_running_or_notify_cancel():
            return None  # `answer_or_ask_side_loop` has given up waiting for this loop
        self._started.set_result(None)
        return await _respond_outside_episode(self._call)

    async def wait_for_start(self) -> None:
        """Wait until the loop starts the work or is seen to be blocked, without blocking the running loop."""
        started = asyncio.wrap_future(self._started)
        while True:
            done, _ = await asyncio.wait([started], timeout=LOOP_CHECK)
            if done or self._is_stuck():
                return

    def wait_for_start_blocking(self) -> None:
        """Wait until the loop starts the work or is seen to be blocked."""
        while True:
            done, _ = concurrent.futures.wait([self._started], LOOP_CHECK)
            if done or self._is_stuck():
                return

    def _is_stuck(self) -> bool:
        """Whether the loop's thread waits at the same place as at the previous check, so that the loop cannot start."""
        frame_before = self._waiting_frame
        self._waiting_frame = _frame_of_wait(self._loop)
        has_not_moved = self._waiting_frame is not None and self._waiting_frame is frame_before
        return has_not_moved or self.answer.done()

    def answer_or_ask_side_loop(self) -> concurrent.futures.Future[Answer | None]:
        """The future answer of this request if its loop has started the work. Otherwise the loop is blocked: then this
        cancels the work, and returns the future answer of a second request, on the side loop.
        """
        is_blocked = not self.answer.cancelled() and self._started.cancel()  # `cancel` fails after the start
        if not is_blocked:
            return self.answer
        self._call.episode.warn(
            "blocked_loop",
            "A synchronous model call inside a coroutine blocks its event loop, so no other episode moves meanwhile: "
            "await the asynchronous client or graph instead.",
        )
        return _Request(self._call, _side_loop()).answer


def record_failure(call: LiveCall, error: BaseException) -> int:
    """Record that the responder failed with `error`. Returns the HTTP status for the application: 504 for a time-out,
    409 for a cancellation, 400 for an error of the sampler, and 500 for any other error.

    An error with the status 500 fails the whole episode, even if the application swallows it.
    """
    status, _ = reason_of(error)
    if status == "timeout":
        http_status = 504
    elif status == "cancelled":
        http_status = 409
    elif isinstance(error, SamplerError):
        http_status = 400
    else:
        http_status = 500
        if isinstance(error, CotuneError):
            call.episode.fatal = error
        else:
            fatal = WorkflowError(f"Answering a call of role {call.role!r} failed with {error_text(error)}.")
            fatal.__cause__ = error
            call.episode.fatal = fatal
    fail_with_error(call, error)
    return http_status


def reason_of(error: BaseException) -> tuple[CallStatus, str]:
    """The status and the recorded error text of a call that ended in `error`. Each client has its own class for a
    time-out, so it is recognised by "Timeout" in the name of the class."""
    text = error_text(error)[:_DETAIL]
    if isinstance(error, _CANCELLED):
        if not str(error):
            text = f"{text}: the application stopped waiting for it"
        return "cancelled", text
    if "Timeout" in type(error).__name__:
        return "timeout", text
    return "error", text


async def _respond_outside_episode(call: LiveCall) -> Answer | None:
    """The responder's answer. Calls that the responder itself makes, for example to a judge in a scorer, are not part
    of the episode."""
    assert call.episode.responder is not None
    with context_value(current_episode, None):
        response = await call.episode.responder.respond(call)
    n_requested = int(call.params.get("n") or 1)
    if response is not None and call.streamed and len(response.candidates) > n_requested:
        call.episode.warn(
            "buffered_stream",
            f"Role {call.role!r} streams its answers, and the best of several candidates is known only at the end: "
            "the stream comes at once.",
        )
    return response


def _frame_of_wait(loop: asyncio.AbstractEventLoop) -> FrameType | None:
    """The innermost frame of the loop's thread if the application waits there for another thread, a process or a
    socket; None if it does not.

    The frame identifies the wait: if it is the same at a later check, the thread still waits at the same place.
    """
    frame = thread_frame(getattr(loop, "_thread_id", None))  # None while the loop does not run
    if frame is None or not frame.f_code.co_filename.endswith(_FILES_THAT_WAIT):
        return None  # the thread computes
    caller: FrameType | None = frame
    while caller is not None and caller.f_code.co_filename.endswith(_FILES_THAT_WAIT):
        if caller.f_code is threading.Thread.start.__code__:
            return None  # it waits until a new thread runs, which takes only a moment
        caller = caller.f_back
    if caller is not None and str(caller.f_globals.get("__name__")).partition(".")[0] == "cotune":
        return None  # cotune itself waits, for example for a write to the disk
    if running_context(frame) is None:
        return None  # the loop runs no task: it is idle and waits for events
    return frame


@functools.cache
def _side_loop() -> asyncio.AbstractEventLoop:
    """A loop in a thread of its own, for answers that the episode's loop cannot give. One for the process."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="cotune-answers", daemon=True)
    # In an empty context: the thread outlives the episode that happens to start it.
    contextvars.Context().run(thread.start)
    return loop
