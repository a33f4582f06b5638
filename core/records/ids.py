"""Sortable ids (ULID: 48 bits of milliseconds, 80 random bits, Crockford base 32) and content addresses."""

from __future__ import annotations

import functools
import hashlib
import os
import re
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cotune.runtime.process_state import ProcessState

_PAIRS = [a + b for a in "0123456789ABCDEFGHJKMNPQRSTVWXYZ" for b in "0123456789ABCDEFGHJKMNPQRSTVWXYZ"]


class LastId(ProcessState):
    """The last id that this process created."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget the last id, and make a new lock. A forked child must not continue from its parent's last id."""
        self.lock = threading.Lock()
        self.value = 0


_last = LastId()
os.register_at_fork(after_in_child=_last.reset)


def new_id() -> str:
    """A 26-character ULID, strictly increasing within this process: ids of one millisecond count up from the first."""
    new = time.time_ns() // 1_000_000 << 80 | int.from_bytes(os.urandom(10))
    with _last.lock:
        _last.value = value = new if new >> 80 > _last.value >> 80 else _last.value + 1
    return ulid(value)


def ulid(value: int) -> str:
    """128 bits as the 26 characters of a ULID."""
    text = ""
    for shift in range(120, -1, -10):
        text += _PAIRS[value >> shift & 1023]
    return text


def candidate_id(call_id: str, index: int) -> str:
    """Id of a candidate as reward target and sample id: `<call id>.<index>`."""
    return f"{call_id}.{index}"


ID = re.compile(r"[0-9A-HJKMNP-TV-Z]{26}")
"""The form of ids from `new_id`."""
TARGET = re.compile(ID.pattern + r"(\.\d{1,4})?")
"""The form of ids from `new_id` and of candidate ids."""
LONGEST_KEY = 200
"""Maximum length of an application's key, in characters."""
KEY = "key:"
"""The beginning of reward targets that name episodes by the application's key."""


def key_target(app: str, key: str) -> str:
    """The reward target for all episodes of an application with this key, including later ones."""
    return f"{KEY}{app}/{key}"


def key_app(target: str) -> str:
    """The application in a target from `key_target`. Its name has no slash."""
    return target.removeprefix(KEY).partition("/")[0]


canonical = msgspec.json.Encoder(order="sorted").encode
"""JSON of a chat message that does not depend on the order of its keys."""


def message_id(message: Mapping[str, Any]) -> str:
    """Content address of a chat message: 32 hex digits of BLAKE2b over its canonical JSON."""
    return address(canonical(message))


def segment_id(token_ids: Sequence[int]) -> str:
    """Content address of a token path from its root. Equal ids mean identical token ids, even if the paths are split
    into segments differently."""
    return address(pack_ids(token_ids))


def address(content: bytes) -> str:
    """Content address: 32 hex digits of BLAKE2b."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


_WRAPPED = ("tools", "response_format", "grammar")
"""Parts of a request that are stored as messages. Their address is the address of an object with only this part."""


def has_address(id: str, body: Any) -> bool:
    """Whether `id` is the content address of a body, which is a chat message or another part of a request."""
    try:
        if address(canonical(body)) == id:
            return True
        # Another part of a request has the address of an object with only this part.
        return any(address(canonical({kind: body})) == id for kind in _WRAPPED)
    except (TypeError, ValueError, RecursionError):  # for example keys that are not text: these have no address
        return False


ROOT = hashlib.blake2b(digest_size=16)
"""Digest of the empty path. Updated with a packed path, a copy has its `segment_id` as `hexdigest`."""


packer = functools.lru_cache(8192)(struct.Struct)
"""Structs by their format: the cache of the module `struct` is cleared at every hundredth."""


def pack_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int32: a prefix of the bytes is a prefix of the ids. Raises struct.error."""
    return packer(f"<{len(token_ids)}i").pack(*token_ids)


def unpack_ids(path: bytes) -> tuple[int, ...]:
    """Inverse of `pack_ids`."""
    return struct.unpack(f"<{len(path) // 4}i", path)
