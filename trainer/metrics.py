"""Metrics of a step: one JSON line per step, per role and per policy."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from cotune.prepare import Prepared
from cotune.records import Episode


class Clock:
    """Seconds by phase of one step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - started


class StepMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What one step did. `left_out` counts what was not trained on, by reason."""

    step: int
    episodes: int
    failed: int
    calls: int
    candidates: int
    groups: int
    rows: int
    outcome: dict[str, float]
    """Mean of each named team reward and metric over the episodes."""
    roles: dict[str, dict[str, float]]
    policies: dict[str, dict[str, float]]
    left_out: dict[str, int]
    lr_scale: float
    seconds: dict[str, float]
    tokens_per_s: float
    updated: bool
    notes: tuple[str, ...] = ()


def outcome_means(episodes: Sequence[Episode], rewards: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Mean of each outcome component and metric over the episodes that ended well."""
    values: dict[str, list[float]] = defaultdict(list)
    for episode in episodes:
        if episode.status == "ok":
            for name, value in {**rewards.get(episode.id, {}), **episode.metrics}.items():
                values[name].append(value)
    return {name: sum(found) / len(found) for name, found in sorted(values.items())}


def role_metrics(prepared: Prepared, updates: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Per role: reward, group spread, zero-variance share, lengths; clip share, entropy, gap from its update."""
    roles: dict[str, dict[str, float]] = {r: msgspec.structs.asdict(figures) for r, figures in prepared.roles.items()}
    for figures in updates.values():
        for name, value in figures.items():
            role, _, metric = name.rpartition("/")
            if role in roles:
                roles[role][metric] = value
    return roles
