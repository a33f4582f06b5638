"""Ends Python code that runs for too long in its thread, by an exception in it: a chat template may loop for ever."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

_LOOK = 0.25
"""Seconds between two looks at what runs."""


class TookTooLong(Exception):
    """Raised in the code that ran for too long."""


@dataclass(eq=False)
class _Work:
    until: float
    thread: int = field(default_factory=threading.get_ident)
    ended: bool = False
    hit: bool = False
    """Set before `ended` is looked at, as `ended` is set before this is: one of the two threads sees the other."""


class _Watch:
    """A thread that looks at what runs; it ends when nothing does."""

    def __init__(self) -> None:
        self.works: set[_Work] = set()
        self._lock = threading.Lock()
        self._alive = False

    def add(self, work: _Work) -> None:
        with self._lock:
            self.works.add(work)
            if not self._alive:
                self._alive = True
                threading.Thread(target=self._run, name="cotune-time-bound", daemon=True).start()

    def _run(self) -> None:
        idle = 0
        while idle < 20 or not self._may_end():
            idle = 0 if self.works else idle + 1
            for work in list(self.works):
                if work.until <= time.monotonic():
                    self._end(work)
            time.sleep(_LOOK)

    def _may_end(self) -> bool:
        with self._lock:
            self._alive = bool(self.works)
            return not self._alive

    def _end(self, work: _Work) -> None:
        self.works.discard(work)
        work.hit = True
        if work.ended:
            work.hit = False
        else:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(work.thread), ctypes.py_object(TookTooLong))


_watch = _Watch()


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TookTooLong in the body once it has run for about `seconds`. A call into C ends first, however long."""
    work = _Work(time.monotonic() + seconds)
    _watch.add(work)
    try:
        yield
    except TookTooLong:
        work.hit = False
        raise
    finally:
        work.ended = True
        _watch.works.discard(work)
        try:
            while work.hit:  # sent as the body ended: it is awaited here, so that it hits nothing else
                time.sleep(0.001)
        except TookTooLong:
            pass
