"""Exclusive use of a file or folder by one process, released by the system however the process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cotune.errors import RunError
from cotune.runtime.forks import survives_fork
from cotune.storage.whole_file import is_full


def is_held(path: Path) -> bool:
    """Whether the process is there that a lock's side file names. Looks without taking the lock."""
    try:
        os.kill(int(path.read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


class FileLock:
    """Holds an exclusive lock on a side file that names the holder's process id."""

    def __init__(self, path: Path, what: str) -> None:
        """Take the lock at once. `what` names the guarded thing. Raises RunError naming the process that holds it,
        or the file that cannot be made."""
        import fcntl

        self._path = path
        self._names_holder = False
        try:
            self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            cause = f"{what} cannot be written: {error.strerror}: {path}."
            remedy = "Free some space" if is_full(error) else "Check the rights of the folder"
            raise RunError(cause, f"{remedy}, or choose another one.") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise RunError(
                f"{what} is being written by process {holder}.",
                "Wait until it ends or stop it; reading is possible meanwhile.",
            ) from None
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
        except OSError as error:
            self.release()
            raise OSError(error.errno, error.strerror, str(path)) from None
        self._names_holder = True
        survives_fork(self)

    def is_in_place(self) -> bool:
        """Whether the path still leads to the file that is locked, which others may have removed."""
        with contextlib.suppress(OSError):
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self._path.stat())
        return False

    def release(self) -> None:
        """Give the lock back; safe to call twice. In a forked child it only lets go of the child's share."""
        if self._fd is not None:
            if self._names_holder:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def after_fork(self) -> None:
        """In a forked child: let go of the parent's lock."""
        self._names_holder = False
        self.release()
