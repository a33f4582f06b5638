"""Forks: what a child process that the application forks must not inherit. No thread of the parent is there to release
a lock that it held, and only the parent may write its records."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from typing import NoReturn, Protocol


class Forkable(Protocol):
    def after_fork(self) -> None:
        """Called in a forked child, on its only thread."""
        ...


_known: weakref.WeakSet[Forkable] = weakref.WeakSet()


def survives_fork(thing: Forkable) -> None:
    """Have `thing.after_fork()` called in every child that is forked while `thing` lives."""
    _known.add(thing)


def end_child(error: BaseException | None) -> NoReturn:
    """End a forked child in which the application's code has returned to cotune: the run is its parent's."""
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _in_child() -> None:
    for thing in list(_known):
        thing.after_fork()


os.register_at_fork(after_in_child=_in_child)
