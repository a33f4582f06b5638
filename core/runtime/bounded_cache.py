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
"""Size of a request in bytes up to which work on it takes only a few milliseconds, so that it needs no thread."""


class BoundedCache(Generic[V]):
    """Values by key, at most `entries` of them and `size` bytes in all. Safe to use from several threads.

    `put` takes the size of each value. A value larger than a fourth of `size` is not stored: it would push out too many
    others.
    """

    def __init__(self, entries: int, size: int) -> None:
        """`entries` is the maximum number of values, and `size` the maximum sum of their sizes in bytes."""
        self.entries = entries
        self.size = size
        self.bytes = 0
        self._entries: OrderedDict[Hashable, tuple[V, int]] = OrderedDict()
        # Reentrant: the garbage collector may end a call, and so store a value, inside a method of this class.
        self._lock = threading.RLock()
        survives_fork(self)

    def after_fork(self) -> None:
        """In a forked child: replace the lock."""
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Hashable) -> V | None:
        """The value, which becomes the most recently used; None if it is not stored."""
        with self._lock:
            entry = self._entries.pop(key, None)
            if entry is None:
                return None
            self._entries[key] = entry
            return entry[0]

    def put(self, key: Hashable, value: V, size: int) -> int:
        """Store a value of `size` bytes in place of an earlier one, and drop the least recently used values to make
        room.

        Returns the number of dropped values. A value that would take more than a quarter of the cache is dropped
        itself, so that it does not drive out all others.
        """
        with self._lock:
            earlier = self._entries.pop(key, None)
            if earlier is not None:
                _, earlier_size = earlier
                self.bytes -= earlier_size
            if size > self.size // 4:
                return 1
            self._entries[key] = value, size
            self.bytes += size
            dropped = 0
            while self._entries and (len(self._entries) > self.entries or self.bytes > self.size):
                _, (_, dropped_size) = self._entries.popitem(last=False)
                self.bytes -= dropped_size
                dropped += 1
            return dropped


def bytes_of(value: Any, most: float = math.inf) -> int:
    """The memory of a value of JSON's types with all its parts, in bytes. A part that occurs twice counts twice.

    Counting stops when there are more than `most`.
    """
    total = 0
    pending = [value]  # a list of parts to count instead of recursion, for values that are deeply nested
    while pending and total <= most:
        part = pending.pop()
        total += memoryview(part).nbytes if type(part) is msgspec.Raw else sys.getsizeof(part)
        if isinstance(part, dict):
            pending += part.keys()
            pending += part.values()
        elif isinstance(part, list | tuple):
            pending += part
    return total
