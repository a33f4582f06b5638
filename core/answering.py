"""Answering: gets a call's answer from its episode's responder, from whatever thread or event loop the call is made."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextvars
import functools
import threading

from cotune.context import current_episode
from cotune.errors import CotuneError, SamplerError, WorkflowError
from cotune.recorder import Answer, LiveCall
from cotune.records import CallStatus

_CANCELLED = (asyncio.CancelledError, concurrent.futures.CancelledError, KeyboardInterrupt, GeneratorExit)
_DETAIL = 500
"""Most characters of an error message that are recorded."""


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
    future = asyncio.run_coroutine_threadsafe(_respond(call), episode.loop)
    call.cancel = future.cancel
    return await asyncio.wrap_future(future)


def answer_blocking(call: LiveCall) -> Answer | None:
    """The same for a thread that may wait. On the episode's own loop, where waiting would be a deadlock, the responder
    runs on another one and everything else on this loop stands still: counted as the warning `blocked_loop`."""
    episode = call.episode
    if episode.responder is None:
        return None
    loop = episode.loop
    if loop is not None and _running_loop() is loop:
        episode.warn(
            "blocked_loop",
            "A synchronous model call inside a coroutine blocks its event loop, so no other episode moves meanwhile: "
            "await the asynchronous client instead.",
        )
        loop = None
    future = asyncio.run_coroutine_threadsafe(_respond(call), loop or _side_loop())
    call.cancel = future.cancel
    return future.result()


def failed(call: LiveCall, error: BaseException) -> int:
    """Record that the responder failed; return the HTTP status that tells the application.

    What is neither the sampler's doing nor a cancellation fails the whole episode, even if the application swallows it.
    """
    status, text = reason_of(error)
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
