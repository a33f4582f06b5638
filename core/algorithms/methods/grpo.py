"""GRPO: the episodes of a task are compared."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import EPS, above, all_equal
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Grpo(Method):
    """GRPO (arXiv 2402.03300): compare the episodes of a task.

        A = (R - mean(R)) / (std(R) + 1e-6)             (section 4.1.2; std with n - 1)

    R is the outcome of an episode. Mean and deviation are over episodes, each of which counts once however many calls
    it has; all calls of a policy in an episode are one answer.

    Difference: the KL penalty of 0.04 (equation 3) is off; set `kl`. The paper leaves n - 1 or n open.
    """

    name = "grpo"
    group_by = ("task",)
    unit = "trajectory"
    attribution = OUTCOME
    loss = LossSpec(aggregation="trajectory_mean")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        """(R - mean) / std over the episodes of each group, [n]. All calls of an episode get the same advantage."""
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            episodes, _ = step.by_episode(rewards, group)
            if not all_equal(episodes):
                deviation = episodes.std(ddof=1) + EPS
                advantages[group] = above(rewards[group], float(episodes.mean())) / deviation
        return advantages
