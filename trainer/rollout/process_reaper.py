"""What an application leaves running when its worker is gone: found by a mark in the environment, and killed.

Also a program of its own, that outlives the worker to do so: nothing but the standard library, and no import of cotune.
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
"""Environment variable that a worker and all that it starts have; its value is the worker's own."""

_PROC = Path("/proc")
_POLL_SECONDS = 0.3
_ROUNDS = 20


def start_guard(mark: str) -> int:
    """Start a process that kills what this one leaves behind, however it ends; return its process id.

    It is no child of this process, so that nobody who ends this one and its children ends it too.
    """
    command = [sys.executable, "-I", "-S", __file__, str(os.getpid()), mark]
    said = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env={}, check=True).stdout
    return int(said)


def leftovers(mark: str, group: int) -> list[int]:
    """Ids of living processes that have the mark, or are in the process group; empty where there is no /proc."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, its_group = _stat(entry)
            if state not in "ZX" and (its_group == group or wanted in (entry / "environ").read_bytes().split(b"\0")):
                found.append(int(entry.name))
    return found


def kill_leftovers(mark: str, group: int, *spare: int) -> int:
    """Kill all that `leftovers` finds but `spare`, until nothing is left; return how many that were."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        found = set(leftovers(mark, group)) - set(spare)
        if not found:
            break
        for pid in found:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        killed |= found
        time.sleep(0.01)
    return len(killed)


def resident_mb() -> int:
    """Memory of this process that is in use, in MB; 0 where there is no /proc."""
    with contextlib.suppress(OSError, ValueError):
        return int((_PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20
    return 0


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and was not yet waited for does not."""
    try:
        os.kill(pid, 0)
        return _stat(_PROC / str(pid))[0] not in "ZX"
    except PermissionError:
        return True
    except OSError:
        return False


def _stat(entry: Path) -> tuple[str, int]:
    """State and process group."""
    fields = (entry / "stat").read_text().rpartition(")")[2].split()
    return fields[0], int(fields[2])


def _watch(worker: int, mark: str) -> None:
    while is_alive(worker):
        time.sleep(_POLL_SECONDS)
    kill_leftovers(mark, worker, os.getpid())


def _main() -> None:
    worker, mark = int(sys.argv[1]), sys.argv[2]
    os.setsid()
    if pid := os.fork():
        sys.stdout.write(str(pid))
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(null, fd)
    _watch(worker, mark)


if __name__ == "__main__":
    _main()
