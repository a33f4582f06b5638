"""SPIRAL: self-play with a moving average for each seat."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import above
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Spiral(Method):
    """SPIRAL (arXiv 2506.24119): self-play on zero-sum games with role-conditioned advantages (RAE).

        b <- 0.95 b + 0.05 R for each game and role, then A = R - b     (equation 2)
        loss = -A log pi, summed over tokens                            (equation 3)

    R is the outcome of the role's own seat. There is no ratio, standard deviation or division by the length.

    Difference: the average moves once per step, by the mean of the step's games, so the order of episodes does not
    matter. It moves before it is subtracted, as in the paper. The authors' code subtracts it first: with one game per
    step our advantages are 0.95 times theirs. If tasks are different games, derive a class with
    `group_by = ("task", "role")`.
    """

    name = "spiral"
    group_by = ("role",)
    compares = False
    remembers = True
    attribution = Attribution(own=False, outcome=True, seats=True)
    filters = Filters(zero_advantage=True)
    loss = LossSpec(ratio="none", aggregation="constant")
    decay = 0.95

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            b = step.moving_average(group, float(rewards[group].mean()), self.decay)
            advantages[group] = above(rewards[group], b)
        return advantages
