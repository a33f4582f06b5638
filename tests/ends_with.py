"""Servers that tests start end with the test process, however it ends."""

from __future__ import annotations

import ctypes
import signal

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def this_process() -> None:
    """As `preexec_fn` of a child: Linux sends it SIGTERM once the thread that has started it is gone."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
