"""Run a coroutine to its end from sync code, even if the application stops the event loop meanwhile.

If an event loop is already running (in a notebook), the coroutine runs in a separate thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import os
import sys
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn, TypeVar

from cotune.recording.context import identify
from cotune.runtime.cancellation import cancel_tasks
from cotune.runtime.default_threads import grow_threads
from cotune.runtime.interrupts import interrupts
from cotune.runtime.process_exit import print_line
from cotune.runtime.process_state import drop_state_of_loop
from cotune.runtime.run_context import current_run
from cotune.runtime.user_code import error_origin, thread_place, user_code

log = logging.getLogger("cotune")
T = TypeVar("T")


def run_sync(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end, like `asyncio.run`. If this thread already has a running loop, the coroutine runs in
    a separate thread, with the caller's context.

    `sys.exit` in a task of the application and `loop.stop()` do not end the loop: they are logged. On the main thread,
    the first SIGINT or SIGTERM cancels `work`, or calls the function set by `interrupts.stop_by`, and a second signal
    ends the process. After a signal, this raises KeyboardInterrupt.
    """
    # Not `get_running_loop`: an error of `work` would name its RuntimeError as what was being handled.
    if asyncio._get_running_loop() is None:
        return _run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(contextvars.copy_context().run, _run, work).result()


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run `work` on a new event loop in this thread. A signal cancels it, and then this raises KeyboardInterrupt."""
    runner = asyncio.Runner()
    loop = runner.get_loop()
    grow_threads(loop)
    try:
        with interrupts(loop) as signals, _exits_logged(), runner:
            main = loop.create_task(work)
            signals.on_first = main.cancel
            try:
                return _to_the_end(loop, main)
            except asyncio.CancelledError:
                if signals.count:
                    raise KeyboardInterrupt from None
                raise
            finally:
                _cancel_rest(loop)
    finally:
        drop_state_of_loop(loop)


def _to_the_end(loop: asyncio.AbstractEventLoop, main: asyncio.Task[T]) -> T:
    """Run the loop until `main` is done, and return its result. If the application stops the loop before that, by
    `sys.exit` in another task or by `loop.stop()`, log it and run the loop again."""
    while True:
        try:
            return loop.run_until_complete(main)
        except SystemExit as error:
            if main.done():
                raise
            log.warning("The application called sys.exit(%r)%s: the run continues.", error.code, error_origin(error))
        except RuntimeError as error:
            if main.done() or not str(error).startswith("Event loop stopped"):
                raise
            log.warning("The application called loop.stop() on the loop that cotune runs on: the run continues.")


def _cancel_rest(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel what the application has left running on a loop that is about to close, and log what does not end."""
    places = cancel_tasks(loop, lambda task: _to_the_end(loop, task))
    if places:
        log.warning(
            "Tasks of the application that catch every cancellation are left behind (%d): %s.",
            len(places),
            "; ".join(places[:3]),
        )


@contextlib.contextmanager
def _exits_logged() -> Iterator[None]:
    """Inside this context, a call of `os._exit` by the application prints its file and line before the process ends.
    Otherwise the user could not see why the process ended.
    """
    original = os._exit
    process = os.getpid()

    def exit_with_message(status: int) -> NoReturn:
        """Exit as `os._exit` does. If the application's code calls it in this process, print the place first."""
        caller = user_code.get()  # such as "The workflow 'solve' on task '7'"; empty for code that is not the user's
        # A forked child has this patch too, but may end itself without ending the run.
        ends_run = os.getpid() == process
        if caller and ends_run:
            role = identify().role
            if role != "app":  # the role of code outside of every agent, which names nothing
                caller = f"{caller}, role {role!r},"
            where = thread_place(sys._getframe(1))
            text = f"{caller} called os._exit({status}), which ends the process at once: {where}."
            how_to_continue = current_run.get().go_on
            print_line(f"{text} {how_to_continue}".strip())
        original(status)

    os._exit = exit_with_message
    try:
        yield
    finally:
        os._exit = original
