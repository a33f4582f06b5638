"""httptools, the HTTP parser under uvicorn, with refusals in JSON and bounds on a request's bytes and time."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

from cotune.errors import CotuneError

MAX_HEAD = 64 << 10
"""Most bytes of a request's line and headers."""
GRACE = 1.0
"""Seconds that a body has longer than a head: the application answers a late one first."""


@functools.cache
def protocol_class(seconds: float) -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`: a request has `seconds` to arrive.

    Raises CotuneError where httptools is not installed: uvicorn's other parser waits for a head without an end.
    """
    try:
        from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
    except ModuleNotFoundError as error:
        raise CotuneError("A server needs httptools, which is not installed.", "pip install httptools") from error
    return type("Protocol", (_Timed, _Bounded, _Refusing, HttpToolsProtocol), {"seconds": seconds})


class _Refusing:
    """Answers what is not HTTP with a JSON error, and closes the connection."""

    transport: Any

    def send_400_response(self, msg: str) -> None:
        refusal = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"invalid_http"}}'
        body = refusal % msg.encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class _Timed:
    """Closes the connection of a request that does not arrive: of a head in time, and of a body a little later, when
    the application has not refused it by then."""

    seconds: float
    loop: asyncio.AbstractEventLoop
    transport: Any
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)  # type: ignore[misc]
        self._within(self.seconds, True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)  # type: ignore[misc]

    def on_message_begin(self) -> None:
        self._within(self.seconds, True)
        super().on_message_begin()  # type: ignore[misc]

    def on_headers_complete(self) -> None:
        self._within(self.seconds + GRACE, False)
        super().on_headers_complete()  # type: ignore[misc]

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()  # type: ignore[misc]

    def _within(self, seconds: float, head: bool) -> None:
        self._arrived()
        self._timer = self.loop.call_later(seconds, self._late, head)

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self, head: bool) -> None:
        if head:
            body = b'{"error":{"message":"The request did not arrive in time.","type":"invalid_request_error",'
            body += b'"param":null,"code":"timeout"}}'
            lines = b"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\nconnection: close\r\n"
            self.transport.write(lines + b"content-length: %d\r\n\r\n" % len(body) + body)
        self.transport.close()


class Connection:
    """A client's connection, as requests see it in `scope["cotune.connection"]`."""

    def __init__(self) -> None:
        self.closed = False
        self._then: list[Callable[[], None]] = []

    def on_close(self, then: Callable[[], None]) -> None:
        """Call `then` when it is closed."""
        self._then.append(then)

    def close(self) -> None:
        self.closed = True
        for then in self._then:
            then()


class _Bounded:
    """Counts the bytes of the head as they come; httptools itself takes any number."""

    _head = 0
    scope: Any

    def connection_made(self, transport: asyncio.Transport) -> None:
        self._connection = Connection()
        super().connection_made(transport)  # type: ignore[misc]

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)  # type: ignore[misc]
        self._connection.close()

    def on_message_begin(self) -> None:
        self._head = 0
        super().on_message_begin()  # type: ignore[misc]
        self.scope["cotune.connection"] = self._connection

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)  # type: ignore[misc]

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)  # type: ignore[misc]

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise ValueError(f"the head has more than {MAX_HEAD} bytes")
