"""MMedAgent-RL: an entropy bonus that differs by sample."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import Attribution, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class MMedAgentRl(Method):
    """MMedAgent-RL (arXiv 2506.00555): GRPO by role on a curriculum, with an entropy bonus that differs by sample.

        r = format + accuracy
        A = (r - mean(r)) / (std(r) + 1e-6) over the role's calls of a task

    The weight of the entropy is 0.01 times the component `exploration` of the episode's outcome: low if the
    specialists agree and are right, high if they contradict each other or are wrong. The curriculum, easy to hard,
    is `curriculum.pool = "by:FIELD"`.

    Difference: the workflow says how much a task is explored.
    """

    name = "mmedagent_rl"
    group_by = ("task", "role")
    attribution = Attribution(outcome=True, weights={"exploration": 0.0})
    loss = LossSpec(entropy=0.01, entropy_by="exploration", aggregation="sequence_mean")

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=1)
        return advantages
