"""The frames of other threads, while the garbage collector has work."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading

import pytest

from cotune.runtime.thread_frames import thread_frame

# The frame of `ask` is a new object, and 5 cycles are garbage: on Python 3.11, `sys._current_frames()` in place of
# `thread_frame(ident)` collects them and hangs.
GARBAGE = """
import gc, threading
from cotune.runtime.thread_frames import thread_frame

class Node: pass

def garbage():
    for _ in range(5):
        node = Node()
        node.local, node.itself = threading.local(), node
        node.local.value = 1

def ask():
    gc.enable()
    assert thread_frame(threading.main_thread().ident).f_code.co_name == "thread_frame"

gc.set_threshold(1)
for _ in range(50):
    gc.disable()
    garbage()
    ask()
"""


def test_asking_does_not_hang_where_the_collector_frees_variables_of_threads() -> None:
    subprocess.run([sys.executable, "-c", GARBAGE], check=True, timeout=60)


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_before(enabled: bool) -> None:
    was_enabled = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        assert thread_frame(threading.get_ident()) is not None
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_a_thread_that_does_not_run_has_no_frame() -> None:
    assert thread_frame(None) is None
    assert thread_frame(threading.Thread().ident) is None
