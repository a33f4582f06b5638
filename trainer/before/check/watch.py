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
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from cotune.recording.app_parts import Parts
from cotune.recording.context import current_episode
from cotune.runtime.user_code import is_library_file, thread_place

# Names of audit events of Python.
_LOOKED_UP = "socket.getaddrinfo"
_CONNECTED = "socket.connect"
_ASKED = "builtins.input"


class Watch(Parts):
    """Collects the acts of the episodes of a dry run: parts of the application that run, connections, questions and
    errors.

    It is the `parts` of a `LiveEpisode`, by which the audit hook finds it.
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
    """Watch the episodes that run inside the block with the yielded object as their `parts`. Standard input is empty
    there, so that a question to a person gets no answer."""
    _add_audit_hook()
    watch = Watch()
    handler = _ErrorCollector(watch)
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


class _ErrorCollector(logging.Handler):
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
def _add_audit_hook() -> None:
    """Add the audit hook once. Python cannot remove it; outside of a dry run it finds no episode with a `Watch`."""
    sys.addaudithook(_audit)


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: note that the running episode asks for input, or connects to a host other than cotune's own
    gateway."""
    if event not in (_LOOKED_UP, _CONNECTED, _ASKED):
        return
    episode = current_episode.get()
    watch = episode.parts if episode is not None else None
    if episode is None or not isinstance(watch, Watch):
        return
    if event == _ASKED:
        prompt = "" if arguments[0] is None else repr(arguments[0])
        # Frame 0 is this hook, and frame 1 the code that called input().
        file_and_line = thread_place(sys._getframe(1)).partition(": ")[0]
        caller = "" if is_library_file(file_and_line) else f" at {file_and_line}"
        watch.asked.setdefault(episode.id, f"input({prompt}){caller}")
    else:
        # The arguments are getaddrinfo(host, port, ...) or connect(socket, address).
        address = arguments[:2] if event == _LOOKED_UP else arguments[1]
        connections = watch.connections.setdefault(episode.id, Counter())
        _count_connection(event, address, episode.gateway, connections)


def _count_connection(event: str, address: Any, gateway: str | None, connections: Counter[str]) -> None:
    """Count a look-up or a connection in `connections`, by `host:port`, unless it is one to the gateway.

    A connection to a host with a name makes both events, and is counted when the name is looked up.
    """
    if not isinstance(address, tuple) or len(address) < 2:
        return  # The address of a Unix socket is a path.
    host, port = (part.decode() if isinstance(part, bytes) else str(part) for part in address[:2])
    # A look-up without a port is followed by no connection, for example a look-up of the machine's own name.
    if port in ("0", "None"):
        return
    gateway_url = urlsplit(gateway or "")
    if (host, port) == (gateway_url.hostname, str(gateway_url.port)):
        return
    if event == _LOOKED_UP and _is_ip(host):
        return  # The connection that follows is counted.
    if event == _CONNECTED and _has_name_with_port(connections, port):
        return
    connections[f"{host}:{port}"] += 1


def _has_name_with_port(addresses: Iterable[str], port: str) -> bool:
    """Whether one of these addresses, `host:port`, has this port and a host that is a name and no IP address."""
    for address in addresses:
        host, _, port_of_address = address.rpartition(":")
        if port_of_address == port and not _is_ip(host):
            return True
    return False


def _is_ip(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
