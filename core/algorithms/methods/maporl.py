"""MAPoRL: agents that debate."""

from __future__ import annotations

from cotune.algorithms.methods.critic import WithCritic
from cotune.algorithms.recipes import OWN_AND_OUTCOME
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class MaPoRl(WithCritic):
    """MAPoRL (arXiv 2502.18439): agents debate, and earn the verifier's scores of their turn and of later ones.

        R_t = (sum over t' >= t of gamma^(t' - t) r_t') / (sum over t' >= t of gamma^(t' - t))

    Then R_t is the mean over the agents of the turn. r_t is the verifier's score with its bonuses, as the scorers
    return them. gamma = 0.9. PPO with a critic.

    Difference: the value head is the one of `cory`. The scorers add the bonuses.
    """

    name = "maporl"
    attribution = OWN_AND_OUTCOME
    to_go = True
    joins_roles = True
    gamma = 0.9

    def rewards(self, step: Step) -> Floats:
        return step.mean_over_roles(step.mean_rewards_to_go(self.gamma))
