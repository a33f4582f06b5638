"""Other acts of an application in a dry run: connections that it opens, questions to a person, and exceptions that a
framework logs instead of raising them."""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cotune.recording.app_parts import Parts
from cotune.recording.context import current_episode
from cotune.runtime.user_code import is_library_file, thread_place

_LOOKED_UP, _CONNECTED, _ASKED = _EVENTS = ("socket.getaddrinfo", "socket.connect", "builtins.input")


class Watch(Parts):
    """What the episodes of a dry run do: parts of the application that run, connections, questions and errors.

    An episode has it as `LiveEpisode.parts`, by which the audit hook finds it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.connections: dict[str, Counter[str]] = {}
        """By episode id: connections by `host:port`, except connections to the gateway, which answers instead of
        models. A host has the name that was looked up, whether or not it exists."""
        self.asked: dict[str, str] = {}
        """By episode id: how and where a person was asked."""
        self.logged: dict[str, list[BaseException]] = {}
        """By episode id: exceptions that a framework logged."""


@contextmanager
def watched() -> Iterator[Watch]:
    """Watch the episodes inside the block that have the result as `parts`. Nobody is at the keyboard: standard input is
    empty."""
    _hook()
    watch = Watch()
    handler = _Raised(watch)
    logging.getLogger().addHandler(handler)
    try:
        with _empty_input():
            yield watch
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def _empty_input() -> Iterator[None]:
    """Standard input without a line, for this process and its children: a question gets no answer and ends at once."""
    before = sys.stdin
    try:
        saved_input = os.dup(0)
    except OSError:  # closed already
        saved_input = None
    with Path(os.devnull).open() as nothing:
        os.dup2(nothing.fileno(), 0)
        sys.stdin = nothing
        try:
            yield
        finally:
            sys.stdin = before
            if saved_input is None:
                os.close(0)
            else:
                os.dup2(saved_input, 0)
                os.close(saved_input)


class _Raised(logging.Handler):
    """Collects the exceptions that are logged in an episode."""

    def __init__(self, watch: Watch) -> None:
        super().__init__(logging.WARNING)
        self._watch = watch

    def emit(self, record: logging.LogRecord) -> None:
        """Note an error that the application or its framework logged instead of raising it."""
        error = record.exc_info[1] if record.exc_info else None
        episode = current_episode.get()
        if error is None or episode is None or record.name.startswith("cotune"):
            return
        errors = self._watch.logged.setdefault(episode.id, [])
        if not isinstance(error, asyncio.CancelledError) and error not in errors:
            errors.append(error)


@functools.cache
def _hook() -> None:
    """Add the audit hook. Python cannot remove it again; outside of a dry run it finds no episode with a `Watch`."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: note that the running episode asks for input or connects to a host. Connections to cotune's own
    gateway do not count."""
    if event not in _EVENTS:
        return
    episode = current_episode.get()
    watch = episode.parts if episode is not None else None
    if episode is None or not isinstance(watch, Watch):
        return
    if event == _ASKED:  # Python's event of input(), with the prompt as its argument
        prompt = arguments[0]
        # Frame 0 is this hook, and frame 1 the code that called input().
        where = thread_place(sys._getframe(1)).partition(": ")[0]
        where = "" if is_library_file(where) else f" at {where}"
        watch.asked.setdefault(episode.id, f"input({'' if prompt is None else repr(prompt)}){where}")
        return
    # getaddrinfo(host, port, ...) or connect(socket, address). Addresses of Unix sockets are no tuples.
    address = arguments[:2] if event == _LOOKED_UP else arguments[1]
    if not isinstance(address, tuple) or len(address) < 2:
        return
    host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in address[:2])
    gateway = urlsplit(episode.gateway or "")
    # Nothing is connected to without a port. Look-ups of the machine's own name, for example, have none.
    if port in ("0", "None") or (host, port) == (gateway.hostname, str(gateway.port)):
        return
    connections = watch.connections.setdefault(episode.id, Counter())
    if event == _LOOKED_UP:
        is_new = not _is_ip(host)
    else:  # an address that was looked up was counted by its name
        is_new = True
        for address in connections:
            counted_host, _, counted_port = address.rpartition(":")
            if counted_port == port and not _is_ip(counted_host):
                is_new = False
    if is_new:
        connections[f"{host}:{port}"] += 1


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
