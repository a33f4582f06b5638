"""Bodies of requests and answers: how large they may be, and reading them without delaying other requests."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
import zstandard
from starlette.types import Receive, Scope

from cotune.integrations.web.http.limits import ARRIVING_BODIES, BodyLimits
from cotune.integrations.web.http.requests import Access, BodyRoom, RequestError, decode_body, header, read_body
from cotune.runtime.bounded_cache import INLINE

T = TypeVar("T")

_ZSTD_WINDOW = 8 << 20
"""The most bytes of a zstd decoder's window. By RFC 9659, clients must not need more."""

_large = ThreadPoolExecutor(4, "cotune-large")


async def in_thread_if_large(size: int, work: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Call `work`, whose time grows with `size` in bytes. If it would block the event loop, it runs in a thread.

    If the caller is cancelled while the thread works, `undo` gets the result, also in a thread.
    """
    if size <= INLINE:
        return work()
    loop = asyncio.get_running_loop()
    working = loop.run_in_executor(_large, work)
    if undo is None:
        return await working

    def undo_result(ended: asyncio.Future[T]) -> None:
        if not ended.cancelled() and ended.exception() is None:
            loop.run_in_executor(_large, undo, ended.result())

    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        working.add_done_callback(undo_result)
        raise


def size_of_body(raw: bytes, coding: str) -> int:
    """The size of a body for `in_thread_if_large`. A compressed body is always large, as its unpacked size is unknown
    until it is unpacked.
    """
    return INLINE + len(raw) if coding else len(raw)


def room_for(limits: BodyLimits) -> BodyRoom:
    """The room for bodies that arrive at a server with these limits."""
    return BodyRoom(ARRIVING_BODIES * limits.max_body)


async def read_json(
    scope: Scope, receive: Receive, access: Access, kind: type[T], limits: BodyLimits, room: BodyRoom
) -> T:
    """The JSON body of a request that `access` lets in, as `kind`. While it arrives, its bytes count in `room`.

    Raises RequestError.
    """
    access.check(scope)
    raw = await read_body(scope, receive, limits.max_body, room)
    coding = header(scope, b"content-encoding").decode("latin-1")

    def unpack_and_decode() -> T:
        return decoded(inflated(raw, coding, limits.max_body, "--max-body"), kind, limits.max_values)

    return await in_thread_if_large(size_of_body(raw, coding), unpack_and_decode)


def decoded(raw: bytes, kind: type[T], values: int) -> T:
    """Decode a JSON body as `kind`. Raises RequestError as `decode_body` does, and (413) for more than `values`."""
    if (count := json_values(raw, values)) > values:
        text = f"The body holds {count} JSON values; at most {values} are read."
        raise RequestError(413, text, code="body_too_large")
    return decode_body(raw, kind)


def json_values(raw: bytes, exact_above: int = 0) -> int:
    """Count the values of a JSON text without decoding it, because a small text could decode to very many objects.

    Commas, brackets and braces are counted. Up to `exact_above` their number is returned, which is cheap but may be too
    high, as marks inside strings and empty objects count. Above it, only marks outside of strings count.
    """
    upper_bound = 1 + sum(raw.count(mark) for mark in (b",", b"[", b"{"))
    if upper_bound <= exact_above:
        return upper_bound
    # Without escaped quotes, a character is outside of strings if an even number of quotes comes before it.
    text = np.frombuffer(raw.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    is_outside = np.bitwise_xor.accumulate(text == ord('"')) == 0
    is_comma = (text == ord(",")) & is_outside
    is_opening = ((text == ord("[")) | (text == ord("{"))) & is_outside
    is_closing = (text == ord("]")) | (text == ord("}"))
    is_empty_container = is_opening[:-1] & is_closing[1:]
    # An array or object holds one value more than it has commas, unless it is empty. The text is one value itself.
    inner_values = np.count_nonzero(is_opening) - np.count_nonzero(is_empty_container) + np.count_nonzero(is_comma)
    return int(1 + inner_values)


def inflated(raw: bytes, coding: str, limit: int, setting: str, complete: bool = True) -> bytes:
    """Unpack a body that was compressed with gzip or zstd.

    Raises RequestError for a body that is broken (400; also if it ends early and has to be `complete`), in another
    coding (415), or of more than `limit` bytes once it is unpacked (413), so that a small body cannot fill the memory.
    `setting` is the flag that sets the limit, for the message.
    """
    coding = coding.strip().lower()
    if coding in ("", "identity"):
        return raw
    if coding not in ("gzip", "zstd"):
        message = f"The body's Content-Encoding {coding[:40]!r} cannot be read; gzip and zstd can."
        raise RequestError(415, message, code="unsupported_encoding")
    unpack = _unpack_gzip if coding == "gzip" else _unpack_zstd
    try:
        text, ended = unpack(raw, limit + 1)
    except (zlib.error, zstandard.ZstdError) as error:
        raise RequestError(400, f"The body is not {coding}: {error}.", code="invalid_encoding") from None
    if len(text) > limit:
        hint = f": {setting} sets the limit" if setting else ""
        message = f"The body is larger than {limit} bytes once it is unpacked{hint}."
        raise RequestError(413, message, code="body_too_large")
    if complete and not ended:
        raise RequestError(400, f"The body is not {coding}: it ends early.", code="invalid_encoding")
    return text


def _unpack_gzip(raw: bytes, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of a gzip body, and whether it is complete."""
    decoder = zlib.decompressobj(31)
    return decoder.decompress(raw, most), decoder.eof


def _unpack_zstd(raw: bytes, most: int) -> tuple[bytes, bool]:
    """The first `most` bytes of a zstd body, and whether it is complete."""
    unpacker = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    text = unpacker.stream_reader(raw).read(most)
    if len(text) == most:
        return text, False
    # The reader stops at `most`, but does not tell a cut body from a complete one. The other decoder does, and has no
    # bound; it is safe now that the size is known.
    decoder = unpacker.decompressobj()
    decoder.decompress(raw)
    return text, decoder.eof
