"""Trajectory alignment: every episode of a task gives a role as many calls as every other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotune.algorithms.samples import Sample
from cotune.records.plans import seed_of


def align(samples: Sequence[Sample], most: int) -> list[int]:
    """Indices of the samples to train on, some of them twice or more, in order.

    M-GRPO (arXiv 2511.13288, trajectory alignment): a sub-agent is called d times in an episode, and the episodes of a
    task differ in d. All get D = min(most, the largest d of the task), so that each weighs the same: of more than D a
    random D stay, of fewer all are taken again, at random, until there are D. The choice depends on the task, the role,
    the episode's place among those of the task, and the training step alone.
    """
    calls: dict[tuple[str, str], dict[str, list[int]]] = {}
    for i, sample in enumerate(samples):
        calls.setdefault((sample.task, sample.role), {}).setdefault(sample.rollout, []).append(i)
    taken: list[int] = []
    for (task, role), episodes in calls.items():
        count = min(most, max(map(len, episodes.values())))
        for place, own in enumerate(episodes.values()):
            order = np.random.default_rng(seed_of(samples[own[0]].training_step, task, role, place))
            whole, rest = divmod(count, len(own))
            taken += own * whole + [own[i] for i in order.choice(len(own), rest, replace=False)]
    return sorted(taken)
