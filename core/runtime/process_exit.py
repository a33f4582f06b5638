"""The end of a process that is cotune's own: threads of the application cannot delay it, and its reason is printed."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import functools
import os
import sys
import threading
import time
from typing import NoReturn

from cotune.runtime.run_context import current_run
from cotune.runtime.user_code import place
from cotune.terminal import harmless

GRACE = 3.0
"""Seconds that threads of the application have to end by themselves."""
INTERRUPTED = 130
"""Exit status after Ctrl-C: then nobody waits for threads, such as one that loads a model."""

_exit = os._exit
"""While an application's code runs, `os._exit` is one that calls the exit the application's (`run_sync`)."""
_owned = False
"""Whether the process is the command line's, so that cotune may end it."""


def own_process() -> None:
    """From now on cotune may end this process: it is the command line's."""
    global _owned
    _owned = True


def leave(status: int) -> NoReturn:
    """End the process with `status`; threads that the application has left behind are named, and left."""
    threading.Thread(target=_end_without_threads, args=(status,), name="cotune-end", daemon=True).start()
    sys.exit(status)


def end_process(message: str, status: int = 1) -> None:
    """End the process at once, with a last line on stderr; does nothing where it is not cotune's own."""
    if _owned:
        print_line(f"{message} {current_run.get().go_on}".strip())
        _exit(status)


def end_process_after(seconds: float, message: str, status: int) -> None:
    """End the process so, if it is still there after so many seconds."""
    end = functools.partial(contextvars.copy_context().run, end_process, message, status)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end_without_threads(status: int) -> None:
    deadline = time.monotonic() + (GRACE if status != INTERRUPTED else 0.1)
    while left := [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]:
        if time.monotonic() > deadline:
            if status != INTERRUPTED:
                frames = sys._current_frames()
                where = "; ".join(f"{t.name} at {place(frames.get(t.ident or 0))}" for t in left[:3])
                print_line(f"{len(left)} threads of the application still run, the process ends without them: {where}.")
            atexit._run_exitfuncs()
            _exit(status)
        time.sleep(0.05)


def print_line(text: str) -> None:
    """A line of cotune's own on stderr, wherever that is by now."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"cotune: {harmless(text)}\n")
        sys.stderr.flush()
