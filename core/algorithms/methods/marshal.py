"""MARSHAL: self-play with an advantage for every turn of every seat."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import centred
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Marshal(Method):
    """MARSHAL (arXiv 2510.15414): self-play with an advantage for every turn of every seat.

        R_t = sum of the seat's rewards from turn t on  (gamma 1)
        A_t = R_t - mean(R) over all turns of the seat in the games of a task

    First the sum, then the normalisation, by role. PPO with KL 0.2 and the dual clip at 1 + 2 * 0.2 = 1.4 of ROLL, the
    framework of the authors' code.

    Difference: the authors' code also whitens rewards and advantages over the batch, so that theirs have deviation 1
    whatever the scale of the rewards: for wins and losses of 1 and -1 in equal numbers ours are as large, for 10 and
    -10 ten times. It centres by seat over the whole batch, not within each task, so a task that a seat wins in 75% of
    the games, in a batch with 50%, has a mean advantage of 0.5 there and 0 here.
    """

    name = "marshal"
    group_by = ("task", "role")
    attribution = Attribution(outcome=True, seats=True)
    to_go = True
    loss = LossSpec(dual_clip=1.4, kl=0.2, aggregation="trajectory_mean")

    def rewards(self, step: Step) -> Floats:
        return step.rewards_to_go(gamma=1.0)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = centred(rewards[group])
        return advantages
