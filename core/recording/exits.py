"""Says which code of the application ended the process by `os._exit`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from cotune.recording.context import identify
from cotune.runtime.process_exit import go_on, print_line
from cotune.runtime.user_code import place, user_code


@contextlib.contextmanager
def exits_logged() -> Iterator[None]:
    """Inside, a call of `os._exit` by the application's code is printed, with its place, before the exit."""
    original, process = os._exit, os.getpid()

    def exit_with_message(status: int) -> NoReturn:
        if os.getpid() == process and user_code.get():
            role = identify().role
            who = f"{user_code.get()}, role {role!r}," if role != "app" else user_code.get()
            where = place(sys._getframe(1))
            text = f"{who} called os._exit({status}), which ends the process at once: {where}. {go_on.get()}"
            print_line(text.strip())
        original(status)

    os._exit = exit_with_message
    try:
        yield
    finally:
        os._exit = original
