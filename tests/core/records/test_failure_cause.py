"""Whose doing a failure is, by the classes and statuses that real clients raise."""

from __future__ import annotations

import httpx
import openai
import pytest

import cotune
from cotune.errors import EngineLost, RecordError, ReplayDiverged, RequestRefused, SampleTimeout, WorkflowError
from cotune.records.failure_cause import failure_cause, is_refused_request

REQUEST = httpx.Request("POST", "http://tool.test")


def status_error(status: int) -> openai.APIStatusError:
    response = httpx.Response(status, request=REQUEST)
    return openai.APIStatusError("said", response=response, body=None)


def http_error(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("said", request=REQUEST, response=httpx.Response(status, request=REQUEST))


REFUSED = [RequestRefused("The prompt has 300 tokens."), status_error(400), status_error(422), http_error(413)]
OUTAGES = [
    ConnectionResetError(),
    httpx.ReadTimeout("slow"),
    openai.APIConnectionError(request=REQUEST),
    openai.APITimeoutError(request=REQUEST),
    *(status_error(status) for status in (401, 404, 408, 429, 500, 503)),
    http_error(502),
]


def wrappings(error: Exception) -> list[BaseException]:
    """The error, and what applications make of it."""
    wrapped = WorkflowError("The workflow raised.")
    wrapped.__cause__ = RuntimeError("the agent failed")
    wrapped.__cause__.__context__ = error
    return [error, wrapped, ExceptionGroup("tasks", [KeyError("x"), error])]


@pytest.mark.parametrize("error", [ValueError("no JSON"), RecursionError(), TimeoutError(), *REFUSED, *OUTAGES])
def test_what_the_applications_code_raises_is_the_policys(error: Exception) -> None:
    """A tool that cannot be reached or finds nothing may have been called with an invented address."""
    assert [failure_cause(found) for found in wrappings(error)] == ["policy"] * 3


@pytest.mark.parametrize("error", OUTAGES)
def test_the_same_from_a_call_to_a_model_is_the_infrastructures(error: Exception) -> None:
    assert not is_refused_request(error)
    assert [failure_cause(found, [error]) for found in wrappings(error)] == ["infrastructure"] * 3


@pytest.mark.parametrize("error", [*REFUSED, ReplayDiverged("a", 0, "It asks something else.")])
def test_a_request_that_is_refused_is_no_outage(error: Exception) -> None:
    assert is_refused_request(error)


@pytest.mark.parametrize(
    "error", [EngineLost("gone"), SampleTimeout("300 s"), RecordError("ended"), cotune.Outage("the shop is down")]
)
def test_engines_stores_and_declared_outages_are_known_by_themselves(error: Exception) -> None:
    assert [failure_cause(found) for found in wrappings(error)] == ["infrastructure"] * 3


def test_a_cause_that_was_replaced_on_purpose_does_not_count_and_a_circle_ends() -> None:
    error = ValueError("no JSON")
    error.__context__ = ConnectionResetError()
    error.__suppress_context__ = True
    assert failure_cause(error) == "policy"
    error.__cause__ = error
    assert failure_cause(error) == "policy"
