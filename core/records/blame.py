"""Whose doing a failure is: the policy's, which learns from it, the infrastructure's, which teaches nothing, or that of
a replay that does not repeat what was recorded.

What counts is who raised: the models' engine, a provider or the store, as cotune sees at its own boundaries, or the
application's code, whose tools may fail by the arguments that a policy gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from cotune.errors import CotuneError, ReplayDiverged, RequestRefused, WorkflowError

Blame = Literal["policy", "infrastructure", "divergence"]

_NOT_ASKED = frozenset({401, 402, 403, 404, 408, 425, 429})
"""HTTP statuses of a provider below 500 that say nothing about what was asked: keys, quotas, limits, time-outs."""


def blame(error: BaseException, outages: Iterable[BaseException] = ()) -> Blame:
    """Infrastructure where `error`, or anything that it was raised from, is one of `outages` (what calls to models
    raised and their requests did not cause), of cotune's own engines, store or set-up, or an `Outage`; else the policy:
    bad output, a tool that failed, a prompt that is too long, too many calls, a time-out."""
    chain, known = list(_chain(error, set())), {id(outage) for outage in outages}
    if any(isinstance(found, ReplayDiverged) for found in chain):
        return "divergence"
    return "infrastructure" if any(id(found) in known or _ours(found) for found in chain) else "policy"


def refused(error: BaseException) -> bool:
    """Whether an error that a call to a model raised is one of its request, and none of the engine or provider."""
    if isinstance(error, CotuneError):
        return not _ours(error)
    statuses = (getattr(source, "status_code", None) for source in (error, getattr(error, "response", None)))
    return any(isinstance(status, int) and refusal(status) for status in statuses)


def refusal(status: int) -> bool:
    """Whether a provider that answers with this HTTP status refuses what was asked."""
    return 400 <= status < 500 and status not in _NOT_ASKED


def _ours(error: BaseException) -> bool:
    return isinstance(error, CotuneError) and not isinstance(error, WorkflowError | RequestRefused | ReplayDiverged)


def _chain(error: BaseException | None, seen: set[int]) -> Iterator[BaseException]:
    """The error, those that it groups, and those that it came from."""
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        for member in getattr(error, "exceptions", ()) if isinstance(error, BaseExceptionGroup) else ():
            yield from _chain(member, seen)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
