"""GiGPO: groups of episodes, and within them groups of steps from one state."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class GiGpo(Grpo):
    """GiGPO (arXiv 2505.10978): groups of episodes, and within them groups of steps from one state.

        A   = A_E + A_S                                 (equation 8, omega = 1)
        A_E = (R - mean(R)) / (std(R) + 1e-6)           (equation 3) over the episodes of a task
        A_S = (G_t - mean(G)) / (std(G) + 1e-6)         (equations 6 and 7) over the steps that saw the same state
        G_t = sum over k >= t of 0.95^(k - t) r_k       (equation 5)

    R is the outcome of an episode. A step whose state no other step of the role saw has A_S = 0.

    Difference: the anchor state is the last message of the prompt, in the same role. The KL of 0.01 is off.
    """

    name = "gigpo"
    loss = LossSpec(aggregation="sequence_mean")
    gamma = 0.95

    @property
    def joins_calls(self) -> bool:
        return True  # G_t covers later calls

    def rewards(self, step: Step) -> Floats:
        step.require(step.rewards_to_go(self.gamma))
        return step.rewards()

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        of_episodes = super().advantages(step, rewards)
        of_steps = np.zeros(len(rewards))
        returns = step.rewards_to_go(self.gamma)
        for anchor_group in step.group_by("task", "role", "observation"):
            of_steps[anchor_group] = standardized(returns[anchor_group], ddof=1)
        return of_episodes + of_steps
