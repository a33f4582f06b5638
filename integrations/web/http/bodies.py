"""Bodies of requests and answers: how large they may be, and reading them without anybody else having to wait."""

from __future__ import annotations

import asyncio
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
