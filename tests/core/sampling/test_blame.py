"""Whose doing a failure is, by the classes and statuses that real clients raise."""

from __future__ import annotations

import httpx
import openai
import pytest

from cotune.errors import EngineLost, RecordError, RequestRefused, SampleTimeout, WorkflowError
from cotune.sampling.blame import blame

REQUEST = httpx.Request("POST", "http://tool.test")


def status_error(status: int) -> openai.APIStatusError:
    response = httpx.Response(status, request=REQUEST)
    return openai.APIStatusError("said", response=response, body=None)


def http_error(status: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError("said", request=REQUEST, response=httpx.Response(status, request=REQUEST))


@pytest.mark.parametrize(
    ("error", "whose"),
    [
        (ValueError("no JSON"), "policy"),
        (RecursionError("too many calls"), "policy"),
        (TimeoutError(), "policy"),
        (RequestRefused("The prompt has 300 tokens."), "policy"),
        (WorkflowError("It returned None, which is not a reward."), "policy"),
        (status_error(400), "policy"),
        (http_error(422), "policy"),
        (EngineLost("gone"), "infrastructure"),
        (SampleTimeout("300 s"), "infrastructure"),
        (RecordError("ended"), "infrastructure"),
        (ConnectionResetError(), "infrastructure"),
        (httpx.ReadTimeout("slow"), "infrastructure"),
        (openai.APIConnectionError(request=REQUEST), "infrastructure"),
        (openai.APITimeoutError(request=REQUEST), "infrastructure"),
        *((status_error(status), "infrastructure") for status in (401, 408, 429, 500, 503)),
        (http_error(502), "infrastructure"),
    ],
)
def test_an_error_and_what_an_application_makes_of_it(error: Exception, whose: str) -> None:
    assert blame(error) == whose
    wrapped = WorkflowError("The workflow raised.")
    wrapped.__cause__ = RuntimeError("the agent failed")
    wrapped.__cause__.__context__ = error
    assert blame(wrapped) == whose
    assert blame(ExceptionGroup("tasks", [KeyError("x"), error])) == whose


def test_a_cause_that_was_replaced_on_purpose_does_not_count_and_a_circle_ends() -> None:
    error = ValueError("no JSON")
    error.__context__ = ConnectionResetError()
    error.__suppress_context__ = True
    assert blame(error) == "policy"
    error.__cause__ = error
    assert blame(error) == "policy"
