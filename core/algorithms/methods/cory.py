"""CORY: a pioneer and an observer earn the same."""

from __future__ import annotations

from cotune.algorithms.methods.critic import WithCritic
from cotune.algorithms.recipes import Attribution
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Cory(WithCritic):
    """CORY (arXiv 2410.06101): a pioneer answers, an observer answers after it, and both get the sum of their rewards.

        r = r_pioneer + r_observer                      (equation 4)

    PPO with a critic: GAE with gamma 1 and lambda 0.95, clip 0.2, KL in the reward (equation 2). The roles exchange
    their models every few steps (equation 5): `[routing] swap`.

    Difference: the value head is linear on the policy's last hidden state and does not train it. The KL is per token.
    """

    name = "cory"
    attribution = Attribution(outcome=True, seats=True)
    joins_roles = True

    def rewards(self, step: Step) -> Floats:
        return step.sum_over_roles(step.rewards())
