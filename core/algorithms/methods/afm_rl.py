"""Chain-of-Agents, stage 2: DAPO on answer times format."""

from __future__ import annotations

from cotune.algorithms.methods.grpo import Grpo
from cotune.algorithms.recipes import Attribution, Filters, LossSpec


class AfmRl(Grpo):
    """Chain-of-Agents, stage 2 (AFM-RL, arXiv 2508.13167): DAPO on the rollouts of one policy that plays all roles.

        R = answer * format, both 0 or 1                (equation 11)
        A = (R - mean(R)) / (std(R) + 1e-6) over the episodes of a task

    An answer of the wrong format has no reward. Equation 11 is for agents that write code; for web agents, equation 10
    has only the answer. Clip 0.2 / 0.28, token mean. Use it with `policies = "shared"`.

    Difference: groups without variance are left out, not sampled again.
    """

    name = "afm_rl"
    attribution = Attribution(own=False, outcome=True, gates=("format",))
    filters = Filters(zero_variance=True)
    loss = LossSpec(clip_high=0.28)
