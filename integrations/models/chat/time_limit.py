"""Ends Python code that runs for too long in its thread, by an exception in it: a chat template may loop for ever."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    """Raised in the code that ran for too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the body once it has run for `seconds`. A call into C ends first, however long."""
    thread, lock = threading.get_ident(), threading.Lock()
    ended = sent = False

    def end() -> None:
        nonlocal sent
        with lock:
            if not ended:
                sent = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TookTooLong:
        sent = False
        raise
    finally:
        try:
            with lock:
                ended = True
            timer.cancel()
            latest = time.monotonic() + 1.0  # where the body has swallowed it, it never comes
            while sent and time.monotonic() < latest:  # as the body ended: awaited here, so that it hits nothing else
                time.sleep(0.001)
        except TookTooLong:
            pass
