"""Threads for the application's sync functions: one that never returns keeps neither the run nor the process waiting.

A workflow runs in a thread of its own (`in_thread`). Scorers share a bounded pool (`pooled_thread`).
"""

from __future__ import annotations

import asyncio
import contextvars
import os
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from cotune.runtime.forks import end_child
from cotune.runtime.user_code import Stopped, phrase, place

T = TypeVar("T")

MOST = 256
"""Pooled functions that run at once on an event loop. More wait."""
_gates: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = weakref.WeakKeyDictionary()
_idle: list[AppThread] = []
os.register_at_fork(after_in_child=_idle.clear)


class AppThread:
    """A daemon thread that runs the application's functions, one at a time."""

    def __init__(self) -> None:
        self.busy = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cotune-application", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn` in the caller's context. Raises what `fn` raises, and Stopped as `contained` does."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            end: Callable[[Any], None] = future.set_result
            try:
                value: Any = _call(context, fn, args)
            except (Exception, Stopped) as error:  # noqa: BLE001
                end, value = future.set_exception, error
            self.busy = False
            try:
                loop.call_soon_threadsafe(lambda: None if future.done() else end(value))
            except RuntimeError:  # the loop has closed: nobody waits any more
                return

        self.busy = True
        self._jobs.put(job)
        try:
            return await future
        except asyncio.CancelledError as error:
            if self.busy:
                error.add_note(f"its thread goes on at {place(sys._current_frames().get(self._thread.ident or 0))}")
            raise

    def end(self) -> None:
        """End the thread as soon as its function has returned."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # an idle thread keeps no arguments alive


async def in_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run the application's function in a thread of its own, as `AppThread.run` does."""
    thread = AppThread()
    try:
        return await thread.run(fn, *args)
    finally:
        thread.end()


@asynccontextmanager
async def pooled_thread() -> AsyncIterator[AppThread]:
    """A thread of the pool, once one is free. If it is left while its function still runs, the pool gives it up and
    starts another in its place."""
    loop = asyncio.get_running_loop()
    gate = _gates.get(loop) or _gates.setdefault(loop, asyncio.Semaphore(MOST))
    async with gate:
        try:
            thread = _idle.pop()
        except IndexError:
            thread = AppThread()
        try:
            yield thread
        finally:
            if thread.busy:
                thread.end()
            else:
                _idle.append(thread)


def _call(context: contextvars.Context, fn: Callable[..., T], args: tuple[Any, ...]) -> T:
    """Call `fn`; a child process that it has forked ends here. What would end the whole process becomes Stopped, and so
    does StopIteration, which no future can hold."""
    process = os.getpid()
    try:
        return context.run(fn, *args)
    except StopIteration as error:
        raise Stopped(phrase(error)) from error
    except Exception:
        raise
    except BaseException as error:
        raise Stopped(phrase(error)) from error
    finally:
        if os.getpid() != process:
            raised = sys.exc_info()[1]
            end_child(raised.__cause__ if isinstance(raised, Stopped) else raised)
