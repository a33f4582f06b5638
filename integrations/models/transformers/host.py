"""The child process or the thread of the application in which the engine runs."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from cotune.errors import CotuneError, error_line
from cotune.integrations.models.child.process import Fail, ProcessHost, Receive, wait_for_hangup
from cotune.integrations.models.child.wire import CLOSE, Answer, Command, engine_gone, receive, send
from cotune.integrations.models.folder.folder import TRANSFORMERS_LOCK
from cotune.integrations.models.transformers.wire import ModelSource

log = logging.getLogger(__name__)

PAGES = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
"""Variables of glibc. With them, a decode step uses the memory pages of the previous step again."""


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

        with TRANSFORMERS_LOCK:
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
        """End the engine if it has started, but do not wait for its end."""
        if self._engine is not None:
            self.send(CLOSE)

    def _run(self) -> None:
        try:
            self._engine.run()
        except BaseException as error:
            log.exception("The sampler's engine failed.")
            self._fail(engine_gone(error_line(error)))


class TransformersProcess(ProcessHost):
    """The engine in a child process."""

    body = __name__
    environment: Mapping[str, str] = PAGES


def serve(pipe: Connection) -> None:
    """Run the engine in the sampler's process."""
    threading.Thread(target=_end_with_application, args=(pipe.fileno(),), daemon=True).start()
    try:
        source = pipe.recv()
    except (EOFError, OSError):
        return  # the application has ended before it had sent all of the source
    from cotune.integrations.models.transformers.engine import load

    try:
        engine = load(source, lambda replies: send(pipe, replies))
    except CotuneError as error:
        pipe.send(error)
        return
    pipe.send(None)

    def feed() -> None:
        with contextlib.suppress(EOFError, OSError):  # the application has ended
            while True:
                for command in receive(pipe):
                    engine.submit(command)

    threading.Thread(target=feed, daemon=True).start()
    try:
        engine.run()
    except BaseException as error:
        send(pipe, [Answer(0, error=engine_gone(error_line(error)))])
        raise


def _end_with_application(pipe: int) -> None:
    """End this process at once when the other end of the pipe is closed."""
    wait_for_hangup(pipe)
    os._exit(0)


if __name__ == "__main__":
    with contextlib.suppress(ConnectionError, EOFError):  # the application has ended meanwhile
        serve(Connection(int(sys.argv[1])))
