"""REINFORCE++: advantages normalised over the whole batch."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class ReinforcePp(Method):
    """REINFORCE++ (arXiv 2501.03262): advantages normalised over the whole batch.

        A = (R - mean(R)) / (std(R) + 1e-6) over all tokens of the batch    (equation 5 of its version 9)
        A_t = A - beta (log pi_old - log pi_ref)        (equation 4, beta = 0.01)

    R is the outcome of the episode. A batch is all that a policy does in a step. PPO's token clip 0.2.

    Difference: the KL of a token counts only for that token, after the scale.
    """

    name = "reinforce_pp"
    group_by = ("policy",)
    unit = "token"
    attribution = OUTCOME
    loss = LossSpec(kl=0.01, kl_in="reward")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for batch in step.groups:
            advantages[batch] = standardized(rewards[batch], ddof=0, weights=step.tokens[batch])
        return advantages
