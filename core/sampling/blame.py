"""Whose doing a failure is: the policy's, which learns from it, the infrastructure's, which teaches nothing, or that of
a replay that does not repeat what was recorded."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from cotune.errors import CotuneError, ReplayDiverged, RequestRefused, WorkflowError

Blame = Literal["policy", "infrastructure", "divergence"]

OUTAGES = frozenset(
    {"ConnectionError", "APIConnectionError", "TransportError", "ClientConnectionError", "NetworkError", "gaierror"}
)
"""Classes of Python, openai, anthropic, httpx, requests and aiohttp that say that a peer could not be reached."""
_STATUS = frozenset({401, 402, 403, 404, 408, 425, 429})
"""HTTP statuses below 500 that say nothing about what was asked: keys, quotas, limits, time-outs."""


def blame(error: BaseException) -> Blame:
    """Infrastructure where `error`, or anything that it was raised from, is of an engine, a network, a service, the
    store or the set-up; else the policy: bad output, a prompt that is too long, too many calls, a time-out."""
    if any(isinstance(found, ReplayDiverged) for found in _chain(error, set())):
        return "divergence"
    return "infrastructure" if any(map(_outage, _chain(error, set()))) else "policy"


def _outage(error: BaseException) -> bool:
    if isinstance(error, CotuneError):
        return not isinstance(error, WorkflowError | RequestRefused)
    if any(kind.__name__ in OUTAGES for kind in type(error).__mro__):
        return True
    response = getattr(error, "response", None)
    status = next((s for s in (getattr(e, "status_code", None) for e in (error, response)) if isinstance(s, int)), 0)
    return status in _STATUS or status >= 500


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """The error, those that it groups, and those that it came from."""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        for member in getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ():
            yield from _chain(member, seen)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
