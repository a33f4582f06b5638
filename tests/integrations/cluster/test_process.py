"""Processes that are told to end: one that hears nothing, and one whose first thread has ended before the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from cotune.integrations.cluster import process
from cotune.integrations.cluster.process import _is_running, end_processes

STOPPED = "import os, signal; print('up', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
THREAD_LEFT = """
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(60,)).start()
print("up", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("code", [STOPPED, THREAD_LEFT])
def test_a_process_ends_with_all_its_threads(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "GRACE_SECONDS", 0.5)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout and child.stdout.readline() == "up\n"
        found = psutil.Process(child.pid)
        assert _is_running(found)
        end_processes([child.pid, 2**22 + 1])
        assert not _is_running(found)
        assert child.wait() == -signal.SIGKILL
    end_processes([child.pid])
    assert found.pid != os.getpid()
