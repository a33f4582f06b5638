"""Where the engine runs: a process of its own, or a thread of the application."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from cotune.errors import CotuneError, SamplerError, error_line
from cotune.integrations.models.transformers.wire import Answer, Command, ModelSource, receive, send
from cotune.runtime.interrupts import interrupts_held
from cotune.runtime.openmp import spin_briefly

log = logging.getLogger(__name__)

Receive = Callable[[list[Answer]], None]
Fail = Callable[[SamplerError], None]

PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Of glibc: a decode step uses the pages of the step before again, instead of asking the system for others."""
START_SECONDS = 600.0
"""How long a process may take to load its model."""

_LOADING = threading.Lock()
"""transformers loads a model under settings of the whole process: two at once spoil each other."""


CLOSE = Command("close")


class ThreadHost:
    """The engine in a thread of this process. `send` never blocks; `receive` and `fail` are called in that thread."""

    def __init__(self, receive: Receive, fail: Fail) -> None:
        self._receive = receive
        self._fail = fail
        self._engine: Any = None
        self._thread = threading.Thread(target=self._run, name="cotune-sampler", daemon=True)

    def start(self, source: ModelSource) -> None:
        """Load the model and serve it. Raises ConfigError, SamplerError."""
        from cotune.integrations.models.transformers.engine import load

        with _LOADING:
            self._engine = load(source, self._receive)
        self._thread.start()

    def send(self, command: Command) -> None:
        self._engine.submit(command)

    def close(self) -> None:
        """End the engine, and wait until it has ended."""
        if self._engine is not None:
            self.kill()
            self._thread.join()

    def kill(self) -> None:
        """End the engine, if it has started, without waiting for it."""
        if self._engine is not None:
            self.send(CLOSE)

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as error:
            log.exception("The sampler's engine failed.")
            self._fail(_gone(error_line(error)))


class ProcessHost:
    """As `ThreadHost`, with the engine in a process of its own.

    A writer and a reader thread keep the pipe away from event loops. The process is a fresh interpreter that imports
    nothing of the application, and ends with it.
    """

    def __init__(self, receive: Receive, fail: Fail) -> None:
        self._receive = receive
        self._fail = fail
        self._closing = False
        self._killed = False
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        ours, theirs = socket.socketpair()
        self._pipe, self._theirs = Connection(ours.detach()), theirs
        self._process: subprocess.Popen[bytes] | None = None
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._write, self._read)]

    def start(self, source: ModelSource) -> None:
        """Start the process and wait until it serves the model. Raises ConfigError, SamplerError."""
        fd = self._theirs.fileno()
        environment = {**PAGES, **os.environ}
        spin_briefly(environment)
        with interrupts_held():  # Ctrl-C is the application's to handle; it closes the pipe
            process = self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(fd)], pass_fds=[fd], env=environment
            )
        self._theirs.close()
        if self._killed:
            process.kill()
        try:
            self._pipe.send(source)
            if not self._pipe.poll(START_SECONDS):
                process.kill()
                raise SamplerError(f"The sampler did not start in {START_SECONDS} s.", "Look at the machine's load.")
            refused = self._pipe.recv()
        except (EOFError, OSError):
            raise _gone(f"its process ended with code {process.wait()} while starting") from None
        if refused is not None:
            process.wait()
            raise refused
        for thread in self._threads:
            thread.start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        assert self._process is not None
        self._closing = True
        self.send(CLOSE)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join()
        self._pipe.close()

    def kill(self) -> None:
        """End the process at once, also one that is starting."""
        self._killed = True
        if self._process is not None:
            self._process.kill()

    def _write(self) -> None:
        try:
            while True:
                commands = [self._outbox.get()]
                while not self._outbox.empty():
                    commands.append(self._outbox.get())
                send(self._pipe, commands)
                if CLOSE in commands:
                    return
        except OSError:
            return  # the process is gone: the reader reports it

    def _read(self) -> None:
        assert self._process is not None
        try:
            while True:
                replies = receive(self._pipe)
                if gone := next((reply.error for reply in replies if not reply.id), None):
                    self._fail(gone)
                    break
                self._receive(replies)
        except (EOFError, OSError):
            self._process.wait()
        if not self._closing:
            self._fail(_gone(f"its process ended with code {self._process.returncode}"))
        self._outbox.put(CLOSE)  # lets the writer end


def serve(pipe: Connection) -> None:
    """Body of the sampler's process."""
    threading.Thread(target=_end_with_application, args=(pipe.fileno(),), daemon=True).start()
    try:
        source = pipe.recv()
    except (EOFError, OSError):
        return  # the application has ended before all of it was sent
    from cotune.integrations.models.transformers.engine import load

    try:
        engine = load(source, lambda replies: send(pipe, replies))
    except CotuneError as error:
        pipe.send(error)
        return
    pipe.send(None)

    def feed() -> None:
        with contextlib.suppress(EOFError, OSError):  # the application is gone
            while True:
                for command in receive(pipe):
                    engine.submit(command)

    threading.Thread(target=feed, daemon=True).start()
    try:
        engine.run()
    except BaseException as error:
        send(pipe, [Answer(0, error=_gone(error_line(error)))])
        raise


def _end_with_application(pipe: int) -> None:
    """End this process once the other end of the pipe is closed, whatever it is doing."""
    poll = select.poll()
    poll.register(pipe, 0)  # tells of the end alone
    poll.poll()
    os._exit(0)


def _gone(reason: str) -> SamplerError:
    return SamplerError(f"The sampler's engine is gone: {reason}.", "Read the error, then open a new sampler.")


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, EOFError):  # the application has ended meanwhile
        serve(Connection(int(sys.argv[1])))
