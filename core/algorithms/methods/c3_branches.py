"""C3 with whole branches: the default under a replay plan."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import leave_one_out
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, PROMPT_KEY, Filters
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class C3Branches(Method):
    """`c3` with whole branches (arXiv 2603.06859): the default under a replay plan, not a published method.

        A_j = R_j - 1 / (K - 1) * sum of R_i over i != j

    Later calls of a branch are trained on too. They are in no group and have the A_j of the answer at their fork: the
    outcomes of its siblings are a baseline for everything that follows the fork.
    """

    name = "c3_branches"
    plan = "replay"
    group_by = PROMPT_KEY
    attribution = OUTCOME
    filters = Filters(zero_variance=True)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = leave_one_out(rewards[group])
        return advantages
