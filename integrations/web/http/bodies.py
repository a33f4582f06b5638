"""Bodies of requests and answers: how large they may be, and reading them without anybody else having to wait."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from starlette.types import Receive, Scope

from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import Access, RequestError, decode_body, read_body
from cotune.runtime.bounded_cache import INLINE

T = TypeVar("T")

_large = ThreadPoolExecutor(4, "cotune-large")


async def aside(size: int, work: Callable[[], T], unwanted: Callable[[T], object] | None = None) -> T:
    """The result of `work`, whose time grows with `size` (bytes): in a thread where it would hold up the event loop.

    If nobody waits for it any more, `unwanted` gets it, also in a thread.
    """
    if size <= INLINE:
        return work()
    loop = asyncio.get_running_loop()
    begun = loop.run_in_executor(_large, work)
    if unwanted is None:
        return await begun

    def left(over: asyncio.Future[T]) -> None:
        if not over.cancelled() and over.exception() is None:
            loop.run_in_executor(_large, unwanted, over.result())

    try:
        return await asyncio.shield(begun)
    except asyncio.CancelledError:
        begun.add_done_callback(left)
        raise


async def read_json(scope: Scope, receive: Receive, access: Access, kind: type[T], limits: BodyLimits) -> T:
    """The JSON body of a request that `access` lets in, as `kind`. Raises RequestError."""
    access.check(scope)
    raw = await read_body(scope, receive, limits.max_body)
    return await aside(len(raw), lambda: decoded(raw, kind, limits.max_values))


def decoded(raw: bytes, kind: type[T], values: int) -> T:
    """A JSON body as `kind`. Raises RequestError as `decode_body` does, and (413) for more than so many values."""
    if (found := json_values(raw, values)) > values:
        text = f"The body holds {found} JSON values; at most {values} are read: --max-values sets the limit."
        raise RequestError(413, text, code="body_too_large")
    return decode_body(raw, kind)


def json_values(raw: bytes, exact_above: int = 0) -> int:
    """How many values a JSON text holds, by its marks: each takes memory and time, however short it is.

    Up to `exact_above` it may be too high a number, which costs less: marks within strings count, and empty objects.
    """
    most = 1 + sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if most <= exact_above:
        return most
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    outside = np.bitwise_xor.accumulate(text == ord('"')) == 0
    opened = ((text == ord("[")) | (text == ord("{"))) & outside
    empty = opened[:-1] & ((text[1:] == ord("]")) | (text[1:] == ord("}")))
    commas = np.count_nonzero((text == ord(",")) & outside)
    return int(1 + commas + np.count_nonzero(opened) - np.count_nonzero(empty))


def inflated(raw: bytes, coding: str, limit: int, setting: str, whole: bool = True) -> bytes:
    """A body without its content coding.

    Raises RequestError for one that is broken (400; also for one that is cut off, if it has to be `whole`), unknown
    (415) or of more than `limit` bytes, which `setting` sets (413).
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return raw
    if coding != "gzip":
        message = f"The body's Content-Encoding {coding[:40]!r} cannot be read; gzip can."
        raise RequestError(415, message, code="unsupported_encoding")
    found = zlib.decompressobj(31)
    try:
        text = found.decompress(raw, limit + 1)
        if len(text) <= limit and whole and not found.eof:
            raise zlib.error("it ends early")
    except zlib.error as error:
        raise RequestError(400, f"The body is not gzip: {error}.", code="invalid_encoding") from None
    if len(text) > limit:
        message = f"The body is larger than {limit} bytes once it is unpacked: {setting} sets the limit."
        raise RequestError(413, message, code="body_too_large")
    return text
