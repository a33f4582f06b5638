"""What a request that takes long costs others: how long another client waits, and how long the event loop works."""

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
from dataclasses import dataclass
from pathlib import Path

from tests.integrations import loop_time
from tests.ports import free_port

PATIENCE = 1.0
"""Most seconds that the other client may wait."""
ATTEMPTS = 3
"""The machine may be busy: one attempt in which nobody waited shows that nobody has to."""


@dataclass(frozen=True)
class Served:
    """A server that runs: its port, and how long its event loop worked without a pause."""

    port: int
    loop: loop_time.Longest


@dataclass(frozen=True)
class Held:
    """What a request cost others, in seconds: the wait of another client, and the loop's work without a pause."""

    wait: float
    work: float

    def __bool__(self) -> bool:
        return self.wait >= PATIENCE or self.work >= loop_time.MOST


@contextlib.contextmanager
def server(folder: Path, *words: str) -> Iterator[Served]:
    """`cotune WORDS --port PORT` as a process of its own, once it answers."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-P", loop_time.__file__, str(folder / "loop"), *words, "--port", str(port)]
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
        yield Served(port, loop_time.Longest(folder / "loop"))
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


def held_up(served: Served, attack: Callable[[], object]) -> Held:
    """What `attack` cost others while it ran and shortly after, in the best of some attempts."""
    found = []
    for _ in range(ATTEMPTS):
        attacking = threading.Thread(target=attack)
        served.loop.reset()
        attacking.start()
        worst, after = 0.0, 0
        while after < 10:  # what a server does about a request may come after its answer
            after += not attacking.is_alive()
            begun = time.monotonic()
            health(served.port)
            worst = max(worst, time.monotonic() - begun)
            time.sleep(0.01)
        attacking.join()
        found.append(Held(worst, served.loop.seconds))
        if not found[-1]:
            break
    return Held(min(held.wait for held in found), min(held.work for held in found))
