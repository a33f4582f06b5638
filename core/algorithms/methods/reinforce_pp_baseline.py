"""REINFORCE++ with a baseline by task."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import EPS, above, all_equal
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class ReinforcePpBaseline(Grpo):
    """REINFORCE++ with a baseline by task (arXiv 2501.03262, section 3.2).

        A' = R - mean(R) over the episodes of a task
        A = A' / (std(A') + 1e-6) over the episodes of the batch

    The mean of A' over the batch is 0 already, as it is within each task. PPO's token clip 0.2.

    Difference: its KL (k2) is off.
    """

    name = "reinforce_pp_baseline"
    loss = LossSpec()

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        """R - mean over the episodes of a task, divided by the deviation over all episodes of a policy's batch. [n]"""
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            episodes, _ = step.by_episode(rewards, group)
            advantages[group] = above(rewards[group], float(episodes.mean()))
        # Policies are trained separately, so each has a batch of its own.
        for batch in step.group_by("policy"):
            episodes, _ = step.by_episode(advantages, batch)
            if not all_equal(episodes):
                advantages[batch] /= episodes.std() + EPS
        # Tasks whose episodes are all equal teach nothing.
        for group in step.groups:
            if all_equal(step.by_episode(rewards, group)[0]):
                advantages[group] = 0.0
        return advantages
