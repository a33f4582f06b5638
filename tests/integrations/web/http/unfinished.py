"""Clients that never finish the bodies of their requests."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Iterator

from cotune.integrations.web.http.requests import SMALL_BODY, BodyRoom


@contextlib.contextmanager
def unfinished_bodies(
    url: str, path: str, room: BodyRoom, kind: str, *headers: str, count: int, largest: int
) -> Iterator[None]:
    """Send `count` requests whose bodies are announced with `largest` bytes and end after three quarters of them. The
    server may hold no more of them than its room and a small part of each, refuses the others, and holds nothing once
    they are gone."""
    size = largest * 3 // 4
    host, port = url.removeprefix("http://").split(":")
    head = "\r\n".join(
        [
            f"POST {path} HTTP/1.1",
            f"host: {host}:{port}",
            f"content-type: {kind}",
            f"content-length: {largest}",
            *headers,
        ]
    )
    connections = []
    try:
        for _ in range(count):
            connection = socket.create_connection((host, int(port)))
            connection.settimeout(5)
            connections.append(connection)
            with contextlib.suppress(OSError):  # refused, and closed, before all is sent
                connection.sendall(f"{head}\r\n\r\n".encode() + b" " * size)
        wait_until(lambda: room.bytes > room.most - largest)
        assert room.bytes <= room.most + count * SMALL_BODY
        assert sum(b" 429 " in _answer(connection) for connection in connections) >= count - room.most // size - 1
        yield
    finally:
        for connection in connections:
            connection.close()
    wait_until(lambda: room.bytes == 0)


def _answer(connection: socket.socket) -> bytes:
    connection.settimeout(0.5)
    with contextlib.suppress(OSError):
        return connection.recv(1000)
    return b""


def wait_until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)
