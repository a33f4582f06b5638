"""Recipes that learn from records instead of rollouts.

sft: maximum likelihood of the recorded answers. loss = - sum over answer tokens of log pi(token) / their number, in the
rows of an optimizer step.

dpo (arXiv 2305.18290, equation 7): pairs of a better and a worse answer to one prompt, x_w and x_l, and the policy
pi_0 that the run starts from. loss = mean over pairs of -log sigmoid(m), with the margin
m = beta ((log pi(x_w) - log pi_0(x_w)) - (log pi(x_l) - log pi_0(x_l))). log pi(x) is the sum over the answer's tokens;
with length normalisation their mean. The gradient in log pi(x_w) is -beta sigmoid(-m) / pairs, in log pi(x_l) the
opposite. A policy gradient without a ratio has the same gradient if its advantages are +-2 beta sigmoid(-m) over 2 rows
per pair.

sweet_rl (SWEET-RL, arXiv 2503.15478): dpo on candidates that a critic has ranked. The critic reads the task's reference
too. The advantage A_t of a turn is the mean of log pi_critic - log pi_ref over its tokens. The critic learns from pairs
of episodes of one task, tau_w with the better outcome and tau_l with the worse: the loss of dpo with the margin
m = beta (sum of A_t over tau_w - sum of A_t over tau_l) (equations 2 and 3). The gradient in the log pi_critic of a
token of tau_w is -beta sigmoid(-m) / (pairs * tokens of its turn).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from cotune.algorithms.recipes import LossSpec

PAIRED = ("dpo", "sweet_rl")
"""Recipes whose rows are pairs: a better and a worse answer to one prompt."""
_LIKELIHOOD = LossSpec(ratio="none", style="none", tis_cap=None)
_PREFERENCE = LossSpec(ratio="none", style="none", tis_cap=None, aggregation="constant", constant_length=1)
FROM_RECORDS: Mapping[str, LossSpec] = {"sft": _LIKELIHOOD, **dict.fromkeys(PAIRED, _PREFERENCE)}
"""Losses by recipe. With length normalisation the loss of dpo is a mean over each answer's tokens."""
TURN_CRITIC = LossSpec(ratio="none", style="none", tis_cap=None, aggregation="sequence_mean")
"""The loss of the critic of sweet_rl: each turn weighs the same, whatever its length."""


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
