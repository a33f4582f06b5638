"""MAGRPO: one joint reward, compared turn by turn."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import centred
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OWN_AND_OUTCOME, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class MaGrpo(Method):
    """MAGRPO (arXiv 2508.04652): roles that answer for one joint reward, compared turn by turn.

        R_t = r_t + gamma R_(t+1)
        A_t = R_t - mean(R_t) over the group's episodes, by role
        loss = -A_t log pi(a_t | h_t)

    r_t is the joint reward of turn t. There is no ratio, standard deviation or KL. gamma = 0.9 as in the authors'
    code.

    Difference: K whole episodes. The authors' code also branches at every turn and ends good branches.
    """

    name = "magrpo"
    group_by = ("task", "role", "turn")
    attribution = OWN_AND_OUTCOME
    to_go = True
    joins_roles = True
    loss = LossSpec(ratio="none", aggregation="constant")
    gamma = 0.9

    def rewards(self, step: Step) -> Floats:
        return step.mean_over_roles(step.rewards_to_go(self.gamma))

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = centred(rewards[group])
        return advantages
