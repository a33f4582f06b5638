"""CISPO: the weight is clipped, not the update."""

from __future__ import annotations

from cotune.algorithms.methods.any_plan import AnyPlan
from cotune.algorithms.recipes import Filters, LossSpec


class Cispo(AnyPlan):
    """CISPO (arXiv 2506.13585): clip the weight of a token, not its update.

        loss = -stop_grad(min(rho, 1 + 4)) A log pi     (equations 4 and 5, without a lower bound)

    Dynamic sampling and token mean as in `dapo`.

    Difference: the upper bound is 5; the paper tunes it. No length penalty. Otherwise as `dapo`.
    """

    name = "cispo"
    filters = Filters(zero_variance=True)
    loss = LossSpec(style="cispo", clip_low=1.0, clip_high=4.0)
