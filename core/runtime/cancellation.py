"""Cancel the application's coroutines. One that catches its cancellation and goes on is left behind.

A retry loop with a bare `except:` does that. Without a limit, the run would wait for it forever.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Any, TypeVar

from cotune.runtime.user_code import frame_place, is_library

T = TypeVar("T")

GRACE = 5.0
"""Seconds that cancelled code has to end, for example to close its connections."""


async def await_cancellable(work: Awaitable[T], on_cancel: Callable[[], object] = lambda: None) -> T:
    """Await the application's code, `work`. A cancellation from outside first calls `on_cancel`, then cancels the code,
    and waits at most GRACE seconds until it has ended.

    A note of the CancelledError names the place where the code waits.
    """
    cancellations: list[asyncio.CancelledError] = []

    async def remember_cancellation() -> T:
        try:
            return await work
        except asyncio.CancelledError as error:
            # The code cancelled itself. A task that ends by it does not pass on the error's text and traceback.
            cancellations.append(error)
            raise

    running = asyncio.ensure_future(remember_cancellation())
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError as error:
        if not running.done():  # cancelled from outside
            if place := awaiting_place(running):
                error.add_note(f"it waits at {place}")
            on_cancel()
            running.cancel()
            running.add_done_callback(_retrieve_exception)
            _, unfinished = await asyncio.wait([running], timeout=GRACE)
            if unfinished:
                error.add_note("it catches its own cancellation (a bare `except:`?), and is left behind")
        elif cancellations:
            raise cancellations[0] from None
        raise


def cancel_tasks(loop: asyncio.AbstractEventLoop, run: Callable[[asyncio.Task[Any]], object]) -> list[str]:
    """Cancel all tasks of a loop that is about to close. `run` runs the loop until a task is done.

    Tasks that have not ended after GRACE seconds are removed from the loop, as closing it would wait for them forever.
    Returns the places where these wait.
    """
    tasks = asyncio.all_tasks(loop)
    if not tasks:
        return []
    for task in tasks:
        task.cancel()
    run(loop.create_task(_wait_for_all(tasks)))
    places = []
    for task in asyncio.all_tasks(loop):
        places.append(awaiting_place(task) or task.get_name())
        asyncio.tasks._unregister_task(task)
        task._log_destroy_pending = False  # type: ignore[attr-defined]
        # Freeing a coroutine raises GeneratorExit in it. Code that catches this too would run on, forever, at the end
        # of the process. So the task is never freed.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(task))
    return places


async def _wait_for_all(tasks: set[asyncio.Task[Any]]) -> None:
    await asyncio.wait(tasks, timeout=GRACE)


def awaiting_place(task: asyncio.Task[Any]) -> str:
    """Where a task waits: the innermost line of the application that awaits something. Empty if no line is known."""
    awaiting: Any = task.get_coro()
    place: FrameType | None = None
    while awaiting is not None:
        # A coroutine has cr_frame and cr_await, a generator of an older library gi_frame and gi_yieldfrom.
        frame = getattr(awaiting, "cr_frame", None) or getattr(awaiting, "gi_frame", None)
        if frame is not None and not is_library(frame):
            place = frame
        awaiting = getattr(awaiting, "cr_await", None) or getattr(awaiting, "gi_yieldfrom", None)
    return frame_place(place) if place is not None else ""


def _retrieve_exception(task: asyncio.Future[Any]) -> None:
    """Mark the exception of a task as seen, as nobody awaits the task any more."""
    if not task.cancelled():
        task.exception()
