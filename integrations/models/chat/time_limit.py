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
    block_has_ended = False
    exception_on_its_way = False

    def interrupt() -> None:
        nonlocal exception_on_its_way
        with lock:
            if not block_has_ended:
                exception_on_its_way = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TookTooLong))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    try:
        yield
    except TookTooLong:
        exception_on_its_way = False
        raise
    finally:
        try:
            with lock:
                block_has_ended = True
            timer.cancel()
            # If the exception was sent just as the block ended, wait for it here, so that it hits no other code. If the
            # block has caught it already, it never comes.
            deadline = time.monotonic() + 1.0
            while exception_on_its_way and time.monotonic() < deadline:
                time.sleep(0.001)
        except TookTooLong:
            pass
