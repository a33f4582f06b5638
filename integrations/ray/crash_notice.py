"""What a process cannot say itself when it is killed is said by a small process beside it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_WITNESS = "import sys; sys.stdin.buffer.read() or sys.stderr.write(sys.argv[1] + chr(10))"


@contextmanager
def crash_notice(text: str) -> Iterator[None]:
    """Print `text` to stderr if this process ends while the block runs: by SIGKILL, for want of memory, or by Ray,
    which ends a process at once when it loses its node."""
    command = [sys.executable, "-I", "-S", "-c", _WITNESS, text]
    witness = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        witness.communicate(b"all is well")
