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
        """The wall clock in nanoseconds: the real time, or in a replay the time that was recorded."""
        values_and_caller = recorded_values_here(__name__)
        if values_and_caller is None:
            return real_wall_ns()
        values, calling_code = values_and_caller
        return values.clock("wall", calling_code, real_wall_ns())

    # 1. The wall clock. time-machine hooks all functions that read it. They get the time from `traveller.time_ns`.
    generate_time_safe: Any = uuid._generate_time_safe  # type: ignore[attr-defined]
    traveller: Any = time_machine.travel(time.time(), tick=True).start()
    traveller.time_ns = wall_ns
    # time-machine has removed this function, which makes ids from the real time.
    uuid._generate_time_safe = generate_time_safe  # type: ignore[attr-defined]

    # 2. The clocks that measure durations. The application's modules may have imported them under their own names.
    for name in _COUNTERS:
        originals = (getattr(time, name), getattr(time, f"{name}_ns"))
        in_seconds, in_ns = _clock_functions(name)
        setattr(time, name, in_seconds)
        setattr(time, f"{name}_ns", in_ns)
        replace_everywhere(originals, (in_seconds, in_ns), only_application=True)


def _clock_functions(name: str) -> tuple[Callable[[], float], Callable[[], int]]:
    """Replacements for the function `name` of `time`, such as `monotonic`, and for its variant in nanoseconds.

    For the application's own code in a replay they return the recorded times, otherwise the real ones.
    """
    real_seconds: Callable[[], float] = getattr(time, name)
    real_ns: Callable[[], int] = getattr(time, f"{name}_ns")

    @wraps(real_seconds)
    def in_seconds() -> float:
        values_and_caller = recorded_values_here(__name__, only_application=True)
        if values_and_caller is None:
            return real_seconds()
        values, calling_code = values_and_caller
        return values.clock(name, calling_code, real_ns()) / 1e9

    @wraps(real_ns)
    def in_ns() -> int:
        values_and_caller = recorded_values_here(__name__, only_application=True)
        if values_and_caller is None:
            return real_ns()
        values, calling_code = values_and_caller
        return values.clock(name, calling_code, real_ns())

    return in_seconds, in_ns
