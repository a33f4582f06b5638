"""Requests of an ASGI server and their refusals: bodies with a bound, tokens, clients that go away, JSON errors."""

from __future__ import annotations

import asyncio
import functools
import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope

from cotune.episodes.later_feedback import check_key
from cotune.errors import ConfigError, field_and_fault
from cotune.records.ids import LONGEST_KEY

T = TypeVar("T")
json_bytes = msgspec.json.Encoder().encode


class RequestError(Exception):
    """A request that is refused: HTTP status, message, and the OpenAI error's `param` and `code`."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """An error to answer a request with, in the form of OpenAI's API: HTTP `status`, `message`, the parameter at
        fault, and a short `code` for programs.
        """
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    def body(self) -> dict[str, Any]:
        """The error in OpenAI form."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def decode_body(raw: bytes, kind: type[T]) -> T:
    """A JSON body as `kind`. Raises RequestError (400) that names the field, or says why it is not JSON."""
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise RequestError(400, "The body is nested too deeply.", code="invalid_json") from None


def invalid_value(error: msgspec.ValidationError) -> RequestError:
    """The refusal (400) of a value, by its field."""
    field, fault = field_and_fault(error)
    message = f"{field}: {fault}." if field else f"{fault}."
    return RequestError(400, message, param=field or None, code="invalid_value")


class ClientGone(Exception):
    """The client closed its connection before it had the whole answer."""


class Access:
    """Checks the token if one is required. It may be in any of `headers`, whose names are in lower case."""

    def __init__(self, token: str | None, headers: Sequence[bytes] = (b"authorization",)) -> None:
        self._token = token.encode() if token else None
        self._headers = headers

    def check(self, scope: Scope) -> None:
        """Raises RequestError (401) when the token is missing or wrong; without one, see `check_local`."""
        self.check_local(scope)
        if self._token is None or any(self.carries_token(scope, name) for name in self._headers):
            return
        bearer = {b"authorization": "Bearer "}
        names = " or ".join(f"{name.decode().title()}: {bearer.get(name, '')}TOKEN" for name in self._headers)
        raise RequestError(401, f"This server needs its token: send it as {names}.", code="invalid_api_key")

    def check_local(self, scope: Scope) -> None:
        """Raises RequestError (403) for a request that a foreign web page may have sent, where no token keeps it out.

        A page can make a browser ask a server on loopback, under a host name of its own (DNS rebinding), or with a
        plain POST, which carries the page's origin.
        """
        if self._token is not None:
            return
        for name, allowed in ((b"host", "loopback"), (b"origin", "a page from loopback")):
            value = header(scope, name).decode("latin-1")
            if value and not is_loopback(value):
                text = f"{name.decode().title()}: {value[:100]!r} is not {allowed}. For others start it with a token."
                raise RequestError(403, text, code="forbidden_" + name.decode())

    def carries_token(self, scope: Scope, name: bytes) -> bool:
        """Whether this header carries the token."""
        if self._token is None:
            return False
        expected = b"Bearer " + self._token if name == b"authorization" else self._token
        return hmac.compare_digest(header(scope, name), expected)


@functools.lru_cache(256)
def is_loopback(host_or_origin: str) -> bool:
    """Whether a host with its port (`localhost:80`), or an origin (`http://[::1]`), names this machine."""
    address = host_or_origin if "://" in host_or_origin else f"//{host_or_origin}"
    try:
        host = urlsplit(address).hostname or ""
    except ValueError:
        return False
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def checked_key(value: str | bytes) -> str:
    """The application's own key of an episode, from X-Cotune-Key, after a check. Raises RequestError (400)."""
    try:
        return check_key(value if isinstance(value, str) else value.decode())
    except (ConfigError, UnicodeDecodeError):
        text = f"X-Cotune-Key is at most {LONGEST_KEY} printable characters, in UTF-8."
        raise RequestError(400, text, param="key", code="invalid_value") from None


def header(scope: Scope, name: bytes) -> bytes:
    """The first header with a name in lower case; empty if there is none."""
    return next((value for key, value in scope["headers"] if key == name), b"")


_SETTING = "--max-body sets the limit."


SMALL_BODY = 64 << 10
"""Bytes of a body that are taken even if there is no room: large bodies must not keep small requests out."""


class BodyRoom:
    """Counts the bytes of bodies that a server holds. Many large bodies that never end would fill the memory."""

    def __init__(self, most: int) -> None:
        """`most` is the bound in bytes."""
        self.most = most
        self.bytes = 0

    def check(self) -> None:
        """Raises RequestError (429) if the server holds more than it may."""
        if self.bytes > self.most:
            text = "The server is behind: send the request again in a moment."
            raise RequestError(429, text, code="behind", headers={"retry-after": "1"})


async def read_body(scope: Scope, receive: Receive, limit: int, room: BodyRoom, why: str = _SETTING) -> bytes:
    """Read a body of JSON. While it arrives, its bytes count in `room`, which bounds the bodies of all requests
    together.

    Raises RequestError if it is not JSON (415), is longer than `limit` (413), ends early (400), or if the room is full
    (429). `why` is the reason for the limit, for the message.
    """
    media_type, _, _ = header(scope, b"content-type").partition(b";")
    if media_type.strip().lower() != b"application/json":
        raise RequestError(
            415, "The body must be sent as Content-Type: application/json.", code="unsupported_media_type"
        )
    return await read_any(scope, receive, limit, room, why)


async def read_any(scope: Scope, receive: Receive, limit: int, room: BodyRoom, why: str = _SETTING) -> bytes:
    """Read a body of any type. While it arrives, its bytes count in `room`. Raises RequestError as `read_body` does."""
    announced_size = header(scope, b"content-length")
    # Text with more digits is no size, and Python would raise an error for a number with very many digits.
    is_number = announced_size.isdigit() and len(announced_size) < 20
    if is_number and int(announced_size) > limit:
        raise _too_large(limit, why)
    parts: list[bytes] = []
    size = 0
    has_more = True
    try:
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise RequestError(400, "The body ended early.", code="body_ended")
            part = message.get("body", b"")
            parts.append(part)
            size += len(part)
            room.bytes += len(part)
            has_more = message.get("more_body", False)
            if size > limit:
                raise _too_large(limit, why)
            if size > SMALL_BODY:
                room.check()
    finally:
        room.bytes -= size
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Await `work()` in this task. If the client goes away first, the work is cancelled, and ClientGone raised."""
    answering_task = asyncio.current_task()
    assert answering_task is not None

    async def cancel_when_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        answering_task.cancel()

    watch = asyncio.create_task(cancel_when_gone())
    try:
        return await work()
    except asyncio.CancelledError:
        client_is_gone = watch.done() and not watch.cancelled()
        if not client_is_gone:
            raise  # somebody else cancelled this task, such as a server that stops
        answering_task.uncancel()
        raise ClientGone from None
    finally:
        watch.cancel()


def _too_large(limit: int, why: str) -> RequestError:
    return RequestError(
        413,
        f"The body is larger than {limit} bytes: {why}",
        code="body_too_large",
        headers={"connection": "close"},
    )


def json_response(body: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON response."""
    return Response(json_bytes(body), status, headers, media_type="application/json")


def refusal(error: RequestError) -> Response:
    """The answer to a request that is refused, in OpenAI form."""
    return json_response(error.body(), error.status, error.headers)


def application(routes: Sequence[Route]) -> Starlette:
    """A Starlette application that answers with errors in OpenAI form, and guesses no paths."""
    handlers: Any = dict.fromkeys((RequestError, HTTPException, Exception), _refuse)
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _refuse(request: Request, error: Exception) -> Response:
    """The response to an error. The client learns only the type of an unexpected error."""
    if isinstance(error, RequestError):
        return refusal(error)
    if isinstance(error, HTTPException):
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
        text = f"{error.detail}: {request.method} {request.url.path}."
        return refusal(RequestError(error.status_code, text, code=code, headers=error.headers))
    return refusal(RequestError(500, f"The server failed: {type(error).__name__}.", code="internal_error"))
