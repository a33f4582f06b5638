"""Temporary folders that are removed with their owner: at its end or, if it was killed, at the next start."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from cotune.errors import RunError
from cotune.storage.file_lock import FileLock, LockHeldError

_LOCK = ".owner"
"""File that the owner of a folder has locked."""
_OTHER_FILES = ".also"
"""File with the paths of files outside the folder that are removed with it."""


def remove_together(folder: Path, others: Iterable[Path]) -> None:
    """Note that these files are removed when an owned folder is removed."""
    (folder / _OTHER_FILES).write_text("\n".join(map(str, others)))


def _remove(folder: Path) -> None:
    if (folder / _OTHER_FILES).exists():
        for name in (folder / _OTHER_FILES).read_text().splitlines():
            Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A new folder under `parent`, which is removed at the end.

    Its owner holds a lock on a file in it, which the system releases even if the owner is killed. Folders of the same
    prefix with a free lock belonged to killed owners, and are removed first. Raises RunError on a file system without
    locks.
    """
    remove_abandoned(parent, prefix)
    folder, lock = _create_locked(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        lock.release()


def remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the folders of this prefix that killed owners have left."""
    for folder in parent.glob(f"{prefix}-*"):
        _remove_if_free(folder)


def _create_locked(parent: Path, prefix: str) -> tuple[Path, FileLock]:
    """Create a temporary folder and lock it, so that other processes do not remove it as abandoned."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
        # Another process that starts at the same moment may lock or remove the folder before this one locks it.
        with contextlib.suppress(LockHeldError):
            lock = FileLock(folder / _LOCK, f"The temporary folder {folder}")
            if lock.is_in_place():
                return folder, lock
            lock.release()


def _remove_if_free(folder: Path) -> None:
    """Remove a temporary folder, unless a process uses it."""
    if not (folder / _LOCK).exists():
        return  # another process is making or removing it
    try:
        lock = FileLock(folder / _LOCK, f"The temporary folder {folder}")
    except RunError:
        return  # in use, or of another user
    _remove(folder)
    lock.release()
