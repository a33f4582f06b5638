"""End a process of cotune's command line: the application's threads cannot delay the end, and its reason is printed."""

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
from cotune.runtime.thread_frames import thread_frame
from cotune.runtime.user_code import thread_place
from cotune.terminal import harmless

GRACE = 3.0
"""Seconds that the application's threads have to end by themselves."""
INTERRUPTED = 130
"""Exit status after Ctrl-C. Then the end does not wait for threads, for example one that loads a model."""

_exit = os._exit
"""The original `os._exit`: while the application's code runs, `run_sync` replaces it to report such exits."""
_owned = False
"""Whether this is the process of the command line, so that cotune may end it."""


def own_process() -> None:
    """Declare this the process of the command line, which cotune may end."""
    global _owned
    _owned = True


def leave(status: int) -> NoReturn:
    """End the process with `status`. Threads of the application that still run are named in a message and abandoned."""
    threading.Thread(target=_end_without_threads, args=(status,), name="cotune-end", daemon=True).start()
    sys.exit(status)


def end_process(message: str, status: int = 1) -> None:
    """End the process at once, with a last line on stderr. Does nothing if cotune does not own the process."""
    if _owned:
        print_line(f"{message} {current_run.get().go_on}".strip())
        _exit(status)


def end_process_after(seconds: float, message: str, status: int) -> None:
    """Call `end_process` after this number of seconds, if the process still runs."""
    end = functools.partial(contextvars.copy_context().run, end_process, message, status)
    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()


def _end_without_threads(status: int) -> None:
    """Give the application's threads a moment to end. Then end the process without them, and print where they are.

    Python would otherwise wait for them forever at the end of the process.
    """
    is_interrupted = status == INTERRUPTED
    grace = 0.1 if is_interrupted else GRACE
    deadline = time.monotonic() + grace
    running = _running_threads()
    while running and time.monotonic() <= deadline:
        time.sleep(0.05)
        running = _running_threads()
    if not running:
        return
    if not is_interrupted:  # after Ctrl-C, the threads had no time to end
        places = [f"{thread.name} at {thread_place(thread_frame(thread.ident))}" for thread in running[:3]]
        count = f"{len(running)} threads of the application still run"
        print_line(f"{count}, the process ends without them: {'; '.join(places)}.")
    # `_exit` skips the functions of atexit, and Python calls them only after all threads have ended.
    atexit._run_exitfuncs()
    _exit(status)


def _running_threads() -> list[threading.Thread]:
    """The threads that Python waits for at the end of the process."""
    main = threading.main_thread()
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not main]


def print_line(text: str) -> None:
    """Print a line of cotune on the present stderr."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.write(f"cotune: {harmless(text)}\n")
        sys.stderr.flush()
