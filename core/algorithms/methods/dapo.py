"""DAPO: clip higher, and dynamic sampling."""

from __future__ import annotations

from cotune.algorithms.methods.any_plan import AnyPlan
from cotune.algorithms.recipes import Filters, LossSpec


class Dapo(AnyPlan):
    """DAPO (arXiv 2503.14476): GRPO with a higher upper clip, and without tasks that are all right or all wrong.

        clip(rho, 1 - 0.2, 1 + 0.28), mean over tokens  (equations 11 and 12)

    A is computed as in `grpo`, or over the candidates of a call.

    Difference: the token mean is over an optimizer step. Groups without variance are left out, not sampled again.
    Overlong filtering and punishment are off; set `drop_truncated`, or `overlong_penalty` and `overlong_buffer`.
    """

    name = "dapo"
    filters = Filters(zero_variance=True)
    loss = LossSpec(clip_high=0.28)
