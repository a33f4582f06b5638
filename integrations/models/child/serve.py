"""The program of a child process: it opens any asynchronous sampler and answers the commands from the pipe."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import signal
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from cotune.errors import CotuneError, SamplerError, error_line
from cotune.integrations.models.child.process import wait_for_hangup
from cotune.integrations.models.child.wire import CLOSE, Answer, Command, receive, send
from cotune.user_objects import load_object

ORPHAN_SECONDS = 20.0
"""How long an engine may take to close after its application has ended. All its processes are killed afterwards."""


class SamplerSource(NamedTuple):
    """An async function that opens a sampler, as "module:name", and its arguments."""

    factory: str
    arguments: dict[str, Any]


class ChildServer:
    """Opens a sampler and answers commands until the pipe closes."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._sampler: Any = None
        self._running: dict[int, asyncio.Task[None]] = {}
        self._answers: queue.SimpleQueue[Answer | None] = queue.SimpleQueue()

    async def serve(self, source: SamplerSource) -> None:
        """Open the sampler, report whether that succeeded, and answer commands until the application closes the
        pipe.
        """
        loop = asyncio.get_running_loop()
        closing = asyncio.Event()
        threading.Thread(target=self._end_with_application, args=(loop, closing), daemon=True).start()
        try:
            open_sampler = load_object("factory", source.factory, "my_engine:open")
            self._sampler = await open_sampler(**source.arguments)
        except CotuneError as error:
            self._pipe.send(error)
            return
        except Exception as error:  # noqa: BLE001
            self._pipe.send(SamplerError(f"The sampler did not start: {error_line(error)}.", "Read its log above."))
            return
        self._pipe.send(None)  # it serves

        # Reading and writing block, so two threads do it and never the event loop.
        writer = threading.Thread(target=self._write, daemon=True)
        writer.start()
        threading.Thread(target=self._read, args=(loop, closing), daemon=True).start()
        await closing.wait()
        await self._sampler.aclose()
        await asyncio.gather(*self._running.values(), return_exceptions=True)
        self._answers.put(None)  # ends the writing thread
        await asyncio.to_thread(writer.join)

    def _read(self, loop: asyncio.AbstractEventLoop, closing: asyncio.Event) -> None:
        """Loop of the reading thread: hand commands over to the event loop."""
        with contextlib.suppress(EOFError, OSError):  # the application is gone
            while True:
                for command in receive(self._pipe):
                    if command == CLOSE:
                        loop.call_soon_threadsafe(closing.set)
                    else:
                        loop.call_soon_threadsafe(self._take, command)

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the application is gone
            while (answer := self._answers.get()) is not None:
                send(self._pipe, [answer])

    def _take(self, command: Command) -> None:
        """Begin a command in the event loop; a `cancel` ends the earlier command with its id."""
        if command.method == "cancel":
            if command.id in self._running:
                self._running[command.id].cancel()
            return
        task = asyncio.get_running_loop().create_task(self._answer(command))
        self._running[command.id] = task
        task.add_done_callback(lambda _: self._running.pop(command.id, None))

    async def _answer(self, command: Command) -> None:
        """Run a command and queue its result. An error of another library becomes a SamplerError with its text."""
        try:
            value = await getattr(self._sampler, command.method)(*command.arguments)
            self._answers.put(Answer(command.id, value))
        except CotuneError as error:
            self._answers.put(Answer(command.id, error=error))
        except Exception as error:  # noqa: BLE001
            failed = SamplerError(f"The sampler failed: {error_line(error)}.", "Read its log above.")
            self._answers.put(Answer(command.id, error=failed))

    def _end_with_application(self, loop: asyncio.AbstractEventLoop, closing: asyncio.Event) -> None:
        """Wait until the application has ended, close the sampler, then kill this process and all that it started."""
        wait_for_hangup(self._pipe.fileno())
        if self._sampler is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(closing.set)
            time.sleep(ORPHAN_SECONDS)
        if os.getpgrp() == os.getpid():  # only this engine is in the group, see `ProcessHost.has_children`
            os.killpg(0, signal.SIGKILL)
        os._exit(0)


if __name__ == "__main__":
    connection = Connection(int(sys.argv[1]))
    with contextlib.suppress(ConnectionError, EOFError):  # the application has ended meanwhile
        asyncio.run(ChildServer(connection).serve(connection.recv()))
