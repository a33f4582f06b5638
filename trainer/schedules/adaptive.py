"""Tasks drawn by how much their groups are expected to teach."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from cotune.algorithms.samples import Codes, Floats
from cotune.algorithms.task_signals import RoleFacts, TaskFacts

PRIOR = 2.0
"""Rewards that the average of all tasks counts as, beside those that a task has shown."""


def chances(places: Mapping[str, int], known: Mapping[str, TaskFacts], roles: Collection[str], floor: float) -> Floats:
    """[tasks] the chance of each in a draw, at its place.

    `floor` is spread evenly over all tasks, the rest evenly over the roles, and what a role has over the tasks by the
    variance that its groups are expected to have there. That is the mean of what a task has shown and of the average
    task, which weighs as much as `PRIOR` rewards; a task that was never tried counts as the average one. The variance
    of a group of rewards 0 and 1 is p (1 - p). Where a role did not act in a task that was tried, its rewards count as
    equal. A role that has never shown a variance has no share.
    """
    tried = [(places[name], facts.roles) for name, facts in known.items() if name in places]
    index = np.array([place for place, _ in tried], np.int64)
    shares = []
    for role in sorted(roles):
        shown = [_shown(of, role) for _, of in tried]
        average = sum(variance for _, variance in shown) / max(len(shown), 1)
        if average > 0.0:
            expected = np.full(len(places), average)
            expected[index] = [(n * variance + PRIOR * average) / (n + PRIOR) for n, variance in shown]
            shares.append(expected / expected.sum())
    even = np.full(len(places), 1.0 / len(places))
    return np.asarray(floor * even + (1.0 - floor) * np.mean(shares, axis=0)) if shares else even


def in_order(weights: Floats, seed: Sequence[int]) -> Codes:
    """[tasks] their places in the order in which they are drawn with these chances, none put back."""
    times = np.random.default_rng(seed).exponential(size=len(weights))  # the first of them is drawn first
    return np.argsort(times / weights, kind="stable")


def _shown(roles: Mapping[str, RoleFacts], role: str) -> tuple[float, float]:
    """How many rewards a role has had on a task that was tried, and their variance."""
    if (own := roles.get(role)) is not None:
        return own.rewards, own.variance
    return max((other.rewards for other in roles.values()), default=0.0), 0.0
