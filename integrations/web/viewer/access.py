"""Access to the pages: by a token, or without one from loopback only, under a policy against foreign scripts."""

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
"""End of the only address that takes a POST: it keeps a note (see `notes`), as JSON, which a foreign page may not send
without being asked."""
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
}
"""Of every response. Text of applications and models is escaped; with these a browser would not run it either."""


def guarded(app: ASGIApp, token: str | None) -> ASGIApp:
    """`app` behind the token: sent as `Authorization: Bearer TOKEN`, or once as `?token=TOKEN`, which leaves a cookie.

    Without a token only browsers on this machine get in, by a name of it.
    """
    access = Access(token)

    async def guard(scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        offered = next((value for name, value in query if name == "token"), None)
        if token is not None and offered is not None and _same(offered, token):
            rest = urlencode([pair for pair in query if pair[0] != "token"])
            answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            await answer(scope, receive, secured)
            return
        try:
            writes = scope["method"] == "POST" and scope["path"].endswith(WRITTEN)
            if scope["method"] not in ("GET", "HEAD") and not writes:
                raise RequestError(405, "Pages are only read.")
            if token is None or not _same(_cookie(scope), token):
                access.check(scope)
            if writes and not access.given(scope, b"authorization"):
                _check_origin(scope)
        except RequestError as error:
            hint = " Open the address that cotune view printed." if error.status == 401 else ""
            await PlainTextResponse(f"{error.message}{hint}\n", error.status)(scope, receive, secured)
            return
        await app(scope, receive, secured)

    return guard


def _check_origin(scope: Scope) -> None:
    """Raises RequestError (403) for a request to write that does not come from a page of this server: a page of another
    port of this machine shares its cookies, and is on loopback too."""
    host, origin = (header(scope, name).decode("latin-1") for name in (b"host", b"origin"))
    if not host or origin.lower() not in (f"http://{host}".lower(), f"https://{host}".lower()):
        raise RequestError(403, "Only pages of this viewer may write.", code="forbidden_origin")


def _same(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _cookie(scope: Scope) -> str:
    try:
        found = SimpleCookie(header(scope, b"cookie").decode("latin-1")).get(COOKIE)
    except CookieError:
        return ""
    return found.value if found else ""
