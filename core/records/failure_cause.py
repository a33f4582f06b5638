"""Whose doing a failure is: the policy's, which learns from it, the infrastructure's, which teaches nothing, or that of
a replay that does not repeat what was recorded.

What counts is who raised: the models' engine, a provider or the store, as cotune sees at its own boundaries, or the
application's code, whose tools may fail by the arguments that a policy gave them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from cotune.errors import CotuneError, ReplayDiverged, RequestRefused, WorkflowError

FailureCause = Literal["policy", "infrastructure", "divergence"]

_NOT_ASKED = frozenset({401, 402, 403, 404, 408, 425, 429})
"""HTTP statuses of a provider below 500 that say nothing about what was asked: keys, quotas, limits, time-outs."""


def failure_cause(error: BaseException, outages: Iterable[BaseException] = ()) -> FailureCause:
    """Infrastructure where `error`, or anything that it was raised from, is one of `outages` (what calls to models
    raised and their requests did not cause), of cotune's own engines, store or set-up, or an `Outage`; else the policy:
    bad output, a tool that failed, a prompt that is too long, too many calls, a time-out."""
    found, known = list(chain(error)), {id(outage) for outage in outages}
    if any(isinstance(one, ReplayDiverged) for one in found):
        return "divergence"
    return "infrastructure" if any(id(one) in known or _ours(one) for one in found) else "policy"


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


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, those that it groups, and those that it came from."""
    seen: set[int] = set()
    queue = [error]
    while queue:
        one = queue.pop(0)
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            yield one
            queue += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
            queue.append(one.__cause__ or (None if one.__suppress_context__ else one.__context__))
