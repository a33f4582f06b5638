"""The base class of methods with a critic."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import above
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class WithCritic(Method):
    """A value head judges each token, and GAE gives the tokens their advantages, normalised over the update. The
    advantage of a sample is then its reward, which comes with its last token."""

    group_by = ("task", "role")
    compares = False
    loss = LossSpec(critic=True, kl=0.01, kl_in="reward")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = above(rewards[group], 0.0)
        return advantages
