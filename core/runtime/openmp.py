"""Let OpenMP threads leave the cores to other threads while they wait."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = 1000
"""Number of spins of a waiting thread before it sleeps, some microseconds. With the usual 300,000, waiting threads take
a core from the process for which they wait: a pass took up to ten times as long when another process ran."""


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set this in `environment` for a process that loads torch later, unless it already sets how threads wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
