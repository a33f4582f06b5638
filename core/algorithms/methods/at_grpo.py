"""AT-GRPO: the candidates of one call are compared."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import PROMPT_KEY, Filters
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class AtGrpo(Method):
    """AT-GRPO (arXiv 2510.11062): compare the K candidates of one call.

        r_k = team_weight * team_k + local_k            (equation 3)
        A_k = (r_k - mean(r)) / (std(r) + 1e-6)         (equation 1; std with n - 1)

    The team's reward comes from the role's scorer, as `team`: all candidates of a call share the rest of the episode,
    so its outcome cannot tell them apart. Under another plan the outcome is added. Clip 0.2, no KL.

    Difference: groups with equal rewards are left out. The paper keeps them with advantage 0.
    """

    name = "at_grpo"
    plan = "tree"
    group_by = PROMPT_KEY
    filters = Filters(zero_variance=True)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=1)
        return advantages
