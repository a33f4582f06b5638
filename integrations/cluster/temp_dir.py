"""Temporary folders that go with their owner: at its end, or at the next start after it was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

_LOCK = ".owner"
_ALSO = ".also"


def goes_with(folder: Path, others: Iterable[Path]) -> None:
    """Remove these files too when an owned folder is removed."""
    (folder / _ALSO).write_text("\n".join(map(str, others)))


def _remove(folder: Path) -> None:
    if (folder / _ALSO).exists():
        for name in (folder / _ALSO).read_text().splitlines():
            Path(name).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def owned_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """A fresh folder under `parent`, removed in the end.

    Its owner holds a lock on a file in it, which the system gives back however the owner ends: folders of the same
    prefix whose lock is free are what killed owners left, and are removed first.
    """
    for left in parent.glob(f"{prefix}-*"):
        _remove_if_free(left)
    folder, lock = _made_and_locked(parent, prefix)
    try:
        yield folder
    finally:
        _remove(folder)
        os.close(lock)


def _made_and_locked(parent: Path, prefix: str) -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=parent))
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX)
        if (folder / _LOCK).exists():
            return folder, lock
        os.close(lock)  # somebody who started at the same moment has taken it for one that was left


def _remove_if_free(folder: Path) -> None:
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:
        return  # being made or removed by another process, or of another user
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _remove(folder)
    except BlockingIOError:
        pass
    finally:
        os.close(lock)
