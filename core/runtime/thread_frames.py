"""The frames of other threads."""

from __future__ import annotations

import gc
import sys
from types import FrameType


def thread_frame(ident: int | None) -> FrameType | None:
    """The innermost frame of the thread with this `ident`. None if the thread has not begun or has ended.

    Python 3.11 holds a lock of the interpreter while it lists the frames. A garbage collection at that moment may need
    the same lock, and then the process hangs (python/cpython#106883). So no collection may begin meanwhile.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames().get(ident or 0)
    finally:
        if collects:
            gc.enable()
