"""A batch: what one request brings from an application to a collector, and how it is packed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence
from typing import Annotated

import msgspec

from cotune.errors import ConfigError
from cotune.records.structs import Record

VERSION = 1
PATH = "/v1/batches"
MEDIA_TYPE = "application/x-cotune-batch"
COLLECTOR_HEADER = "x-cotune-collector"
"""Every answer of a collector has this header. Without it, another server is at the collector's address."""
MOST_LISTS = 1 << 20
"""Lists, maps and negative numbers that a batch may have: each can be one byte of the body and 90 bytes of memory."""
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""A number that no store's counter overflows with."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one process of the application `app`; `parts` are those that were written together.

    `source` is the id of the spool they come from. `dropped` and `sampled` count what that process left out since the
    batch before: as its spool was full, or by its sampling rates.
    """

    v: int
    app: str
    source: str
    dropped: Count = 0
    sampled: Count = 0
    parts: list[list[Record]]


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch whose parts are packed already."""

    v: int
    app: str
    source: str
    dropped: int
    sampled: int
    parts: list[msgspec.Raw]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode

_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""Bytes of the length that follows the first byte of a value of MessagePack: of bytes, extensions and texts."""
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EXTENSIONS = {0xC7: 2, 0xC8: 3, 0xC9: 5, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_HEADS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4, **{0xA0 | size: size for size in range(32)}}
_SIZES = [1 + (_LENGTHS | _NUMBERS | _EXTENSIONS | _HEADS).get(first, 0) for first in range(256)]
"""By its first byte, the bytes of a value without those that its length counts, and without what is in it."""
_LIGHT = bytes([*range(0x80), *range(0xA0, 0xC7), *range(0xCA, 0xD0), *range(0xD9, 0xDC)])
"""First bytes of all other values: texts, bytes, numbers from 0, floats, true, false and nil."""


def read_batch(body: bytes) -> Batch:
    """Inverse of `pack_batch`, once unpacked. Raises msgspec.DecodeError, and ValidationError with the field, or where
    there are more than `MOST_LISTS` values that take much memory."""
    # Senders' batches are rarely longer, and few of those have so many of these bytes, which texts have too.
    if len(body) > MOST_LISTS and len(body.translate(None, _LIGHT)) > MOST_LISTS and _has_too_many(body):
        raise msgspec.ValidationError(f"Expected at most {MOST_LISTS} lists, maps and negative numbers")
    return _decode(body)


def _has_too_many(body: bytes) -> bool:
    """Whether a MessagePack text has more of these values than may be. Lists and maps come before what is in them, so
    the values follow each other however they are nested."""
    at = found = 0
    while at < len(body) and found <= MOST_LISTS:
        first, after = body[at], at + 1
        at += _SIZES[first]
        if length := _LENGTHS.get(first):
            at += int.from_bytes(body[after : after + length])
        found += first not in _LIGHT
    return found > MOST_LISTS


def pack_batch(app: str, source: str, parts: Sequence[bytes], dropped: int = 0, sampled: int = 0) -> bytes:
    """A gzip body of parts that `wire.pack` has packed."""
    raw = _encode(
        _Packed(
            v=VERSION, app=app, source=source, dropped=dropped, sampled=sampled, parts=list(map(msgspec.Raw, parts))
        )
    )
    packer = zlib.compressobj(1, wbits=31)
    return packer.compress(raw) + packer.flush()


def check_app(app: str) -> str:
    """The name of an application. Raises ConfigError."""
    if not app:
        raise ConfigError("app", None, "is missing", 'Name the application: app="desk", or set COTUNE_APP.')
    if _APP.fullmatch(app) is None:
        remedy = "Use up to 64 letters, digits, dots, hyphens and underscores."
        raise ConfigError("app", app, "is not the name of an application", remedy)
    return app
