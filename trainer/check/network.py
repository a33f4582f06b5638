"""Which addresses an application connects to by itself: a stub answers its models, so any but that of cotune's own
gateway is something else."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from cotune.context import current_episode

_watching: list[Counter[str]] = []


@contextmanager
def watched_connections() -> Iterator[Counter[str]]:
    """Count the connections that episodes open in here, by `host:port`."""
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
    if not _watching or event != "socket.connect" or (episode := current_episode.get()) is None:
        return
    address = arguments[1]
    own = episode.gateway and urlsplit(episode.gateway)
    if own and isinstance(address, tuple) and address[:2] == (own.hostname, own.port):
        return
    if isinstance(address, tuple) and len(address) >= 2:
        _watching[-1][f"{address[0]}:{address[1]}"] += 1
