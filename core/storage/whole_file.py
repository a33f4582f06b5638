"""Write files atomically: they appear whole or not at all. Also the message for errors of the file system."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_PARTIAL = ".partial"
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def whole_file(path: str | Path) -> Iterator[BinaryIO]:
    """A block that writes a file. The file gets its name only at the end of the block, when all of it is on the disk.

    After an error or an interruption nothing of it remains, and the earlier file stays. A pipe or a device is written
    directly. Raises OSError, which names the file.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
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


@contextlib.contextmanager
def rewriting(path: Path) -> Iterator[None]:
    """A block that reads a file, changes it and writes it again, under a lock. Other such blocks wait.

    Without the lock, the change of another thread or process could be lost. Raises OSError if the folder does not
    exist.
    """
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks: two writers at once are rare
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)  # also releases the lock


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
