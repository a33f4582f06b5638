"""A cache of the most recently used values, bounded in entries and in bytes."""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Any, Generic, TypeVar

import msgspec

from cotune.runtime.forks import survives_fork

V = TypeVar("V")
INLINE = 32 << 10
"""Bytes of a request up to which work on it takes a few milliseconds, less than a thread's turn may."""


class BoundedCache(Generic[V]):
    """Values by key, of at most `entries` entries and `size` bytes together. Safe to use from several threads.

    `put` is given the size of each. A value larger than a fourth of `size` is not kept: it would push out the rest.
    """

    def __init__(self, entries: int, size: int) -> None:
        self.entries = entries
        self.size = size
        self.bytes = 0
        self._kept: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        # Reentrant, as the garbage collector may end a call, and so keep something, in the midst of this.
        self._lock = threading.RLock()
        survives_fork(self)

    def after_fork(self) -> None:
        """In a forked child: a lock of its own."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: Hashable) -> V | None:
        """The value, which then is the last to go; None where it is not kept."""
        with self._lock:
            found = self._kept.pop(key, None)
            if found is None:
                return None
            self._kept[key] = found
            return found[0]

    def put(self, key: Hashable, value: V, size: int) -> int:
        """Keep a value of `size` bytes, in place of an earlier one, dropping the least recently used to make room.

        Returns how many values were dropped, this one included.
        """
        with self._lock:
            earlier = self._kept.pop(key, None)
            if earlier is not None:
                self.bytes -= earlier[1]
            if size > self.size // 4:
                return 1
            self._kept[key] = value, size
            self.bytes += size
            dropped = 0
            while self._kept and (len(self._kept) > self.entries or self.bytes > self.size):
                _, (_, dropped_size) = self._kept.popitem(last=False)
                self.bytes -= dropped_size
                dropped += 1
            return dropped


def bytes_of(value: Any, most: float = math.inf) -> int:
    """Bytes of memory that a value of JSON's types takes, with all that is in it. What occurs twice counts twice.

    Counted until there are more than `most`.
    """
    total, rest = 0, [value]
    while rest and total <= most:
        one = rest.pop()
        total += memoryview(one).nbytes if type(one) is msgspec.Raw else sys.getsizeof(one)
        if isinstance(one, dict):
            rest += one.keys()
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one
    return total
