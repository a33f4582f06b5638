"""Run the application's code, here or in a thread. Whatever it raises fails its episode, not the run.

A function that never returns does not keep the run or the process waiting. A workflow runs in a separate thread
(`in_thread`). Scorers share a bounded pool (`pooled_thread`).
"""

from __future__ import annotations

import asyncio
import contextvars
import linecache
import os
import sys
import threading
import traceback
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import Any, TypeVar

from cotune.errors import error_text
from cotune.runtime.forks import end_child
from cotune.runtime.process_state import state_of_loop
from cotune.runtime.thread_frames import thread_frame

T = TypeVar("T")

MOST_THREADS = 256
"""Maximum number of pooled functions that run at the same time on an event loop. Further ones wait."""
_STANDARD = str(Path(os.__file__).parent)

user_code: ContextVar[str] = ContextVar("cotune_user_code", default="")
"""A phrase for the application's code that runs here ("The workflow 'solve' on task 't1'"); empty for cotune's code."""


class Stopped(Exception):
    """The application's code raised an exception that would end the whole process: SystemExit, GeneratorExit or another
    BaseException."""


@contextmanager
def context_value(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, `variable` has the value `value`; afterwards its old value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


class AppThread:
    """A daemon thread that runs the application's functions, one at a time."""

    def __init__(self) -> None:
        self.busy = False
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cotune-application", daemon=True)
        self._thread.start()

    async def run(self, fn: Callable[..., T], *args: Any) -> T:
        """Run `fn` in this thread, in a copy of the caller's context, and return its result.

        Raises the exceptions of `fn`, and Stopped in place of one that would end the whole process, such as SystemExit.
        If `fn` forks, the child process ends when `fn` returns in it.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        context = contextvars.copy_context()

        def job() -> None:
            """Run the function in its context, and hand its result or error to the event loop that waits for it."""
            process = os.getpid()
            value: Any = None
            raised: BaseException | None = None
            try:
                value = context.run(fn, *args)
            except BaseException as error:  # noqa: BLE001
                raised = error
            if os.getpid() != process:
                # The function forked, and this is the child: it must not run the rest of the run.
                end_child(raised)
            # A future rejects StopIteration, and SystemExit and the like would end the loop.
            if raised is not None and (isinstance(raised, StopIteration) or not isinstance(raised, Exception)):
                stopped = Stopped(error_phrase(raised))
                stopped.__cause__ = raised
                raised = stopped
            self.busy = False

            def set_result() -> None:
                if future.done():  # cancelled meanwhile
                    return
                if raised is not None:
                    future.set_exception(raised)
                else:
                    future.set_result(value)

            try:
                loop.call_soon_threadsafe(set_result)
            except RuntimeError:  # the loop is closed, so nobody waits for the result
                return

        self.busy = True
        self._jobs.put(job)
        try:
            return await future
        except asyncio.CancelledError as error:
            if self.busy:  # the function cannot be stopped
                error.add_note(f"its thread goes on at {thread_place(thread_frame(self._thread.ident))}")
            raise

    def end(self) -> None:
        """End the thread as soon as its function has returned."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # so that an idle thread does not keep its arguments alive


class ThreadPool:
    """The threads of pooled functions of one event loop. Idle ones are used again, and end with the loop."""

    def __init__(self) -> None:
        self.gate = asyncio.Semaphore(MOST_THREADS)
        self.idle: list[AppThread] = []
        weakref.finalize(self, _end_all, self.idle).atexit = False


def _end_all(threads: Iterable[AppThread]) -> None:
    for thread in threads:
        thread.end()


async def in_thread(fn: Callable[..., T], *args: Any) -> T:
    """Run the application's function in a new thread, like `AppThread.run`."""
    thread = AppThread()
    try:
        return await thread.run(fn, *args)
    finally:
        thread.end()


@asynccontextmanager
async def pooled_thread() -> AsyncIterator[AppThread]:
    """A block with a thread of the running loop's pool. Waits until one is free. If the thread's function still runs at
    the end of the block, the thread does not return to the pool, and ends when the function does."""
    pool = state_of_loop(asyncio.get_running_loop(), "threads of functions", ThreadPool)
    async with pool.gate:
        thread = pool.idle.pop() if pool.idle else AppThread()
        try:
            yield thread
        finally:
            if thread.busy:
                thread.end()
            else:
                pool.idle.append(thread)


async def contain_errors(work: Awaitable[T]) -> T:
    """Await the application's code. Raises Stopped in place of an exception that would end the whole process, such as
    SystemExit. Ctrl-C, and a cancellation of the task that runs the code, pass through.

    If the code cancels itself, that is an error like others. If the code forks, the child process ends when the code
    returns in it.
    """
    process = os.getpid()
    try:
        return await work
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _ends_coroutine(error):
            raise
        raise Stopped(error_phrase(error)) from error
    finally:
        is_forked_child = os.getpid() != process
        if is_forked_child:  # only the parent continues the run
            raised = sys.exc_info()[1]
            if isinstance(raised, Stopped):
                raised = raised.__cause__
            end_child(raised)


def thread_place(frame: FrameType | None) -> str:
    """Where a thread is, as text: file, line, function and source of its innermost frame in the application's code, or
    of its innermost frame if all are in libraries. `frame` is the innermost frame of the thread."""
    innermost = frame
    while frame is not None and is_library(frame):
        frame = frame.f_back
    frame = frame or innermost
    if frame is None:
        return "an unknown place"
    return frame_place(frame)


def frame_place(frame: FrameType) -> str:
    """The place of a frame as text: file, line, function and source."""
    file = frame.f_code.co_filename
    line = frame.f_lineno
    source = linecache.getline(file, line).strip()
    text = f"{file}:{line} in {frame.f_code.co_name}"
    return f"{text}: {source}" if source else text


def is_library(frame: FrameType) -> bool:
    """Whether the code of a frame does not belong to the application."""
    return is_library_file(frame.f_code.co_filename) or str(frame.f_globals.get("__name__")).startswith("cotune.")


def is_library_file(file: str) -> bool:
    """Whether a source file belongs to an installed package or to Python."""
    return file.startswith((sys.prefix, sys.base_prefix, "<")) or "/site-packages/" in file.replace(os.sep, "/")


def is_standard(frame: FrameType) -> bool:
    """Whether the code of a frame belongs to Python's standard library."""
    file = frame.f_code.co_filename
    return file.startswith((_STANDARD, "<frozen ")) and "site-packages" not in file


def error_origin(error: BaseException) -> str:
    """The innermost line of the application in the traceback of an error, in parentheses. Without one, the line of a
    library; empty without a traceback."""
    while isinstance(error, Stopped) and error.__cause__ is not None:
        error = error.__cause__
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames:
        return ""
    of_application = (entry for entry in reversed(frames) if not is_library(entry[0]))
    frame, line = next(of_application, frames[-1])
    return f" ({frame.f_code.co_filename}:{line} in {frame.f_code.co_name})"


def error_phrase(error: BaseException) -> str:
    """Kind and text of an exception of the application's code. Exceptions without a text get one."""
    if isinstance(error, SystemExit):
        return f"SystemExit: sys.exit({error.code!r}) was called"
    if isinstance(error, asyncio.CancelledError) and not str(error):
        return f"{type(error).__name__}: something in it was cancelled"
    return error_text(error)


def _ends_coroutine(error: BaseException) -> bool:
    """Whether `error` ends the running coroutine from outside: its task was cancelled, or the coroutine is closed by
    the garbage collector or at the end of a loop."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        task = None
    if isinstance(error, asyncio.CancelledError):
        # Without a cancel() from outside, the code has cancelled itself.
        return task is None or task.cancelling() > 0
    return isinstance(error, GeneratorExit) and task is None
