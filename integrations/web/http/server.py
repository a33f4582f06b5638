"""Runs an ASGI application on uvicorn, in a thread of its own: start, stop, who may connect, bounds of requests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cotune.errors import ConfigError
from cotune.integrations.web.http.requests import RequestError, is_loopback, json_bytes
from cotune.runtime.default_threads import grow_threads
from cotune.runtime.interrupts import ends_as_interrupts

T = TypeVar("T")
Opening = Callable[[], AbstractAsyncContextManager[tuple[ASGIApp, T]]]

logger = logging.getLogger("cotune.http")
GRACE = 3
"""Seconds in which running requests must end after the server has received the order to stop."""


@dataclass(frozen=True)
class RunningServer(Generic[T]):
    """A server that accepts requests at `url`, which has no path. `opened` was opened together with its application."""

    url: str
    port: int
    opened: T
    _ended: threading.Event

    def wait(self, seconds: float | None = None) -> bool:
        """Block until the server stops, at most for `seconds`. Returns whether it has stopped."""
        return self._ended.wait(seconds)


@contextlib.contextmanager
def running(
    opening: Opening[T],
    *,
    host: str,
    port: int,
    token: str | None,
    name: str,
    date_header: bool = True,
    seconds: float = 60.0,
) -> Iterator[RunningServer[T]]:
    """Run a server in a thread of its own while the block runs. The block begins when the server accepts requests.

    `opening` opens the application in the server's event loop, and closes it with the server. Port 0 takes any free
    port. A request must arrive in `seconds`. Raises ConfigError for an address that is not available or that other
    machines could reach without a `token`, and all errors of `opening`.
    """
    check_access(host, token)
    listener = _bind(host, port)
    # The two threads tell each other through futures: the server's thread that the server is ready (or its error), the
    # caller's thread that it does not wait for that any more.
    ready: Future[tuple[uvicorn.Server, T]] = Future()
    caller_left: Future[None] = Future()
    # `join` of a thread is not used. After an interrupted `join`, Python takes the running thread for an ended one.
    ended = threading.Event()

    def run_server() -> None:
        """Serve in this thread until the server is stopped."""
        try:
            with asyncio.Runner(loop_factory=uvicorn.Config("", log_config=None).get_loop_factory()) as runner:
                loop = runner.get_loop()
                grow_threads(loop)
                task = loop.create_task(_serve(opening, listener, ready, date_header, seconds))
                caller_left.add_done_callback(lambda _: loop.call_soon_threadsafe(task.cancel))
                loop.run_until_complete(task)
        except BaseException as error:
            is_serving = ready.done()
            if caller_left.done():
                return  # nothing waits for the error
            if is_serving:
                logger.exception("The server stopped.")
                raise
            ready.set_exception(error)  # raised where the caller waits for the server
        finally:
            ended.set()

    threading.Thread(target=run_server, name=name, daemon=True).start()
    try:
        bound_port = listener.getsockname()[1]
        host_in_url = f"[{host}]" if ":" in host else host
        _, opened = ready.result()
        yield RunningServer(f"http://{host_in_url}:{bound_port}", bound_port, opened, ended)
    finally:
        if not ready.done():
            # The wait for the server was interrupted, so the thread cancels its start.
            caller_left.set_result(None)
        elif ready.exception() is None:
            server, _ = ready.result()
            server.should_exit = True
        ended.wait()
        listener.close()


@contextlib.contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Leave the body, in which a server runs, without an error at Ctrl-C, SIGTERM or SIGHUP.

    Objects that exist at its start are no longer searched for garbage, as all requests would wait for the search.
    """
    gc.collect()
    gc.freeze()
    with ends_as_interrupts(), contextlib.suppress(KeyboardInterrupt):
        yield


def check_access(host: str, token: str | None) -> None:
    """Raises ConfigError when the server could be reached from outside without a token."""
    if token is not None and not token.strip():
        raise ConfigError("token", token, "is empty", "Leave --token out to serve on loopback without one.")
    if token is None and not is_loopback(f"[{host}]" if ":" in host else host):
        raise ConfigError("host", host, "can be reached from other machines, which needs a token", "Add --token TOKEN.")


class _Server(uvicorn.Server):
    """Says when it accepts requests."""

    def __init__(self, config: uvicorn.Config, started: Callable[[uvicorn.Server], None]) -> None:
        super().__init__(config)
        self._started = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started(self)


async def _serve(
    opening: Opening[T], listener: socket.socket, ready: Future[Any], date_header: bool, seconds: float
) -> None:
    """Open the application and serve it on `listener`. `ready` gets the server once it accepts requests."""
    async with opening() as (app, opened):
        config = uvicorn.Config(
            app,
            http=functools.partial(BoundedProtocol, seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=date_header,
            backlog=2048,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=GRACE,
        )
        await _Server(config, lambda server: ready.set_result((server, opened))).serve(sockets=[listener])


def _bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address. Raises ConfigError if the address is taken or invalid."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError("port", f"{host}:{port}", f"cannot be bound ({reason})", "Choose another.") from None
    return listener


MAX_HEAD = 64 << 10
"""Most bytes of a request's line and headers; httptools itself takes any number."""


class BoundedProtocol(HttpToolsProtocol):
    """One connection. A request has `seconds` to arrive, from its first byte to its last.

    `scope["cotune.connection"]` is a future that is done once the connection is closed.
    """

    def __init__(self, seconds: float, **options: Any) -> None:
        super().__init__(**options)
        self._seconds = seconds
        self._closed: asyncio.Future[None] = self.loop.create_future()
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)
        self._closed.set_result(None)

    def on_message_begin(self) -> None:
        self._start_timer()
        self._head_bytes = 0
        super().on_message_begin()
        self.scope["cotune.connection"] = self._closed  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count_head_bytes(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head_bytes(len(name) + len(value) + len(b": \r\n"))
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._stop_timer()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", RequestError(400, msg, code="invalid_http"))

    def _start_timer(self) -> None:
        """Start the time in which the next request, or the rest of this one, must arrive."""
        self._stop_timer()
        self._timer = self.loop.call_later(self._seconds, self._refuse_late_request)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _refuse_late_request(self) -> None:
        # A response that has begun cannot become an error.
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            error = RequestError(408, "The request did not arrive in time.", code="timeout")
            self._refuse(b"408 Request Timeout", error)

    def _count_head_bytes(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > MAX_HEAD:
            raise ValueError(f"the head has more than {MAX_HEAD} bytes")

    def _refuse(self, status: bytes, error: RequestError) -> None:
        body = json_bytes(error.body())
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
