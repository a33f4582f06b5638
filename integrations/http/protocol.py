"""uvicorn's httptools protocol with what it lacks: bounds on a request's head and time, and refusals in JSON."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cotune.integrations.http.requests import RequestError, json_bytes

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
        self._head = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)
        self._closed.set_result(None)

    def on_message_begin(self) -> None:
        self._expect()
        self._head = 0
        super().on_message_begin()
        self.scope["cotune.connection"] = self._closed  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + 4)
        super().on_header(name, value)

    def on_message_complete(self) -> None:
        self._arrived()
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self._refuse(b"400 Bad Request", RequestError(400, msg, code="invalid_http"))

    def _expect(self) -> None:
        self._arrived()
        self._timer = self.loop.call_later(self._seconds, self._late)

    def _arrived(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
        else:
            error = RequestError(408, "The request did not arrive in time.", code="timeout")
            self._refuse(b"408 Request Timeout", error)

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > MAX_HEAD:
            raise ValueError(f"the head has more than {MAX_HEAD} bytes")

    def _refuse(self, status: bytes, error: RequestError) -> None:
        body = json_bytes(error.body())
        head = b"HTTP/1.1 %s\r\ncontent-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
        self.transport.write(head % (status, len(body)) + body)
        self.transport.close()
