"""On-policy distillation: a teacher scores the policy's samples."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Distill(Method):
    """On-policy distillation (arXiv 2306.13649, with reverse KL): the policy samples, a teacher scores each sampled
    token.

        A_t = log pi_teacher(y_t) - log pi_old(y_t)

    A_t is minus the one-sample estimate of the reverse KL of token t. Its policy gradient is the gradient of
    KL(pi || pi_teacher) at the states that the policy visits. Rewards do not count.

    Difference: one sampled token instead of the whole distribution, and no off-policy share.
    """

    name = "distill"
    group_by = ("task",)
    compares = False
    attribution = OUTCOME
    loss = LossSpec(kl=1.0, kl_in="reward", kl_to="teacher")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        return np.zeros(len(rewards))  # the learner adds A_t, token by token
