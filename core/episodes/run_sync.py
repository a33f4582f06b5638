"""Runs a coroutine to its end from plain code, whatever the application does to the event loop meanwhile.

Also where an event loop is already running (a notebook): then in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cotune.recording.exits import exits_logged
from cotune.runtime.default_threads import grow_threads
from cotune.runtime.interrupts import interrupts
from cotune.runtime.user_code import origin

log = logging.getLogger("cotune")
T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run`; in a thread of its own, with the caller's context, when this one has a running loop.

    `sys.exit` in a task of the application's and `loop.stop()` do not end the loop: that is logged, and goes on.
    On the main thread the first SIGINT or SIGTERM cancels `work`, or does what `interrupts.stop_by` says; a second one
    ends it at once. Raises KeyboardInterrupt then.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, _run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    runner = asyncio.Runner()
    loop = runner.get_loop()
    grow_threads(loop)
    with interrupts(loop) as signals, exits_logged(), runner:
        main = loop.create_task(work)
        signals.on_first = main.cancel
        try:
            return _to_the_end(loop, main)
        except asyncio.CancelledError:
            if signals.count:
                raise KeyboardInterrupt from None
            raise


def _to_the_end(loop: asyncio.AbstractEventLoop, main: asyncio.Task[T]) -> T:
    while True:
        try:
            return loop.run_until_complete(main)
        except SystemExit as error:
            if main.done():
                raise
            log.warning("The application called sys.exit(%r)%s: the run goes on.", error.code, origin(error))
        except RuntimeError as error:
            if main.done() or not str(error).startswith("Event loop stopped"):
                raise
            log.warning("The application called loop.stop() on the loop that cotune runs on: the run goes on.")
