"""CoMAS: agents that score each other."""

from __future__ import annotations

from cotune.algorithms.methods.reinforce_pp import ReinforcePp
from cotune.algorithms.recipes import Attribution


class CoMas(ReinforcePp):
    """CoMAS (arXiv 2510.08529): agents propose, evaluate and score each other, and these scores are their rewards.

        r_solver = score, r_evaluator = 1 - score       (equation 7)
        A = (r - mean(r)) / std(r) over all tokens of the policy's batch    (equation 10)

    The workflow returns both rewards by role. KL in the reward (equation 9), as in REINFORCE++.

    Difference: the workflow decides who acts next, and scores.
    """

    name = "comas"
    attribution = Attribution(outcome=True, seats=True)
