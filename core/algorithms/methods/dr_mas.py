"""Dr. MAS: each role is normalised by itself."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class DrMas(Method):
    """Dr. MAS (arXiv 2602.08847): compare the calls of a role in all episodes of a task.

        A_t = (R - mean(R)) / (std(R) + 1e-6)           (equation 5)

    R is the outcome of the episode of call t. Mean and deviation are over the active steps of the role.

    Difference: the deviation divides by n, as in the paper. The authors' code divides by n - 1, so our advantages are
    larger by the factor sqrt(n / (n - 1)): 15.5% for 4 calls, 6.9% for 8, 1.6% for 32.
    """

    name = "dr_mas"
    group_by = ("task", "role")
    attribution = OUTCOME

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=0)
        return advantages
