"""Hooks of the clock: in a frozen episode it goes through the episode's chance; elsewhere it is as ever."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from cotune.errors import ConfigError
from cotune.replay.draws import asking, replace_everywhere

_COUNTERS = ("monotonic", "perf_counter")
"""What measures how long something took. Only the application's own code is given those of the record: event loops and
connections live by them."""


@cache
def install() -> None:
    """Hook the wall clock for all code, and the clocks that measure durations. Idempotent. Raises ConfigError."""
    try:
        import time_machine
    except ImportError:
        fault = "needs the package time-machine, which is not installed"
        raise ConfigError("replay.tools", "frozen", fault, "pip install time-machine") from None
    generate: Any = uuid._generate_time_safe  # type: ignore[attr-defined]
    real = time_machine.escape_hatch.time.time_ns

    def wall_ns() -> int:
        found = asking(__name__)
        return real() if found is None else found[0].clock("wall", found[1], real())

    traveller: Any = time_machine.travel(time.time(), tick=True).start()
    traveller.time_ns = wall_ns
    uuid._generate_time_safe = generate  # type: ignore[attr-defined]  # travelling takes it away
    for name in _COUNTERS:
        originals, hooked = (getattr(time, name), getattr(time, f"{name}_ns")), _counter(name)
        setattr(time, name, hooked[0])
        setattr(time, f"{name}_ns", hooked[1])
        replace_everywhere(originals, hooked, own=True)


def _counter(name: str) -> tuple[Callable[[], float], Callable[[], int]]:
    seconds: Callable[[], float] = getattr(time, name)
    ns: Callable[[], int] = getattr(time, f"{name}_ns")

    @wraps(seconds)
    def in_seconds() -> float:
        found = asking(__name__, own=True)
        return seconds() if found is None else found[0].clock(name, found[1], ns()) / 1e9

    @wraps(ns)
    def in_ns() -> int:
        found = asking(__name__, own=True)
        return ns() if found is None else found[0].clock(name, found[1], ns())

    return in_seconds, in_ns
