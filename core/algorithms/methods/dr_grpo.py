"""Dr. GRPO: GRPO without its two biases."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import above, all_equal
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class DrGrpo(Grpo):
    """Dr. GRPO (arXiv 2503.20783): GRPO without division by the deviation and by the length.

        A = R - mean(R)                                 (section 3.2)

    The loss is a sum over tokens divided by a constant, so the length of an answer does not weigh.
    """

    name = "dr_grpo"
    loss = LossSpec(aggregation="constant")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            episodes, _ = step.by_episode(rewards, group)
            if not all_equal(episodes):
                advantages[group] = above(rewards[group], float(episodes.mean()))
        return advantages
