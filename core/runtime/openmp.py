"""OpenMP threads that leave the cores to others while they wait."""

from __future__ import annotations

from collections.abc import MutableMapping

SPINS = 1000
"""Turns for which a thread that waits for the others spins before it sleeps, some microseconds. The usual
300,000 keep a core from the process that the other thread waits for: a pass took up to ten times as long beside it."""


def spin_briefly(environment: MutableMapping[str, str]) -> None:
    """Set this for what loads torch later with `environment`, unless it says how threads wait."""
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", str(SPINS))
