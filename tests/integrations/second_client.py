"""How long a client of a server waits while another one sends it something that takes long."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.ports import free_port

PATIENCE = 1.0
"""Most seconds that the other client may wait."""
ATTEMPTS = 3
"""The machine may be busy: one attempt in which nobody waited shows that nobody has to."""


@contextlib.contextmanager
def server(folder: Path, *words: str) -> Iterator[int]:
    """`cotune WORDS --port PORT` as a process of its own; its port, once it answers."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", "-c", "from cotune_command import run; run()", *words, "--port", str(port)]
        process = subprocess.Popen(
            command, cwd=folder, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )
    try:
        until = time.monotonic() + 120
        while True:
            with contextlib.suppress(OSError):
                health(port)
                break
            assert process.poll() is None and time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.1)
        yield port
        assert process.poll() is None, (folder / "log").read_text()
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def health(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()


def post(port: int, body: bytes, **headers: str) -> tuple[int, bytes]:
    """Status and body of the answer to a chat request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    connection.request("POST", "/v1/chat/completions", body, given)
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def longest_wait(port: int, attack: Callable[[], object]) -> float:
    """Seconds that the other client waited most for an answer while `attack` ran, and shortly after."""
    best = float("inf")
    for _ in range(ATTEMPTS):
        attacking = threading.Thread(target=attack)
        attacking.start()
        worst, after = 0.0, 0
        while after < 10:  # what a server does about a request may come after its answer
            after += not attacking.is_alive()
            begun = time.monotonic()
            health(port)
            worst = max(worst, time.monotonic() - begun)
            time.sleep(0.01)
        attacking.join()
        best = min(best, worst)
        if best < PATIENCE:
            break
    return best
