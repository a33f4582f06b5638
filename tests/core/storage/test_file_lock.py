"""Locks: who holds one, a file system that has none, a file that is gone, and forked children."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cotune.errors import RunError
from cotune.integrations.cluster.temp_dir import owned_folder
from cotune.storage.file_lock import FileLock, LockHeldError, is_held

HOLDER = """
import sys
import time
from pathlib import Path
from cotune.storage.file_lock import FileLock
lock = FileLock(Path(sys.argv[1]), "The run r")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lock_names_the_process_that_holds_it_until_that_ends(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout and holder.stdout.readline() == "held\n"
        assert is_held(path)
        with pytest.raises(LockHeldError, match=f"^The run r is being written by process {holder.pid}\\."):
            FileLock(path, "The run r")
        holder.kill()
    assert not is_held(path)
    lock = FileLock(path, "The run r")
    assert path.read_text() == str(os.getpid())
    lock.release()
    lock.release()
    assert path.read_text() == "" and not is_held(path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EIO, errno.ENOTSUP])
def test_a_file_system_without_locks_is_named(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(RunError) as caught:
        FileLock(tmp_path / "lock", "The run r")
    assert not isinstance(caught.value, LockHeldError)
    expected = (
        f"The run r cannot be locked: the file system of {tmp_path / 'lock'} refuses locks ({os.strerror(code)})."
    )
    assert caught.value.cause == expected
    assert caught.value.remedy.startswith("Use a folder on another file system")
    with pytest.raises(RunError, match="refuses locks"), owned_folder(tmp_path, "mine"):
        pass


def test_a_lock_whose_file_was_removed_is_not_in_place(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock", "The run r")
    assert lock.is_in_place()
    (tmp_path / "lock").unlink()
    assert not lock.is_in_place()
    lock.release()


def test_a_forked_child_neither_keeps_nor_frees_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    lock = FileLock(path, "The run r")
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        lock.release()
        os.write(writing, b"released")
        time.sleep(60)
        os._exit(0)
    try:
        assert os.read(reading, 8) == b"released"
        with pytest.raises(LockHeldError, match=str(os.getpid())):
            FileLock(path, "The run r")
        lock.release()
        FileLock(path, "The run r").release()  # free while the child still runs
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
