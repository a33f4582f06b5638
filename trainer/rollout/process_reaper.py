"""Ends processes of an application that still run when its rollout worker is gone.

Ray ends the process group of a worker that dies. It does not reach processes with a session or group of their own, nor
orphans when the driver, and so Ray, is killed. The reaper recognizes them by a variable in their environment. This file
is also a separate program, which outlives the worker: standard library only, no import of cotune.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

MARK = "COTUNE_ROLLOUT_WORKER"
"""Environment variable of a worker and of all processes that it starts; each worker has its own value."""

_POLL_SECONDS = 0.3
_ROUNDS = 20


def start_reaper() -> None:
    """Start a process that waits until this one has ended, in any way, and then kills all processes with its `MARK`.

    It is not a child of this process, because Ray kills children.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), os.environ[MARK]]
    null = subprocess.DEVNULL
    subprocess.run(command, stdin=null, stdout=null, stderr=null, env={}, check=True)


def is_alive(pid: int) -> bool:
    """Return whether a process of this machine runs. A zombie, which has ended but was not waited for, does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False  # the process does not exist
    # The state comes after the name of the program, which is in parentheses and may contain any character.
    state = stat.rpartition(")")[2].split()[0]
    return state not in "ZX"


def _marked(mark: str) -> list[int]:
    """Return the ids of the running processes that have the mark in their environment."""
    variable = f"{MARK}={mark}".encode()
    pids = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # a process that has ended meanwhile, or of another user
            if variable in (entry / "environ").read_bytes().split(b"\0") and is_alive(int(entry.name)):
                pids.append(int(entry.name))
    return pids


def _main() -> None:
    """Wait for the worker in the arguments to end, then kill every process with its mark."""
    worker = int(sys.argv[1])
    mark = sys.argv[2]
    # Detach from the worker. In a session of its own, this process gets no signals of the terminal. When its parent has
    # ended, it is not a descendant of the worker any more, so Ray does not kill it.
    os.setsid()
    is_parent = os.fork() != 0
    if is_parent:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while is_alive(worker):
        time.sleep(_POLL_SECONDS)
    for _ in range(_ROUNDS):  # several times, because a process may start others before it is killed
        for pid in _marked(mark):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


if __name__ == "__main__":
    _main()
