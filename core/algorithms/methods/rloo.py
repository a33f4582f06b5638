"""RLOO: each episode against the mean of the others."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import above, all_equal
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Rloo(Grpo):
    """RLOO (arXiv 2402.14740): compare each episode of a task with the mean of the others.

        A_i = R_i - 1 / (K - 1) * sum of R_j over j != i    (section 2.3)

    A response is one action, so its token log-probabilities are summed.

    Difference: the ratio is clipped, which changes nothing while a step has one update.
    """

    name = "rloo"
    loss = LossSpec(aggregation="constant")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        """R minus the mean of the other episodes of the group, [n]."""
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            episodes, episode_of = step.by_episode(rewards, group)
            if not all_equal(episodes):
                mean_of_others = (episodes.sum() - episodes) / (len(episodes) - 1)
                advantages[group] = above(rewards[group], mean_of_others[episode_of])
        return advantages
