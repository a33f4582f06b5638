"""Controls access to the pages: by a token, or without one from loopback only. A policy forbids foreign scripts."""

from __future__ import annotations

import hmac
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cotune.integrations.web.http.requests import Access, RequestError, header

COOKIE = "cotune_view"
WRITTEN = "/note"
"""Ending of the only address that accepts a POST, which saves a note (see `notes`). It accepts only JSON, which a
browser does not let a foreign page send."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every response. Text of applications and models is escaped; these keep a browser from running any that is
not."""


def guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """Protect `app` by a token, sent as `Authorization: Bearer TOKEN`, or once as `?token=TOKEN`, which sets a cookie.

    Without a token only browsers on this machine have access, by one of its own names.
    """
    access = Access(token)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request with `app` if it may see the pages, otherwise with an error. Headers forbid other sites to
        use the pages.
        """

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        if token is not None and (sign_in := _sign_in(scope, token)) is not None:
            await sign_in(scope, receive, send_secured)
            return
        try:
            is_write = scope["method"] == "POST" and scope["path"].endswith(WRITTEN)
            is_read = scope["method"] in ("GET", "HEAD")
            if not is_read and not is_write:
                raise RequestError(405, "Pages are only read.")
            has_cookie = token is not None and _same(_cookie(scope), token)
            if not has_cookie:
                access.check(scope)
            # A browser sends the cookie with requests of any page, but not the header, so only programs send that.
            if is_write and not access.carries_token(scope, b"authorization"):
                _check_origin(scope)
        except RequestError as error:
            hint = " Open the address that cotune view printed." if error.status == 401 else ""
            await PlainTextResponse(f"{error.message}{hint}\n", error.status)(scope, receive, send_secured)
            return
        await app(scope, receive, send_secured)

    return guard


def _sign_in(scope: Scope, token: str) -> RedirectResponse | None:
    """The answer that sets the cookie, for an address with the right `?token=`; None for any other address.

    It redirects to the address without the token, which would otherwise stay in the browser's address bar and history.
    """
    query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
    offered = next((value for name, value in query if name == "token"), None)
    if offered is None or not _same(offered, token):
        return None
    other_fields = urlencode([(name, value) for name, value in query if name != "token"])
    address = f"{scope['path']}?{other_fields}" if other_fields else scope["path"]
    response = RedirectResponse(address, 303)
    response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
    return response


def _check_origin(scope: Scope) -> None:
    """Raise RequestError (403) for a write request that does not come from a page of this server.

    A page from another port of this machine is on loopback too, and has the same cookies.
    """
    host = header(scope, b"host").decode("latin-1")
    origin = header(scope, b"origin").decode("latin-1")
    if not host or origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise RequestError(403, "Only pages of this viewer may write.", code="forbidden_origin")


def _same(offered: str, token: str) -> bool:
    return hmac.compare_digest(offered.encode(), token.encode())


def _cookie(scope: Scope) -> str:
    try:
        cookie = SimpleCookie(header(scope, b"cookie").decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return cookie.value if cookie else ""
