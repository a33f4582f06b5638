"""SWEET-RL: a critic that sees the solution."""

from __future__ import annotations

from cotune.algorithms.methods.critic import WithCritic
from cotune.algorithms.recipes import OWN_AND_OUTCOME, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class SweetRl(WithCritic):
    """SWEET-RL (arXiv 2503.15478): a critic that sees the reference solution gives every turn its own advantage.

        R_t = r_t + R_(t+1)                             (gamma 1, section 4.1)

    The critic reads the task's `reference`, which the policy does not see, before the prompt of each turn
    (section 4.3). R_t ends with the outcome. GAE, clip 0.2.

    Difference: of the paper this has the critic that sees the reference, and neither of its two objectives. The critic
    is a value head that learns the return. The paper's critic is a model with the reference in its context. The mean
    log-ratio of its tokens to its initial weights is the advantage of a turn, learned by a Bradley-Terry objective over
    pairs of episodes (equations 2 and 3). The policy learns by PPO; the paper's learns by DPO on the better and the
    worse half of a turn's candidates, ranked by this advantage (equation 4). Recipe dpo learns from ranks of your own:
    `records.labels` has a score for each recorded candidate, and the best and the worst one of a turn are a pair.
    """

    name = "sweet_rl"
    attribution = OWN_AND_OUTCOME
    to_go = True
    loss = LossSpec(critic=True, critic_sees="reference")

    def rewards(self, step: Step) -> Floats:
        return step.rewards_to_go(gamma=1.0)
