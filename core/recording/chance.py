"""The values that clock, uuid and random returned in an episode, so that a replay can return them again."""

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

MOST_VALUES = 50_000
"""Maximum number of values that are recorded in an episode. A replay cannot return later ones."""


def start_freezing() -> None:
    """Hook clock, uuid and random for all later frozen episodes. Raises ConfigError if they cannot be hooked."""
    for hook in hooks.freezers:
        hook()


wall_ns = time.time_ns
"""The real clock, even while the application sees another time."""


class Read(msgspec.Struct, frozen=True, array_like=True):
    """A value that an episode got: its kind, the place in the code that asked, and the time (seconds since the
    epoch)."""

    kind: str
    place: str
    at: float
    value: Any


class Chance:
    """The values of clock, uuid and random in one episode. A replay returns the recorded values again, by kind and
    place and in their order, and then new ones. Safe from any thread.

    A clock continues from its last value at its ordinary pace.
    """

    def __init__(self) -> None:
        """Without recorded values (`set_recorded`), all values are new."""
        # Reentrant: the garbage collector may run code that asks for a value at any point.
        self._lock = threading.RLock()
        self._reads: list[Read] = []
        self._recorded: dict[tuple[str, str], deque[Read]] = {}
        self._offsets: dict[str, int] = {}
        """The difference of each clock from the real one, in ns. "wall" is the clock of the calendar."""
        self.dropped = 0
        """Number of values beyond MOST_VALUES that were not recorded."""

    def set_recorded(self, reads: Sequence[Read], started: float) -> None:
        """Return these values again. `started` is when their episode started (seconds since the epoch)."""
        with self._lock:
            for read in reads:
                self._recorded.setdefault((read.kind, read.place), deque()).append(read)
            self._offsets["wall"] = round(started * 1e9) - wall_ns()

    def advance_to(self, at: float) -> None:
        """Set the clock forward to `at` (seconds since the epoch), if it is earlier."""
        with self._lock:
            if "wall" in self._offsets:
                self._offsets["wall"] = max(self._offsets["wall"], round(at * 1e9) - wall_ns())

    def draw_value(self, kind: str, place: str, draw: Callable[[], Any]) -> Any:
        """A random value of this kind for the application's code at `place`: the next recorded value, or after the last
        one a new value from `draw`.
        """
        with self._lock:
            queue = self._recorded.get((kind, place))
            value = queue.popleft().value if queue else draw()
            self._keep_value(kind, place, value)
        return value

    def clock(self, kind: str, place: str, real: int) -> int:
        """The time of a clock in ns, for the application's code at `place`: the next recorded time. After the last one
        it is the `real` time plus an offset, so that the clock continues from the recorded times.
        """
        with self._lock:
            queue = self._recorded.get((kind, place))
            if queue:
                value = int(queue.popleft().value)
                # The offset never shrinks, so that the clock does not step back after the last recorded time.
                offset = value - real
                self._offsets[kind] = max(self._offsets.get(kind, offset), offset)
            else:
                value = real + self._offsets.get(kind, 0)
            self._keep_value(kind, place, value)
        return value

    def _keep_value(self, kind: str, place: str, value: Any) -> None:
        if len(self._reads) < MOST_VALUES:
            self._reads.append(Read(kind, place, wall_ns() / 1e9, value))
        else:
            self.dropped += 1

    def record(self) -> Message | None:
        """The message with the random values and times that the episode used, in order; None if it used none.

        Each place in the code is stored once, and a value names its place by number.
        """
        with self._lock:
            if not self._reads:
                return None
            places = list(dict.fromkeys(read.place for read in self._reads))
            place_number = {place: i for i, place in enumerate(places)}
            reads = [[read.kind, place_number[read.place], read.at, read.value] for read in self._reads]
            body = {"places": places, "reads": reads}
        return Message(address(canonical(body)), body)


def stored_reads(body: Mapping[str, Any]) -> tuple[Read, ...]:
    """Inverse of `Chance.record`."""
    return tuple(Read(kind, body["places"][place], at, value) for kind, place, at, value in body["reads"])
