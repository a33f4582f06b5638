"""GSPO: one ratio for a whole response."""

from __future__ import annotations

from cotune.algorithms.methods.any_plan import AnyPlan
from cotune.algorithms.recipes import LossSpec


class Gspo(AnyPlan):
    """GSPO (arXiv 2507.18071): one ratio per response, clipped far tighter.

        s = (pi(y) / pi_old(y))^(1 / |y|)               (equation 7)
        loss = -min(s A, clip(s) A)                     (equation 5; clip 3e-4 / 4e-4, section 5.1)

    A is computed as in `grpo`, or over the candidates of a call.

    Difference: one ratio per call, and the mean is per episode.
    """

    name = "gspo"
    loss = LossSpec(ratio="sequence", clip_low=3e-4, clip_high=4e-4, aggregation="trajectory_mean")
