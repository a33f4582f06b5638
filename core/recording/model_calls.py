"""A call that a framework's model makes: opened, answered by the episode's responder or observed, and ended."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from cotune.context import current_episode, identify, opened_call
from cotune.errors import RecordError
from cotune.recording.answering import answer, answer_blocking, failed, reason_of
from cotune.recording.answers import Answer
from cotune.recording.recorder import LiveCall, LiveEpisode

UNREADABLE = (ValueError, TypeError, AttributeError, KeyError)
"""What reading a request or an answer raises where it is not what an integration expects."""


def open_call(request: Callable[[], Mapping[str, Any]]) -> LiveCall | None:
    """Open a call with the body that `request` makes of it, a chat request in OpenAI form.

    None outside an episode, within a call that is open already, and for a call that cannot be recorded (counted).
    Where a responder would have answered that one, what `request` raised is raised, or RecordError.
    """
    episode = current_episode.get()
    if episode is None or opened_call.get() is not None:
        return None
    try:
        return episode.start(identify(), request())
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
    """End the call with the responder's answer, from a thread that may wait; None where no responder answers it.

    Raises what the responder raises, and records that.
    """
    with _responding(call):
        return _taken(call, answer_blocking(call))


async def ask_async(call: LiveCall, asking: Awaitable[Answer | None] | None = None) -> Answer | None:
    """The same on an event loop. `asking` is what has begun to `answer` the call, where something has."""
    with _responding(call):
        return _taken(call, await (asking or answer(call)))


@contextmanager
def observed(call: LiveCall) -> Iterator[None]:
    """The application's own model answers inside: a wire request made there is the call's; an exception fails it."""
    with _opened(call):
        try:
            yield
        except BaseException as error:
            call.fail(*reason_of(error))
            raise


def step(call: LiveCall, source: Iterator[Any]) -> Any:
    """The next part of a stream, with the call open; None at its end. Between steps the application's code runs."""
    with _opened(call):
        return next(source, None)


async def step_async(call: LiveCall, source: AsyncIterator[Any]) -> Any:
    """The same for an asynchronous stream."""
    with _opened(call):
        return await anext(source, None)


def end_call(call: LiveCall, returned: Any, read: Callable[[Any], Answer]) -> None:
    """End the call with what the model returned, as `read` has it, unless its wire request has ended it.

    What `read` raises is not the application's fault: the call is recorded as malformed.
    """
    if call.ended:
        return
    try:
        found = read(returned)
    except Exception as error:  # noqa: BLE001
        call.fail("malformed", reason_of(error)[1])
    else:
        call.finish(found)


@contextmanager
def _responding(call: LiveCall) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        failed(call, error)
        raise


def _taken(call: LiveCall, found: Answer | None) -> Answer | None:
    if found is not None:
        call.finish(found)
    return found


@contextmanager
def _opened(call: LiveCall) -> Iterator[None]:
    token = opened_call.set(call)
    try:
        yield
    finally:
        opened_call.reset(token)
