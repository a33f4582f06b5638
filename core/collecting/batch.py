"""A batch: what one request brings from an application to a collector, and how it is packed."""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence

import msgspec

from cotune.errors import ConfigError
from cotune.records.structs import Record

VERSION = 1
PATH = "/v1/batches"
MEDIA_TYPE = "application/x-cotune-batch"
_APP = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """Records of one process of the application `app`; `parts` are those that were written together.

    `source` is the id of the spool they come from. `dropped` and `sampled` count what that process left out since the
    batch before: as its spool was full, or by its sampling rates.
    """

    v: int
    app: str
    source: str
    dropped: int = 0
    sampled: int = 0
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
read_batch = msgspec.msgpack.Decoder(Batch).decode
"""Inverse of `pack_batch`, once unpacked. Raises msgspec.DecodeError, and ValidationError with the field."""


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
