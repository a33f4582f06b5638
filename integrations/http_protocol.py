"""The HTTP parser under uvicorn: httptools where it is installed, with refusals in JSON and a bound on headers."""

from __future__ import annotations

import asyncio
import functools
import importlib.util
from collections.abc import Callable
from typing import Any

MAX_HEAD = 64 << 10
"""Most bytes of a request's line and headers."""


@functools.cache
def protocol_class() -> type[asyncio.Protocol]:
    """The protocol class for `uvicorn.Config(http=...)`. h11, the other parser, has a bound of its own."""
    if importlib.util.find_spec("httptools") is None:
        from uvicorn.protocols.http.h11_impl import H11Protocol

        return type("Protocol", (_Refusing, H11Protocol), {})
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

    return type("Protocol", (_Bounded, _Refusing, HttpToolsProtocol), {})


class _Refusing:
    """Answers what is not HTTP with a JSON error, and closes the connection."""

    transport: Any

    def send_400_response(self, msg: str) -> None:
        refusal = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":"invalid_http"}}'
        body = refusal % msg.encode()
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
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
