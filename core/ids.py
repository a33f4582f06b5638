"""Sortable ids (ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32) and content addresses."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_PAIRS = [a + b for a in _ALPHABET for b in _ALPHABET]
_lock = threading.Lock()
_last = 0


def new_id() -> str:
    """Return a 26-character ULID, strictly increasing within this process."""
    global _last
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10))
    with _lock:
        value = _last = value if value > _last else _last + 1
    return "".join(_PAIRS[value >> shift & 1023] for shift in range(120, -1, -10))


def message_id(message: Mapping[str, Any]) -> str:
    """Content address of a chat message: 32 hex digits of BLAKE2b over its canonical JSON."""
    return hashlib.blake2b(msgspec.json.encode(message, order="sorted"), digest_size=16).hexdigest()


def segment_id(token_ids: Sequence[int]) -> str:
    """Content address of a token path from its root: equal ids mean identical token ids, however it was split."""
    return hashlib.blake2b(np.asarray(token_ids, dtype=np.int32).tobytes(), digest_size=16).hexdigest()
