"""Forks: state that a child process forked by the application must not inherit. In the child, no thread of the parent
exists to release its locks, and only the parent may write its records."""

from __future__ import annotations

import os
import sys
import traceback
import weakref
from typing import NoReturn, Protocol

from cotune.runtime.process_state import ProcessState


class Forkable(Protocol):
    def after_fork(self) -> None:
        """Called in a forked child, on its only thread."""
        ...


class OpenThings(ProcessState):
    """Open objects of this process that matter after a fork."""

    def __init__(self) -> None:
        self.forkable: weakref.WeakSet[Forkable] = weakref.WeakSet()
        """Objects whose `after_fork` is called in a forked child."""
        self.never_closed: list[object] = []
        """Connections that stay open, because closing them would harm another process."""


_open = OpenThings()


def leave_open(*connections: object) -> None:
    """Keep connections open for the life of this process: closing them would harm another process, for example the
    parent."""
    _open.never_closed.extend(connections)


def survives_fork(thing: Forkable) -> None:
    """Call `thing.after_fork()` in every child that is forked while `thing` exists."""
    _open.forkable.add(thing)


def end_child(error: BaseException | None) -> NoReturn:
    """End a child process that the application's code has forked, when the code returns to cotune in it. The run
    continues only in the parent. `error` is the exception of the code, if any."""
    status = 0
    if isinstance(error, SystemExit):
        # As in Python: sys.exit() is 0, sys.exit(2) is 2, and sys.exit("a text") is 1.
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _in_child() -> None:
    for thing in list(_open.forkable):
        thing.after_fork()


os.register_at_fork(after_in_child=_in_child)
