"""Exclusive use of a file or folder by one process, released by the system however the process ends."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cotune.errors import RunError
from cotune.runtime.forks import survives_fork
from cotune.storage.whole_file import is_full


class LockHeldError(RunError):
    """Another process holds the lock."""


def is_held(path: Path) -> bool:
    """Whether the process that a lock file names still runs. The lock itself is not touched. Signal 0 only asks whether
    a process exists; PermissionError means that it does, but belongs to another user.
    """
    try:
        os.kill(int(path.read_text()), 0)
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False
    return True


class FileLock:
    """Holds an exclusive lock on a lock file that contains the holder's process id."""

    def __init__(self, path: Path, guarded: str, *, on_full_disk: bool = False) -> None:
        """Take the lock at once, without waiting. `guarded` names the guarded file or folder in messages.
        With `on_full_disk` the lock is also taken if the disk has no room for the process id.

        Raises LockHeldError with the process that holds it, and RunError if the file cannot be created or its file
        system has no locks.
        """
        self._path = path
        self._guarded = guarded
        self._on_full_disk = on_full_disk
        self._fd: int | None = None
        self._names_holder = False
        self.take()
        survives_fork(self)

    def take(self) -> None:
        """Take the lock again after `release`. Raises as the constructor does."""
        from filelock import lock_descriptor

        path = self._path
        guarded = self._guarded
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            cause = f"{guarded} cannot be written: {error.strerror}: {path}."
            remedy = "Free some space" if is_full(error) else "Check the permissions of the folder"
            raise RunError(cause, f"{remedy}, or choose another one.") from None
        try:
            locked = lock_descriptor(self._fd, blocking=False)
        except OSError as error:
            # ENOLCK or ENOSYS on NFS and Lustre that are mounted without locks, EIO on some FUSE file systems.
            self.release()
            raise RunError(
                f"{guarded} cannot be locked: the file system of {path} refuses locks ({error.strerror}).",
                "Use a folder on another file system, such as a local disk, or mount this one with locks "
                "(Lustre: -o flock; NFS: with its lock service).",
            ) from None
        if not locked:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            self.release()
            raise LockHeldError(
                f"{guarded} is being written by process {holder}.",
                "Wait until it ends or stop it; you can read the records meanwhile.",
            )
        try:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, str(os.getpid()).encode(), 0)
            self._names_holder = True
        except OSError as error:
            if not self._on_full_disk:  # the lock holds without the process id in its file
                self.release()
                raise OSError(error.errno, error.strerror, str(path)) from None

    def is_in_place(self) -> bool:
        """Whether the path still leads to the locked file. Another process may have removed it."""
        with contextlib.suppress(OSError):
            return self._fd is not None and os.path.samestat(os.fstat(self._fd), self._path.stat())
        return False

    def release(self) -> None:
        """Give the lock back; safe to call twice. A forked child shares the lock with its parent: in the child, this
        leaves the parent's lock as it is."""
        if self._fd is not None:
            if self._names_holder:
                with contextlib.suppress(OSError):
                    os.ftruncate(self._fd, 0)
            os.close(self._fd)
            self._fd = None

    def after_fork(self) -> None:
        """In a forked child: release the child's share of the parent's lock."""
        self._names_holder = False
        self.release()
