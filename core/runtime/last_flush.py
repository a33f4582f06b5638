"""Write records from memory to disk when SIGTERM or SIGHUP ends an application that does not handle them."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

_ENDS = (signal.SIGTERM, signal.SIGHUP)
_flushes: list[Callable[[], None]] = []


def flush_at_signals(flush: Callable[[], None]) -> None:
    """From now on, call `flush` before one of these signals ends the process. The application's own handlers stay. Only
    the main thread can handle a signal. `forget` undoes this."""
    _flushes.append(flush)
    if threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _flush_and_end)


def forget(flush: Callable[[], None]) -> None:
    """Stop calling `flush` at signals, and restore the default handlers after the last one."""
    _flushes.remove(flush)
    if not _flushes and threading.current_thread() is threading.main_thread():
        for number in _ENDS:
            if signal.getsignal(number) is _flush_and_end:
                signal.signal(number, signal.SIG_DFL)


def _flush_and_end(number: int, frame: FrameType | None) -> None:
    for flush in list(_flushes):
        with contextlib.suppress(Exception):  # the process ends anyway
            flush()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
