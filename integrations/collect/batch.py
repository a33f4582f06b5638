"""Batches of records, each of which an application sends to a collector in one request, and their format."""

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
"""The most lists, maps and negative numbers in a batch. Each can take one byte of the body and 90 bytes of memory."""
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 32)]
"""A count that is too small to overflow the counters of a store."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one process of the application `app`. The records of each part were written together.

    `source` is the id of their spool. Since its last batch the process has left out `dropped` records because of a full
    spool, and `sampled` calls by its sampling rates.
    """

    v: int
    app: str
    source: str
    dropped: Count = 0
    sampled: Count = 0
    parts: list[list[Record]]


class _Packed(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with packed parts."""

    v: int
    app: str
    source: str
    dropped: int
    sampled: int
    parts: list[msgspec.Raw]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Batch).decode

_LENGTHS = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xC7: 1, 0xC8: 2, 0xC9: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
"""For the first byte of bytes, extensions and texts in MessagePack: how many bytes of length follow."""
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_EXTENSIONS = {0xC7: 2, 0xC8: 3, 0xC9: 5, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_HEADS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4, **{0xA0 | size: size for size in range(32)}}
_SIZES = [1 + (_LENGTHS | _NUMBERS | _EXTENSIONS | _HEADS).get(first, 0) for first in range(256)]
"""The bytes of a value by its first byte, without the bytes that its length counts, and without its elements."""
_LIGHT = bytes([*range(0x80), *range(0xA0, 0xC7), *range(0xCA, 0xD0), *range(0xD9, 0xDC)])
"""First bytes of values that take little memory: texts, bytes, numbers from 0, floats, true, false and nil."""


def read_batch(body: bytes) -> Batch:
    """Read the unpacked body of a batch. Raises msgspec.DecodeError, and ValidationError with the field, or if more
    than `MOST_LISTS` values take much memory."""
    # The exact count is slow. It is only needed for long batches with many of these bytes, which texts also have.
    if len(body) > MOST_LISTS and len(body.translate(None, _LIGHT)) > MOST_LISTS and _has_too_many(body):
        raise msgspec.ValidationError(f"Expected at most {MOST_LISTS} lists, maps and negative numbers")
    return _decode(body)


def _has_too_many(body: bytes) -> bool:
    """Whether a MessagePack body has more than `MOST_LISTS` values that take much memory: lists, maps and negative
    numbers.

    Elements follow directly after the head of their list or map, so nested values need no recursion.
    """
    position = 0
    n_heavy_values = 0
    while position < len(body) and n_heavy_values <= MOST_LISTS:
        # The first byte of a value names its type, and with it the size of its head.
        first_byte = body[position]
        if first_byte not in _LIGHT:
            n_heavy_values += 1
        size = _SIZES[first_byte]
        if n_length_bytes := _LENGTHS.get(first_byte):
            size += int.from_bytes(body[position + 1 : position + 1 + n_length_bytes])
        position += size
    return n_heavy_values > MOST_LISTS


def pack_batch(app: str, source: str, parts: Sequence[bytes], dropped: int = 0, sampled: int = 0) -> bytes:
    """The gzip body of a batch. `parts` are records that `wire.pack` has packed, and `source` names their spool.

    `dropped` and `sampled` are the numbers of records that were left out before this batch.
    """
    raw_parts = list(map(msgspec.Raw, parts))
    batch = _Packed(v=VERSION, app=app, source=source, dropped=dropped, sampled=sampled, parts=raw_parts)
    packer = zlib.compressobj(level=1, wbits=31)  # 31: the format of gzip
    return packer.compress(_encode(batch)) + packer.flush()


def check_app(app: str) -> str:
    """Check the name of an application. Raises ConfigError."""
    if not app:
        raise ConfigError("app", None, "is missing", 'Name the application: app="desk", or set COTUNE_APP.')
    if _APP.fullmatch(app) is None:
        remedy = "Use up to 64 letters, digits, dots, hyphens and underscores."
        raise ConfigError("app", app, "is not the name of an application", remedy)
    return app
