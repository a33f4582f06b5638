"""Ends Python code that runs too long, by raising an exception in its thread. A chat template may loop forever."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class TookTooLong(Exception):
    """Raised in code that ran too long."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the block once it has run for `seconds`. A call into C is not interrupted."""
    thread = threading.get_ident()
    lock = threading.Lock()
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
            # If the exception was sent just as the block ended, wait for it here, so that it hits no other code. If the
            # block has caught it already, it never comes.
            latest = time.monotonic() + 1.0
            while sent and time.monotonic() < latest:
                time.sleep(0.001)
        except TookTooLong:
            pass
