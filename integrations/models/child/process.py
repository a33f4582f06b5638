"""The child process of an engine, from its start until it has certainly ended."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from cotune.errors import SamplerError
from cotune.integrations.models.child.wire import CLOSE, Answer, Command, engine_gone, receive, send
from cotune.runtime.interrupts import interrupts_held
from cotune.runtime.openmp import spin_briefly

Receive = Callable[[list[Answer]], None]
Fail = Callable[[SamplerError], None]

GROUP_SECONDS = 5.0
"""How long to wait until killed processes have ended. They never disappear in a container whose first process does
not collect them."""


class ProcessHost:
    """An engine in a child process: a new interpreter, which imports no module of the application.

    Two threads write to the pipe and read from it, so that no event loop blocks. The process watches the pipe, and
    so it ends whenever the application has ended. `receive` and `fail` are called in the reading thread.
    """

    body = ""
    """The module that the process runs. Its argument is the file descriptor of the process's end of the pipe."""
    environment: Mapping[str, str] = {}
    """Variables of the process. The application's environment has precedence."""
    start_seconds = 600.0
    """How long the process may take to load its model."""
    close_seconds = 10.0
    """How long the process may take to end after it has received the command."""
    has_children = False
    """Whether the engine starts processes itself. The engine then has a session without the application's terminal,
    and all its processes can be killed together."""

    def __init__(self, receive: Receive, fail: Fail) -> None:
        """A child process and the pipe to it. `receive` gets each message from it, and `fail` the reason if it ends.

        A thread writes and another reads, so that a busy child does not block the event loop.
        """
        self._receive = receive
        self._fail = fail
        self._closing = False
        self._killed = False
        self._outbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        parent_socket, child_socket = socket.socketpair()
        self._pipe = Connection(parent_socket.detach())
        self._child_socket = child_socket
        self._process: subprocess.Popen[bytes] | None = None
        self._threads = [threading.Thread(target=t, daemon=True) for t in (self._write, self._read)]

    def start(self, source: Any) -> None:
        """Start the process, send it `source` and wait until it serves. Raises SamplerError, or the error with which
        the process answers."""
        fd = self._child_socket.fileno()
        environment = {**self.environment, **os.environ}
        spin_briefly(environment)
        with interrupts_held():  # the application handles Ctrl-C and closes the pipe
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", self.body, str(fd)],
                stdin=subprocess.DEVNULL,
                pass_fds=[fd],
                env=environment,
                start_new_session=self.has_children,
            )
            self._process = process
        self._child_socket.close()
        # `kill` came from another thread before there was a process to end. The pipe then reports the end below.
        if self._killed:
            self._end_at_once()
        try:
            self._pipe.send(source)
            if not self._pipe.poll(self.start_seconds):
                self._end_at_once()
                self._wait_and_end()
                raise SamplerError(
                    f"The sampler did not start in {self.start_seconds:g} s.", "Check the machine's load."
                )
            start_error = self._pipe.recv()  # None if the engine serves
        except (EOFError, OSError):
            self._wait_and_end()
            raise engine_gone(f"its process ended with code {process.returncode} while starting") from None
        if start_error is not None:
            self._wait_and_end()
            raise start_error
        for thread in self._threads:
            thread.start()

    def send(self, command: Command) -> None:
        self._outbox.put(command)

    def close(self) -> None:
        """End the process, and wait until it has ended."""
        assert self._process is not None
        self._closing = True
        self.send(CLOSE)
        self._wait_and_end()
        for thread in self._threads:
            thread.join()
        self._pipe.close()

    def kill(self) -> None:
        """End the process at once, also one that is starting."""
        self._killed = True
        if self._process is not None:
            self._end_at_once()

    def remove_leftovers(self) -> None:
        """Remove the files that killed processes of the engine have left on this machine."""

    def _wait_and_end(self) -> None:
        """Wait until the process has ended by itself, but not for longer than `close_seconds`."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self.close_seconds)
        self._end_at_once()
        self._process.wait()
        # No process waits for those that the engine has started, and they occupy memory until they have ended.
        deadline = time.monotonic() + GROUP_SECONDS
        while self.has_children and _is_group(self._process.pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        self.remove_leftovers()

    def _end_at_once(self) -> None:
        """Kill the process and the processes that it has started, if any of them still run."""
        assert self._process is not None
        if self.has_children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.kill()

    def _write(self) -> None:
        """Loop of the writing thread: send all waiting commands together, until the process closes."""
        try:
            while True:
                commands = [self._outbox.get()]
                while not self._outbox.empty():
                    commands.append(self._outbox.get())
                send(self._pipe, commands)
                if CLOSE in commands:
                    return
        except OSError:
            return  # the process has ended, and the reading thread reports that

    def _read(self) -> None:
        """Loop of the reading thread: hand over replies, and report the end of the process.

        A reply without an id is an error that ends the engine, and so all requests.
        """
        assert self._process is not None
        try:
            while True:
                replies = receive(self._pipe)
                errors_of_engine = [reply.error for reply in replies if not reply.id]
                if errors_of_engine and errors_of_engine[0] is not None:
                    self._fail(errors_of_engine[0])
                    break
                self._receive(replies)
        except (EOFError, OSError):
            self._process.wait()
        if not self._closing:
            self._wait_and_end()
            self._fail(engine_gone(f"its process ended with code {self._process.returncode}"))
        self._outbox.put(CLOSE)  # ends the writing thread


def _is_group(number: int) -> bool:
    """Whether a process group has a member."""
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


def wait_for_hangup(pipe: int) -> None:
    """Return as soon as the other end of a pipe is closed, that is, when the application has ended."""
    poll = select.poll()
    poll.register(pipe, 0)  # only the hang-up is reported
    poll.poll()
