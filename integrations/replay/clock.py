"""Hooks the clock. In a frozen episode it shows the recorded times; outside of one it is unchanged."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from cotune.errors import ConfigError
from cotune.replay.draws import recorded_values_here, replace_everywhere

_COUNTERS = ("monotonic", "perf_counter")
"""Clocks that measure durations. Only the application's own code gets recorded values: event loops and connections
depend on the real ones."""


@cache
def install() -> None:
    """Hook the wall clock for all code, and the clocks that measure durations. Idempotent. Raises ConfigError."""
    try:
        import time_machine
    except ImportError:
        fault = "needs the package time-machine, which is not installed"
        raise ConfigError("replay.tools", "frozen", fault, "pip install time-machine") from None
    real_wall_ns = time_machine.escape_hatch.time.time_ns

    def wall_ns() -> int:
        if (frozen := recorded_values_here(__name__)) is None:
            return real_wall_ns()
        chance, place = frozen
        return chance.clock("wall", place, real_wall_ns())

    # A journey through time that begins now hooks all readers of the wall clock; they then read `wall_ns`.
    generate_time_safe: Any = uuid._generate_time_safe  # type: ignore[attr-defined]
    traveller: Any = time_machine.travel(time.time(), tick=True).start()
    traveller.time_ns = wall_ns
    uuid._generate_time_safe = generate_time_safe  # type: ignore[attr-defined]  # travelling takes it away
    for name in _COUNTERS:
        originals = (getattr(time, name), getattr(time, f"{name}_ns"))
        in_seconds, in_ns = _clock_functions(name)
        setattr(time, name, in_seconds)
        setattr(time, f"{name}_ns", in_ns)
        replace_everywhere(originals, (in_seconds, in_ns), own=True)


def _clock_functions(name: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Replacements for a clock of `time` and its nanosecond variant. In a replay they return the recorded times."""
    seconds: Callable[[], float] = getattr(time, name)
    ns: Callable[[], int] = getattr(time, f"{name}_ns")

    @wraps(seconds)
    def in_seconds() -> float:
        if (frozen := recorded_values_here(__name__, own=True)) is None:
            return seconds()
        chance, place = frozen
        return chance.clock(name, place, ns()) / 1e9

    @wraps(ns)
    def in_ns() -> int:
        if (frozen := recorded_values_here(__name__, own=True)) is None:
            return ns()
        chance, place = frozen
        return chance.clock(name, place, ns())

    return in_seconds, in_ns
