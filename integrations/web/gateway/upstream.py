"""The provider behind the gateway. Requests are forwarded with aiohttp, and answers returned byte by byte."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator, Iterable
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from multidict import CIMultiDict
from yarl import URL

from cotune.integrations.web.gateway.address import without_own_members
from cotune.integrations.web.http.requests import RequestError

Fields = list[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer transfer-encoding "
    b"upgrade".split()
)
_SET_BY_GATEWAY = frozenset((b"host", b"content-length", b"expect", b"accept-encoding"))
"""Request headers that belong to the gateway's own request to the provider."""
_CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_CONNECT_SECONDS = 30
_ADDED_BY_AIOHTTP = ("User-Agent", "Accept", "Accept-Encoding", "Content-Type")
"""Headers that aiohttp would add to a request without them."""


class UpstreamError(Exception):
    """The provider could not be reached, or its answer broke off."""


MOST_INTERIM = 100
"""Most interim answers (such as 100 Continue) before the answer itself."""


class _Answer(aiohttp.ClientResponse):
    """An answer with a limit on the interim answers before it. aiohttp reads these in a loop without a pause, so that a
    faulty provider would block the event loop."""

    async def start(self, connection: Any) -> aiohttp.ClientResponse:
        """Read the answer's head, after a bounded number of interim answers: aiohttp would read them without end."""
        protocol = connection.protocol
        reads = 0
        read = protocol.read

        async def count_and_read() -> Any:
            nonlocal reads
            reads += 1
            if reads > MOST_INTERIM:
                raise aiohttp.ClientPayloadError(f"it sent more than {MOST_INTERIM} interim answers (1xx)")
            return await read()

        protocol.read = count_and_read
        try:
            return await super().start(connection)
        finally:
            del protocol.read


class Upstream:
    """Forwards to the base URL of a provider."""

    def __init__(self, url: str, key: str | None = None) -> None:
        """`key` is the provider's key, for clients that send the gateway's token as theirs. Connects when used."""
        self.url = url.rstrip("/")
        self._key = key
        # Look up the system's proxy once: aiohttp would do it for every request, in a thread.
        parts = urlsplit(self.url)
        self._proxy = None if proxy_bypass(parts.netloc) else getproxies().get(parts.scheme)
        self._session: aiohttp.ClientSession | None = None

    @contextlib.asynccontextmanager
    async def send(
        self, method: str, tail: str, query: bytes, headers: CIMultiDict[str], body: bytes
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request to the provider. The block gets the answer, whose body it reads. A block that ends before the
        body does closes the connection, which cancels the request at the provider.

        Raises UpstreamError if there is no answer, or if it breaks off inside the block.
        """
        try:
            answer = await self._request(method, tail, query, headers, body)
            try:
                if not 200 <= answer.status < 600:
                    raise UpstreamError(f"it answered with status {answer.status}")
                yield answer
            finally:
                if answer.content.at_eof():
                    answer.release()  # the connection serves the next request
                else:
                    answer.close()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            cause = f"{type(error).__name__}: {error}"[:300]
            raise UpstreamError(cause.rstrip(": ")) from error  # some errors have no text

    async def _request(
        self, method: str, tail: str, query: bytes, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse:
        """Send a request and read the head of its answer. Raises RequestError (400) for a header that cannot be sent,
        and aiohttp's errors.
        """
        url = f"{self.url}/{tail}"
        if query:
            url += f"?{query.decode()}"
        try:
            return await self._open().request(
                method,
                URL(url, encoded=True),
                data=body or None,
                headers=headers,
                proxy=self._proxy,
                allow_redirects=False,
            )
        except ValueError as error:
            raise RequestError(400, f"A header cannot be forwarded: {error}.", code="invalid_header") from None

    def request_headers(self, headers: Iterable[tuple[bytes, bytes]], replace_key: bool) -> CIMultiDict[str]:
        """The headers to forward. With `replace_key`, the client's key is replaced by the provider's.

        Raises RequestError (400) for a header that cannot be forwarded.
        """
        client_headers = list(headers)
        outgoing = forwarded(client_headers, _SET_BY_GATEWAY)
        # The recorder can read gzip, but no other coding.
        accepts_gzip = any(name == b"accept-encoding" and b"gzip" in value.lower() for name, value in client_headers)
        outgoing.append((b"accept-encoding", b"gzip" if accepts_gzip else b"identity"))
        if replace_key:
            uses_api_key = any(name == b"x-api-key" for name, _ in outgoing)
            outgoing = [(name, value) for name, value in outgoing if name not in (b"authorization", b"x-api-key")]
            if self._key:
                key = self._key.encode()
                outgoing.append((b"x-api-key", key) if uses_api_key else (b"authorization", b"Bearer " + key))
        try:
            return CIMultiDict((name.decode(), value.decode()) for name, value in outgoing)
        except UnicodeDecodeError:
            raise RequestError(400, "A header is not UTF-8.", code="invalid_header") from None

    async def close(self) -> None:
        """Close all connections."""
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        """The session with the provider, opened at the first request. It changes nothing: no cookies, headers or
        decompression of its own.
        """
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                response_class=_Answer,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=_ADDED_BY_AIOHTTP,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
                max_line_size=64 << 10,
                max_field_size=64 << 10,
            )
        return self._session


def forwarded(headers: Iterable[tuple[bytes, bytes]], dropped: Iterable[bytes]) -> Fields:
    """Headers without the ones that belong to a single connection, the ones in `dropped`, and cotune's own."""
    headers = list(headers)
    not_forwarded = _HOP_BY_HOP.union(dropped)
    for name, value in headers:
        if name == b"connection":  # it lists further headers of this connection
            not_forwarded = not_forwarded.union(part.strip().lower() for part in value.split(b","))
    fields: Fields = []
    for name, value in headers:
        if name in not_forwarded or name.startswith(b"x-cotune-"):
            continue
        forwarded_value = without_own_members(value) if name == b"baggage" else value
        is_empty_baggage = name == b"baggage" and not forwarded_value.strip()
        # A value with control characters is no valid header.
        if not is_empty_baggage and not _CONTROL_CHARACTER.search(forwarded_value):
            fields.append((name, forwarded_value))
    return fields
