"""What clock, uuid and random gave to an episode, so that a replay can give it again."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from cotune.recording.hooks import hooks
from cotune.records.ids import address, canonical
from cotune.records.structs import Message

KEPT = 50_000
"""Values that are kept of one episode; further ones are not given again."""


def start_freezing() -> None:
    """Hook clock, uuid and random for all frozen episodes to come. Raises ConfigError where that cannot be."""
    for hook in hooks.freezers:
        hook()


wall_ns = time.time_ns
"""The real clock, whatever is given to an application."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """A value that an episode was given: of which kind, asked where, and when (seconds since the epoch)."""

    kind: str
    place: str
    at: float
    value: Any


class Chance:
    """The values of clock, uuid and random in one episode. A replay gives the recorded values again, by kind and place
    and in their order, and new ones when they are used up. Safe from any thread.

    A clock continues from its last value at its ordinary pace.
    """

    def __init__(self) -> None:
        # Reentrant, as the garbage collector may run code that asks, anywhere.
        self._lock = threading.RLock()
        self._reads: list[Read] = []
        self._given: dict[tuple[str, str], deque[Read]] = {}
        self._behind: dict[str, int] = {}
        """By clock, its difference from the real one in ns."""
        self.dropped = 0
        """Values that are not kept, as there were too many."""

    def give(self, reads: Sequence[Read], started: float) -> None:
        """Give these values again; the episode that had them was `started` then (seconds since the epoch)."""
        with self._lock:
            for read in reads:
                self._given.setdefault((read.kind, read.place), deque()).append(read)
            self._behind["wall"] = round(started * 1e9) - wall_ns()

    def reach(self, at: float) -> None:
        """The clock is no earlier than `at` (seconds since the epoch) from now on."""
        with self._lock:
            if "wall" in self._behind:
                self._behind["wall"] = max(self._behind["wall"], round(at * 1e9) - wall_ns())

    def drawn(self, kind: str, place: str, draw: Callable[[], Any]) -> Any:
        """A value of `kind`: a JSON value."""
        with self._lock:
            queue = self._given.get((kind, place))
            value = queue.popleft().value if queue else draw()
            self._keep(kind, place, value)
        return value

    def clock(self, kind: str, place: str, real: int) -> int:
        """The time of a clock in ns, whose real time is `real`."""
        with self._lock:
            queue = self._given.get((kind, place))
            if queue:
                value = int(queue.popleft().value)
                self._behind[kind] = max(self._behind.get(kind, value - real), value - real)
            else:
                value = real + self._behind.get(kind, 0)
            self._keep(kind, place, value)
        return value

    def _keep(self, kind: str, place: str, value: Any) -> None:
        if len(self._reads) < KEPT:
            self._reads.append(Read(kind, place, wall_ns() / 1e9, value))
        else:
            self.dropped += 1

    def record(self) -> Message | None:
        """What to store; None where nothing was asked."""
        with self._lock:
            if not self._reads:
                return None
            places = list(dict.fromkeys(read.place for read in self._reads))
            number = {place: i for i, place in enumerate(places)}
            body = {"places": places, "reads": [[r.kind, number[r.place], r.at, r.value] for r in self._reads]}
        return Message(address(canonical(body)), body)


def stored_reads(body: Mapping[str, Any]) -> tuple[Read, ...]:
    """Inverse of `Chance.record`."""
    return tuple(Read(kind, body["places"][place], at, value) for kind, place, at, value in body["reads"])
