"""Which addresses an application connects to by itself: a stub answers its models, so any but that of cotune's own
gateway is something else. A host is told by the name that was looked up, whether or not it was found."""

from __future__ import annotations

import functools
import ipaddress
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from cotune.context import current_episode

_LOOKED_UP, _CONNECTED = _EVENTS = ("socket.getaddrinfo", "socket.connect")
_watching: list[Counter[str]] = []


@contextmanager
def watched_connections() -> Iterator[Counter[str]]:
    """Count the connections that episodes try to open in here, by `host:port`."""
    _hook()
    found: Counter[str] = Counter()
    _watching.append(found)
    try:
        yield found
    finally:
        _watching.remove(found)


@functools.cache
def _hook() -> None:
    """Python keeps an audit hook for good; it costs one look at a list."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watching or event not in _EVENTS or (episode := current_episode.get()) is None:
        return
    address = arguments[:2] if event == _LOOKED_UP else arguments[1]
    if not isinstance(address, tuple) or len(address) < 2:
        return
    host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in address[:2])
    own = urlsplit(episode.gateway or "")
    if port in ("0", "None") or (host, port) == (own.hostname, str(own.port)):
        return
    found = _watching[-1]
    if event == _LOOKED_UP:
        counted = not _is_ip(host)
    else:  # an address that was looked up was counted by its name
        counted = all(_is_ip(known) or at != port for known, _, at in (name.rpartition(":") for name in found))
    if counted:
        found[f"{host}:{port}"] += 1


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
