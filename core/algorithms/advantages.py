"""Advantages of tokens, from the values of a critic (`LossSpec.critic`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotune.algorithms.samples import Floats


def gae(values: Floats, reward: float, gamma: float, lam: float) -> Floats:
    """[tokens] advantages of a response with the critic's `values` ([tokens], before each token) and one reward, which
    comes with its last token (arXiv 1506.02438, equation 16):

        delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  V and A after the last token 0

    The critic's target is A + V.
    """
    after = np.append(values[1:], 0.0)
    rewards = np.zeros(len(values))
    rewards[-1] = reward
    deltas = rewards + gamma * after - values
    advantages = np.zeros(len(values))
    following = 0.0
    for t in range(len(values) - 1, -1, -1):
        following = deltas[t] + gamma * lam * following
        advantages[t] = following
    return advantages


def whitened(advantages: Sequence[Floats]) -> list[Floats]:
    """The advantages of a batch of responses, (A - mean) / std over all its tokens; A - mean if all are equal."""
    pooled = np.concatenate(advantages)
    deviation = float(pooled.std())
    scale = deviation + 1e-8 if deviation > 0.0 else 1.0
    return [(of_response - pooled.mean()) / scale for of_response in advantages]
