"""Answering: gets a call's answer from its episode's responder, from whatever thread or event loop the call is made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import sys
import threading
from types import FrameType

from cotune.context import current_episode
from cotune.errors import CotuneError, SamplerError, WorkflowError
from cotune.recording.answers import Answer
from cotune.recording.recorder import LiveCall
from cotune.recording.records import CallStatus
from cotune.sampling.blame import blame

_CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError, KeyboardInterrupt, GeneratorExit)
_DETAIL = 500
"""Most characters of an error message that are recorded."""
PATIENCE = 0.1
"""Seconds between two looks at an episode's loop that does not begin with a call of another thread. It never would
where the application waits on it for that thread (a synchronous graph with parallel nodes, run inside a coroutine)."""


async def answer(call: LiveCall) -> Answer | None:
    """Await the responder: directly on the episode's loop, from any other loop by way of it.

    None where no responder answers. Raises what the responder raises.
    """
    episode = call.episode
    if episode.responder is None:
        return None
    here = asyncio.get_running_loop()
    if episode.loop is None or episode.loop is here:
        task = asyncio.current_task()
        if task is not None:
            call.cancel = functools.partial(here.call_soon_threadsafe, task.cancel)
        return await _respond(call)
    request = _Request(call, episode.loop)
    begun = asyncio.wrap_future(request.begun)
    try:
        while not (await asyncio.wait([begun], timeout=PATIENCE))[0] and not request.stuck():
            continue
    except asyncio.CancelledError:
        request.answer.cancel()
        raise
    return await asyncio.wrap_future(request.settle())


def answer_blocking(call: LiveCall) -> Answer | None:
    """The same for a thread that may wait. Where the episode's own loop stands still until this call returns, the
    responder runs on another one: counted as the warning `blocked_loop`."""
    episode = call.episode
    if episode.responder is None:
        return None
    if episode.loop is None:
        return _Request(call, _side_loop()).answer.result()
    request = _Request(call, episode.loop)
    if _running_loop() is not episode.loop:
        while not concurrent.futures.wait([request.begun], PATIENCE).done and not request.stuck():
            continue
    return request.settle().result()


class _Request:
    """A responder's answer under way on a loop, which may turn out to stand still."""

    def __init__(self, call: LiveCall, loop: asyncio.AbstractEventLoop) -> None:
        self._call = call
        self._loop = loop
        self._seen: FrameType | None = None
        self.begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self.answer = asyncio.run_coroutine_threadsafe(self._run(), loop)
        call.cancel = self.answer.cancel

    async def _run(self) -> Answer | None:
        if not self.begun.set_running_or_notify_cancel():
            return None
        self.begun.set_result(None)
        return await _respond(self._call)

    def stuck(self) -> bool:
        """Whether the loop has been waiting for other threads since this was last asked, so that it cannot begin."""
        before, self._seen = self._seen, _waiting(self._loop)
        return self.answer.done() or (self._seen is not None and self._seen is before)

    def settle(self) -> concurrent.futures.Future[Answer | None]:
        """The future answer: of this loop if it has begun, else of one that does not stand still."""
        if self.answer.cancelled() or not self.begun.cancel():
            return self.answer
        self._call.episode.warn(
            "blocked_loop",
            "A synchronous model call inside a coroutine blocks its event loop, so no other episode moves meanwhile: "
            "await the asynchronous client or graph instead.",
        )
        return _Request(self._call, _side_loop()).answer


def failed(call: LiveCall, error: BaseException) -> int:
    """Record that the responder failed; return the HTTP status that tells the application.

    What is neither the sampler's doing nor a cancellation fails the whole episode, even if the application swallows it.
    """
    status, text = reason_of(error)
    call.episode.outage = blame(error) == "infrastructure" or not isinstance(error, (CotuneError, *_CANCELLED))
    code = {"timeout": 504, "cancelled": 409}.get(status, 400 if isinstance(error, SamplerError) else 500)
    if code == 500:
        fatal = error if isinstance(error, CotuneError) else None
        call.episode.fatal = fatal or WorkflowError(
            f"Answering a call of role {call.role!r} failed with {type(error).__name__}: {error}."
        )
        call.episode.fatal.__cause__ = error if fatal is None else error.__cause__
    call.fail(status, text)
    return code


def reason_of(error: BaseException) -> tuple[CallStatus, str]:
    """Status and recorded text of a call that ended in `error`, by the class of the error: clients have their own."""
    text = f"{type(error).__name__}: {error}"[:_DETAIL]
    if isinstance(error, _CANCELLED):
        return "cancelled", text
    return ("timeout" if "Timeout" in type(error).__name__ else "error"), text


async def _respond(call: LiveCall) -> Answer | None:
    """Calls that the responder itself makes (a judge in a scorer) are not part of the episode."""
    assert call.episode.responder is not None
    token = current_episode.set(None)
    try:
        found = await call.episode.responder.respond(call)
    finally:
        current_episode.reset(token)
    if found is not None and call.streamed and len(found.candidates) > int(call.params.get("n") or 1):
        call.episode.warn(
            "buffered_stream",
            f"Role {call.role!r} streams its answers, and the best of several candidates is known only at the end: "
            "such a stream comes at once.",
        )
    return found


def _waiting(loop: asyncio.AbstractEventLoop) -> FrameType | None:
    """Where the loop's thread waits for another thread; None for one that works or is idle."""
    frame = sys._current_frames().get(getattr(loop, "_thread_id", None) or 0)
    return frame if frame is not None and frame.f_code.co_filename == threading.__file__ else None


@functools.cache
def _side_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="cotune-answers", daemon=True)
    # In an empty context: the thread outlives the episode that happens to start it.
    contextvars.Context().run(thread.start)
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
