"""What a Starlette application answers with: JSON, and JSON errors for whatever is refused or fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cotune.integrations.http.requests import RequestError, json_bytes

_CODES = {404: "not_found", 405: "method_not_allowed"}


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(json_bytes(body), status, headers, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The answer to a request that is refused, in OpenAI form."""
    return json_response(error.body(), error.status, error.headers)


def application(routes: Sequence[Route]) -> Starlette:
    """A Starlette application that answers with errors in OpenAI form, and guesses no paths."""
    made = Starlette(routes=routes, exception_handlers=_refusals())
    made.router.redirect_slashes = False
    return made


def _refusals() -> dict[Any, Callable[[Request, Exception], Any]]:
    """Exception handlers that answer with errors in OpenAI form."""
    return {RequestError: _refuse, HTTPException: _http_error, Exception: _server_error}


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return refusal(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = RequestError(
        error.status_code,
        f"{error.detail}: {request.method} {request.url.path}.",
        code=_CODES.get(error.status_code),
    )
    return json_response(refused.body(), error.status_code, error.headers)


async def _server_error(request: Request, error: Exception) -> Response:
    refused = RequestError(500, f"The server failed: {type(error).__name__}.", code="internal_error")
    return json_response(refused.body(), 500)
