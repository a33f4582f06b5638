"""Warnings that a process logs once, however often their cause occurs."""

from __future__ import annotations

import functools
import logging
import threading

log = logging.getLogger("cotune")


def warn_once(kind: str, message: str, *arguments: object) -> None:
    """Log a warning, unless this process has logged one of this kind. `arguments` are put into the message as `logging`
    does."""
    if _first_of(kind).acquire(blocking=False):
        log.warning(message, *arguments)


@functools.cache
def _first_of(kind: str) -> threading.Lock:
    """A lock that the first warning of a kind takes for good."""
    return threading.Lock()
