"""A memory of the most recently used values, bounded in entries and in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, TypeVar

V = TypeVar("V")


class Bounded(Generic[V]):
    """Values by key, of at most `entries` entries and `size` bytes together. Safe to use from several threads.

    Sizes are what `put` is told. A value that is larger than a fourth of all is not kept: it would push out the rest.
    """

    def __init__(self, entries: int, size: int) -> None:
        self.entries = entries
        self.size = size
        self.bytes = 0
        self._kept: OrderedDict[bytes, tuple[V, int]] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> V | None:
        """The value, which then is the last to go; None where it is not kept."""
        with self._lock:
            if key not in self._kept:
                return None
            self._kept.move_to_end(key)
            return self._kept[key][0]

    def put(self, key: bytes, value: V, size: int) -> None:
        """Keep a value of `size` bytes, in place of an earlier one, as far as there is room."""
        with self._lock:
            if key in self._kept:
                self.bytes -= self._kept.pop(key)[1]
            if size > self.size // 4:
                return
            self._kept[key] = value, size
            self.bytes += size
            while len(self._kept) > self.entries or self.bytes > self.size:
                self.bytes -= self._kept.popitem(last=False)[1][1]
