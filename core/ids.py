"""Sortable ids (ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32) and content addresses."""

from __future__ import annotations

import functools
import hashlib
import os
import random
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_SHIFTS = range(120, 0, -10)
_lock = threading.Lock()
_last = _head = 0
_prefix = ""
_random = random.Random()
os.register_at_fork(after_in_child=_random.seed)


def new_id() -> str:
    """Return a 26-character ULID, strictly increasing within this process.

    Ids of one millisecond count up from a random number, as the ULID specification has it.
    """
    global _last, _head, _prefix
    now = time.time_ns() // 1_000_000
    with _lock:
        if now > _last >> 80:
            _last = now << 80 | _random.getrandbits(80)
        else:
            _last += 1
        value = _last
        if value >> 10 != _head:
            _head = value >> 10
            _prefix = "".join([_PAIRS[value >> shift & 1023] for shift in _SHIFTS])
        return _prefix + _PAIRS[value & 1023]


def message_id(message: Mapping[str, Any]) -> str:
    """Content address of a chat message: 32 hex digits of BLAKE2b over its canonical JSON."""
    return hashlib.blake2b(msgspec.json.encode(message, order="sorted"), digest_size=16).hexdigest()


def segment_id(token_ids: Sequence[int]) -> str:
    """Content address of a token path from its root: equal ids mean identical token ids, however it was split."""
    return path_digest(pack_ids(token_ids)).hexdigest()


def path_digest(path: bytes) -> hashlib.blake2b:
    """Digest whose `hexdigest` is the `segment_id` of a packed path; a copy of it can be updated with what follows."""
    return hashlib.blake2b(path, digest_size=16)


class PackedIds(tuple[int, ...]):
    """Token ids that carry their packed form, so that it is made only once."""

    packed: bytes

    @classmethod
    def of(cls, token_ids: Sequence[int], packed: bytes) -> PackedIds:
        made = cls(token_ids)
        made.packed = packed
        return made


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: a prefix of the bytes is a prefix of the ids. Raises struct.error."""
    if type(token_ids) is PackedIds:
        return token_ids.packed
    return _packer(len(token_ids)).pack(*token_ids)


@functools.lru_cache(8192)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def unpack_ids(path: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ids`."""
    return struct.unpack(f"<{len(path) // 4}i", path)
