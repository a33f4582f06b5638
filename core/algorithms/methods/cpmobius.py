"""CPMobius: a coach sets problems, a player solves them."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class CpMobius(Method):
    """CPMobius (arXiv 2602.02979): a coach sets problems, a player solves them, and each has its own reward.

        A = (r - mean(r)) / (std(r) + 1e-6)

    The player's group is its answers to one problem, for problems that it solves with a rate of 0.2 to 0.8. The coach's
    group is the problems that it has set from one prompt. The roles are named `coach` and `player`.

    Difference: the coach is compared with its other proposals for the same prompt and gets the workflow's reward,
    not the gain after the update (docs/internals/training.md says why).
    """

    name = "cpmobius"
    group_by = ("task", "role", "branch")
    attribution = Attribution(outcome=True, seats=True)
    filters = Filters(mean_range=(0.2, 0.8), mean_range_roles=("player",))
    loss = LossSpec(aggregation="sequence_mean")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=1)
        return advantages
