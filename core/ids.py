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
_MOST = len(_PAIRS) - 1
_lock = threading.Lock()
_millisecond = _head = 0
_low = _MOST
_second = _middle = ""
_random = random.Random()


def new_id() -> str:
    """Return a 26-character ULID, strictly increasing within this process.

    The ids of about a second count up from one random number, which the ULID specification has of each millisecond.
    """
    global _millisecond, _low
    now = time.time_ns() // 1_000_000
    with _lock:
        if now >> 10 > _millisecond >> 10:
            _take(now, _random.getrandbits(70))
            _low = _random.getrandbits(9)
        elif now > _millisecond:
            _millisecond = now
        if _low < _MOST:
            _low += 1
        else:
            _take(_millisecond, _head + 1)
            _low = 0
        return f"{_second}{_PAIRS[_millisecond & _MOST]}{_middle}{_PAIRS[_low]}"


def _take(millisecond: int, head: int) -> None:
    """Go on from here: `head` are all random bits but those that are counted first; what overflows is time."""
    global _millisecond, _head, _second, _middle
    _millisecond, _head = millisecond + (head >> 70), head & (1 << 70) - 1
    _second, _middle = _encoded(_millisecond >> 10, 40), _encoded(_head, 70)


def _encoded(value: int, bits: int) -> str:
    return "".join([_PAIRS[value >> shift & _MOST] for shift in range(bits - 10, -1, -10)])


def _after_fork() -> None:
    global _millisecond
    _random.seed()
    _millisecond = 0


os.register_at_fork(after_in_child=_after_fork)


canonical = msgspec.json.Encoder(order="sorted").encode
"""JSON of a chat message that is the same however its keys are ordered."""


def message_id(message: Mapping[str, Any]) -> str:
    """Content address of a chat message: 32 hex digits of BLAKE2b over its canonical JSON."""
    return address(canonical(message))


def segment_id(token_ids: Sequence[int]) -> str:
    """Content address of a token path from its root: equal ids mean identical token ids, however it was split."""
    return address(pack_ids(token_ids))


def address(content: bytes) -> str:
    """Content address: 32 hex digits of BLAKE2b."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def path_digest(path: bytes) -> hashlib.blake2b:
    """Digest whose `hexdigest` is the `segment_id` of a packed path; a copy of it can be updated with what follows."""
    return hashlib.blake2b(path, digest_size=16)


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: a prefix of the bytes is a prefix of the ids. Raises struct.error."""
    return _packer(len(token_ids)).pack(*token_ids)


@functools.lru_cache(8192)
def _packer(count: int) -> struct.Struct:
    return struct.Struct(f"<{count}i")


def unpack_ids(path: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ids`."""
    return struct.unpack(f"<{len(path) // 4}i", path)
