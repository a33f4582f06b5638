"""Write files atomically: they appear whole or not at all. Also the message for errors of the file system."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

REWRITING = threading.Lock()
"""Hold this lock while you read a small file, change it, and write it again. Otherwise a thread that writes at the same
time would lose its change."""
_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """Open a file for writing; it gets its name only when all of it is written and synced.

    After an error or an interruption nothing of it remains, and the earlier file stays. A pipe or a device is written
    directly. Raises OSError, which names the file.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            with path.open("wb") as file:
                yield file
            return
        path = path.resolve()
        partial = path.with_name(path.name + _PARTIAL)
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        sync(path.parent)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def sync(path: Path) -> None:
    """Make the content of a file, or the renames inside a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether the cause is a full disk or a quota."""
    # safetensors raises its own error, with the system's message as text.
    return getattr(error, "errno", None) in _FULL or "No space left" in str(error)


def system_error_message(error: OSError, then: str = "run the command again") -> str:
    """The message for an error of the operating system. `then` is the next action once a full disk has room again."""
    if not is_full(error):
        if not error.filename or not error.strerror:
            return str(error)
        path = str(error.filename).removesuffix(_PARTIAL)
        return f"{path} cannot be used: {error.strerror}. Name another path, or change this one."
    where = f" of {error.filename}" if error.filename else ""
    return f"The disk{where} is full: no more can be written. Free some space, then {then}."
