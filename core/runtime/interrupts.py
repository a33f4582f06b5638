"""SIGINT, SIGTERM and SIGHUP: the first signal stops the work in an orderly way, the second ends it at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import NoReturn

from cotune.runtime.process_exit import INTERRUPTED, end_process_after
from cotune.runtime.process_state import state_of_loop

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_GRACE = 0.5
"""Seconds that a process has to end by itself after the second signal."""

TOGETHER = 0.2
"""Seconds in which several signals count as one: `timeout` and terminals send theirs to the process and to its
group."""


@contextlib.contextmanager
def _handled_by(
    handler: Callable[[int, FrameType | None], object], numbers: Iterable[signal.Signals]
) -> Iterator[None]:
    """A block where `handler` handles these signals, if it is on the main thread. Afterwards the earlier handlers
    do."""
    earlier_handlers = {}
    if threading.current_thread() is threading.main_thread():
        earlier_handlers = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier_handler in earlier_handlers.items():
            signal.signal(number, earlier_handler)


class Interrupts:
    """Handles the signals while a loop runs. The first signal calls `on_first` on the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.count = 0
        self._first = 0.0
        self.on_first: Callable[[], object] = lambda: None

    @contextlib.contextmanager
    def handling(self, numbers: Iterable[signal.Signals]) -> Iterator[None]:
        """A block where `handle` is the handler of these signals. On other threads than the main thread it does
        nothing, because they cannot handle signals."""
        with _handled_by(self.handle, numbers):
            yield

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler: at the first signal call `on_first` on the loop, at the second end the process.

        It is Python's handler and not asyncio's, which runs on the loop: the application may block the loop.
        """
        now = time.monotonic()
        if self.count and now - self._first < TOGETHER:  # sent to the process and to its group: counts once
            return
        self.count += 1
        if number == signal.SIGHUP:
            _leave_terminal()
        if self.count == 1:
            self._first = now
            with contextlib.suppress(OSError):
                os.write(2, b"stopping; once more ends it at once\n")
            self.loop.call_soon_threadsafe(lambda: self.on_first())  # its value when the loop runs it
            return
        end_process_after(EXIT_GRACE, "ended at once, as asked for twice.", INTERRUPTED)
        raise KeyboardInterrupt


def interrupt_ends() -> None:
    """From now on, Ctrl-C ends the process at once, with status 130 and without a message, as no work is in progress. A
    process that ignores Ctrl-C, like a background job of a shell, still ignores it."""
    _take_interrupts(_end)


def interrupt_raises() -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt, as usual in Python."""
    if signal.getsignal(signal.SIGINT) is _end:
        _take_interrupts(signal.default_int_handler)


def _take_interrupts(handler: Callable[[int, FrameType | None], object]) -> None:
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, handler)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    os._exit(INTERRUPTED)


@contextlib.contextmanager
def interrupts_held() -> Iterator[None]:
    """Inside, this thread blocks Ctrl-C. A process that it starts blocks it for its whole life."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def ends_as_interrupts() -> Iterator[None]:
    """A block where SIGTERM and SIGHUP (a closed terminal) have the effect of Ctrl-C, if it is on the main thread. A
    SIGHUP that `nohup` ignores stays ignored."""
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if not _by_nohup(number)]
    with _handled_by(_interrupt, numbers):
        yield


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    if number == signal.SIGHUP:
        _leave_terminal()
    raise KeyboardInterrupt


def _leave_terminal() -> None:
    """Discard output to a closed terminal: otherwise each line would fail."""
    for stream in (1, 2):
        try:
            os.write(stream, b"")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)


_DEFAULTS = (signal.default_int_handler, signal.SIG_DFL, _interrupt)
_STATE = "interrupts"
"""Name of the `Interrupts` of an event loop (`state_of_loop`)."""


@contextlib.contextmanager
def interrupts(loop: asyncio.AbstractEventLoop) -> Iterator[Interrupts]:
    """Handle the signals inside, on the main thread, unless the application handles them itself."""
    signals = state_of_loop(loop, _STATE, lambda: Interrupts(loop))
    usual = [number for number in _SIGNALS if signal.getsignal(number) in _DEFAULTS]
    with signals.handling(usual):
        yield signals


@contextlib.contextmanager
def stop_by(stop: Callable[[], object]) -> Iterator[None]:
    """A block where the first signal calls `stop` on the running event loop instead of cancelling the work.

    In the block, all other handlers are replaced: Ray's drivers handle SIGTERM, and shells let background jobs ignore
    SIGINT. Only a SIGHUP that is ignored stays ignored, for `nohup`.
    """
    loop = asyncio.get_running_loop()
    signals = state_of_loop(loop, _STATE, lambda: None)
    if signals is None:  # the loop is the application's own, and so are the handlers
        yield
        return
    earlier = signals.on_first
    signals.on_first = stop
    try:
        with signals.handling(number for number in _SIGNALS if not _by_nohup(number)):
            yield
    finally:
        signals.on_first = earlier


def _by_nohup(number: signal.Signals) -> bool:
    return number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN
