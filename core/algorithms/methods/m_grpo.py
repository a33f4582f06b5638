"""M-GRPO: a main agent and its sub-agents."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, Filters, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class MGrpo(Method):
    """M-GRPO (arXiv 2511.13288): a main agent and its sub-agents, each compared within its role.

        r_main = 0.1 format + 0.9 correct                       (equation 4)
        r_sub  = 0.1 format + 0.4 correct + 0.5 judge           (equation 5)
        A = (r - mean(r)) / (std(r) + 1e-6) over the role's calls of a task     (equations 10 and 13)

    `correct` judges the main agent's answer, `judge` the sub-agent's own work. A reply of the wrong format has no
    reward. One ratio per response (equations 14 and 16, as GSPO). Every episode gives a sub-agent the same number of
    calls, at most 8 (equation 11).

    Difference: calls, not whole sub-agent conversations, are repeated or dropped, after the advantages.
    """

    name = "m_grpo"
    group_by = ("task", "role")
    attribution = Attribution(
        outcome=True,
        weights={"format": 0.1, "correct": 0.4, "judge": 0.5, "main/correct": 0.9},
        other=0.0,
        gates=("format",),
    )
    filters = Filters(align_to=8)
    loss = LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=1)
        return advantages
