"""A server of a test process that is killed ends too."""

from __future__ import annotations

import subprocess
import sys

import psutil

STARTS = """
import subprocess, time
from tests import ends_with
server = subprocess.Popen(["sleep", "300"], start_new_session=True, preexec_fn=ends_with.this_process)
print(server.pid, flush=True)
time.sleep(300)
"""


def test_a_server_ends_with_a_test_process_that_is_killed() -> None:
    process = subprocess.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    server = psutil.Process(int(process.stdout.readline()))
    process.kill()
    process.wait()
    assert psutil.wait_procs([server], timeout=20)[1] == []
