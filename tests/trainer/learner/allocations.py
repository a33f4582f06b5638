"""What is allocated, from torch's own record."""

from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_mb(action: Callable[[], Any]) -> float:
    """Highest sum of live bytes that `action` allocates, in MB (10^6 bytes)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        action()
    live = peak = 0
    for event in sorted(
        (e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"), key=lambda e: e.start_ns()
    ):
        live += event.nbytes()
        peak = max(peak, live)
    return peak / 1e6
