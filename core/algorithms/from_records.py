"""Recipes that learn from records instead of rollouts.

sft: maximum likelihood of the recorded answers. loss = - sum over answer tokens of log pi(token) / their number, in the
rows of an optimizer step.

dpo (arXiv 2305.18290, equation 7): pairs of a better and a worse answer to one prompt, x_w and x_l, and the policy
pi_0 that the run starts from. loss = mean over pairs of -log sigmoid(m), with the margin
m = beta ((log pi(x_w) - log pi_0(x_w)) - (log pi(x_l) - log pi_0(x_l))). log pi(x) is the sum over the answer's tokens;
with length normalisation their mean. The gradient in log pi(x_w) is -beta sigmoid(-m) / pairs, in log pi(x_l) the
opposite. A policy gradient without a ratio has the same gradient if its advantages are +-2 beta sigmoid(-m) over 2 rows
per pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotune.algorithms.recipes import LossSpec

_LIKELIHOOD = LossSpec(ratio="none", style="none", tis_cap=None)
FROM_RECORDS: Mapping[str, LossSpec] = {
    "sft": _LIKELIHOOD,
    "dpo": LossSpec(ratio="none", style="none", tis_cap=None, aggregation="constant", constant_length=1),
}
"""Losses by recipe. With length normalisation the loss of dpo is a mean over each answer's tokens."""


class Preference(NamedTuple):
    """The loss of a pair, its margin m, and the better answer's advantage; the worse answer has its opposite."""

    loss: float
    margin: float
    advantage: float


def preference_losses(better: Sequence[float], worse: Sequence[float], beta: float) -> list[Preference]:
    """The losses of pairs, from log pi - log pi_0 of the better and the worse answer of each pair, in nats."""
    margins = beta * (np.asarray(better) - np.asarray(worse))
    losses = np.logaddexp(0.0, -margins)  # -log sigmoid(m)
    advantages = 2.0 * beta * np.exp(-np.logaddexp(0.0, margins))  # sigmoid(-m)
    return [Preference(*pair) for pair in zip(losses.tolist(), margins.tolist(), advantages.tolist(), strict=True)]
