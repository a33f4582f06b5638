"""The cause of a failure: the policy, which is trained on it; the infrastructure, then it is not trained on; or a
replay that differs from its record.

The cause follows from the code that raised. Errors of the engine, a provider or the store, which cotune sees at its own
boundaries, are infrastructure. Errors of the application's code count for the policy, as its tools may fail because of
the policy's arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal

from cotune.errors import CotuneError, ReplayDiverged, RequestRefused, WorkflowError

FailureCause = Literal["policy", "infrastructure", "divergence"]

_NOT_ASKED = frozenset({401, 402, 403, 404, 408, 425, 429})
"""HTTP statuses below 500 whose cause is not the request: keys, quotas, rate limits, time-outs."""


def failure_cause(error: BaseException, outages: Iterable[BaseException] = ()) -> FailureCause:
    """The cause of an error, from the error and all errors that it was raised from.

    It is the infrastructure if one of these errors comes from cotune's engines, store or set-up, is an `Outage`, or is
    among `outages`: errors of calls to models for which the server was responsible, and not the request. Otherwise it
    is the policy: bad output, a failed tool, a prompt that is too long, too many calls, a time-out.
    """
    errors = list(error_chain(error))
    outage_ids = {id(outage) for outage in outages}
    if any(isinstance(cause, ReplayDiverged) for cause in errors):
        return "divergence"
    if any(id(cause) in outage_ids or _is_infrastructure(cause) for cause in errors):
        return "infrastructure"
    return "policy"


def is_refused_request(error: BaseException) -> bool:
    """Whether the cause of an error from a call to a model is its request, and not the engine or provider."""
    if isinstance(error, CotuneError):
        return not _is_infrastructure(error)
    statuses = [getattr(error, "status_code", None)]
    statuses.append(getattr(getattr(error, "response", None), "status_code", None))
    return any(isinstance(status, int) and is_refusal_status(status) for status in statuses)


def is_refusal_status(status: int) -> bool:
    """Whether a provider refuses the request itself with this HTTP status."""
    return 400 <= status < 500 and status not in _NOT_ASKED


def _is_infrastructure(error: BaseException) -> bool:
    """Whether an error of cotune comes from its engines, store or set-up."""
    return isinstance(error, CotuneError) and not isinstance(error, WorkflowError | RequestRefused | ReplayDiverged)


def error_chain(error: BaseException | None) -> Iterator[BaseException]:
    """The error, the errors that it groups, and the errors that it was raised from."""
    yielded_ids: set[int] = set()  # errors may refer to each other in a circle
    queue = [error]
    while queue:
        current = queue.pop(0)
        if current is None or id(current) in yielded_ids:
            continue
        yielded_ids.add(id(current))
        yield current
        if isinstance(current, BaseExceptionGroup):
            queue += current.exceptions
        if current.__cause__ is not None:
            queue.append(current.__cause__)
        elif not current.__suppress_context__:
            queue.append(current.__context__)
