"""Watch an event loop from another thread: application code that blocks the loop is interrupted at its time-out.

A blocked loop runs no timers, so asyncio's time-outs cannot end the code that blocks it. On the main thread a signal
can: its handler raises Blocked inside the blocking code, if this is the application's.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import signal
import threading
import time
from collections.abc import Awaitable, Iterable, Iterator
from types import FrameType
from typing import TypeVar

from cotune.runtime.process_exit import end_process
from cotune.runtime.process_state import state_of_loop
from cotune.runtime.thread_frames import thread_frame
from cotune.runtime.user_code import Stopped, contain_errors, thread_place, user_code

log = logging.getLogger("cotune")
T = TypeVar("T")

INTERVAL = 0.2
"""Seconds between two ticks of a loop, and between two checks of it."""
REMEDY = "Await the slow call, run it in a thread with asyncio.to_thread, or raise the episode's time-out."
GRACE = 5.0
"""Seconds that blocking code has to react to the interruption."""
_SIGNAL = getattr(signal, "SIGRTMAX", signal.SIGUSR2) - (2 if hasattr(signal, "SIGRTMAX") else 0)
"""A signal that nothing else uses: verifiers use SIGALRM, debuggers SIGUSR1."""


class Blocked(BaseException):
    """Raised in application code that has blocked its event loop for longer than the time-out of its episode."""

    def __init__(self, seconds: float, where: str) -> None:
        self.seconds = seconds
        self.where = where
        super().__init__(f"blocked its event loop for {seconds:.0f} s, so nothing else could run, at {where}")


@contextlib.contextmanager
def watched(limit: asyncio.Timeout, seconds: float | None) -> Iterator[None]:
    """A block with an episode. Application code that blocks the running event loop for more than `seconds` is
    interrupted. `limit` is the time-out of the episode. None for `seconds`: nothing is interrupted.

    Only a loop on the main thread is watched: on other threads, application code cannot be interrupted.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    watch = state_of_loop(loop, "watch", _Watch)
    with watch.watching(limit, seconds):
        yield


@contextlib.contextmanager
def paused_while_blocked(limit: asyncio.Timeout) -> Iterator[None]:
    """A block whose time limit does not count the time in which application code blocks the loop.

    For answers of a model: it may have answered long before the loop can receive the answer.
    """
    watch = state_of_loop(asyncio.get_running_loop(), "watch", _Watch)
    watch.paused.add(limit)
    try:
        yield
    finally:
        watch.paused.discard(limit)


async def interruptible(work: Awaitable[T]) -> T:
    """Await the application's code. Raises the same exceptions as `contain_errors`, which does not let the code end the
    process.

    If the code was interrupted because it blocked the loop, the time-outs of the loop's other episodes are extended by
    the time that they could not run.
    """
    try:
        return await contain_errors(work)
    except Stopped as error:
        if isinstance(error.__cause__, Blocked):
            state_of_loop(asyncio.get_running_loop(), "watch", _Watch).extend(error.__cause__.seconds)
        raise


class _Watch:
    """Watches one loop. It must not hold a reference to the loop, as it exists as long as the loop does."""

    def __init__(self) -> None:
        self._limits: dict[asyncio.Timeout, float] = {}
        self.paused: set[asyncio.Timeout] = set()
        """Time limits that do not count blocked time."""
        self._ticked = time.monotonic()
        self._interrupted = False
        """Whether the code that now blocks the loop has been interrupted."""
        self._over = threading.Event()

    @contextlib.contextmanager
    def watching(self, limit: asyncio.Timeout, seconds: float) -> Iterator[None]:
        """A block with an episode, in which the loop may be blocked for at most `seconds`. `limit` is the time-out of
        the episode. The thread that watches the loop begins with the first episode and ends with the last one."""
        if not self._limits:
            self._begin()
        self._limits[limit] = seconds
        try:
            yield
        finally:
            del self._limits[limit]
            if not self._limits:
                self._over.set()

    def extend(self, seconds: float) -> None:
        """Extend the time limits of the loop's episodes by the time in which they could not run."""
        _extend(self._limits, seconds)
        _extend(self.paused, seconds)
        self._ticked = time.monotonic()
        self._interrupted = False

    def _begin(self) -> None:
        """Handle the signal of the watch, and start the ticks of the loop and the thread that checks them."""
        self._ticked = time.monotonic()  # the loop may have done other work since its last episode
        signal.signal(_SIGNAL, self._interrupt)
        self._over = threading.Event()
        self._tick(self._over)
        check = functools.partial(contextvars.copy_context().run, self._check, self._over)
        threading.Thread(target=check, name="cotune-watch", daemon=True).start()

    def _tick(self, over: threading.Event) -> None:
        # This timer was due before the limits that expired while the loop was blocked, so it runs before them.
        blocked = time.monotonic() - self._ticked - INTERVAL
        if blocked > INTERVAL:
            _extend(self.paused, blocked)
        self._ticked = time.monotonic()
        self._interrupted = False
        if not over.is_set():
            asyncio.get_running_loop().call_later(INTERVAL, self._tick, over)

    def _overdue(self) -> float:
        """Seconds for which the loop has been blocked, if this is too long; else 0."""
        blocked = time.monotonic() - self._ticked - INTERVAL
        return blocked if blocked > min(self._limits.values(), default=float("inf")) else 0.0

    def _check(self, over: threading.Event) -> None:
        """The main function of the watching thread: check the loop until the event `over` is set. Application code that
        blocks the loop for too long is interrupted by a signal to the main thread.

        The code may be in C code that no signal interrupts, or may swallow the exception. If it still blocks the loop
        after `GRACE` seconds, the process is ended, if cotune owns it.
        """
        main_thread = threading.main_thread().ident or 0
        interrupted_at = 0.0  # 0 if no interruption is pending
        while not over.wait(INTERVAL):
            blocked_seconds = self._overdue()
            frame = thread_frame(main_thread) if blocked_seconds else None
            context = running_context(frame)
            culprit = context.get(user_code, "") if context else ""
            if not culprit:
                interrupted_at = 0.0
            elif not interrupted_at:
                interrupted_at = time.monotonic()
                signal.pthread_kill(main_thread, _SIGNAL)
            elif time.monotonic() - interrupted_at > GRACE:
                fault = f"has blocked its event loop for {blocked_seconds:.0f} s and cannot be interrupted"
                message = f"{culprit} {fault}: {thread_place(frame)}."
                end_process(message)
                log.error("%s", message)
                return

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        blocked = self._overdue()
        if blocked and user_code.get() and not self._interrupted:
            self._interrupted = True
            raise Blocked(blocked, thread_place(frame))


def _extend(limits: Iterable[asyncio.Timeout], seconds: float) -> None:
    """Move time limits that have not expired by this number of seconds."""
    for limit in limits:
        if (when := limit.when()) is not None and not limit.expired():
            limit.reschedule(when + seconds)


def running_context(frame: FrameType | None) -> contextvars.Context | None:
    """The context of the task or callback that an event loop's thread runs. `frame` is the innermost frame of the
    thread."""
    while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
        frame = frame.f_back
    return getattr(frame.f_locals.get("self"), "_context", None) if frame is not None else None
