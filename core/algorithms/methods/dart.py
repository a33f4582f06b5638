"""DART: the steps that were decided with the most entropy."""

from __future__ import annotations

import numpy as np

from cotune.algorithms.comparing import standardized
from cotune.algorithms.method import Method
from cotune.algorithms.recipes import OUTCOME, Filters, LossSpec
from cotune.algorithms.samples import Floats
from cotune.algorithms.step import Step


class Dart(Method):
    """DART (arXiv 2509.23866): step-wise GRPO on the steps that were decided with the most entropy.

        A = (R - mean(R)) / (std(R) + 1e-6) over all steps of a task's episodes

    R is the outcome of the step's own episode. The 80% of the steps with the highest mean token entropy are trained on.
    Each token weighs min(pi_old / pi_sampler, 1).

    Difference: entropy is estimated by -log p of the sampled tokens. No stored success is added, and tasks that are
    solved often have as many episodes as others.
    """

    name = "dart"
    group_by = ("task",)
    attribution = OUTCOME
    filters = Filters(top_entropy=0.8)
    loss = LossSpec(clip_high=0.28, tis_cap=1.0)

    def advantages(self, step: Step, rewards: Floats) -> Floats:
        advantages = np.zeros(len(rewards))
        for group in step.groups:
            advantages[group] = standardized(rewards[group], ddof=1)
        return advantages
