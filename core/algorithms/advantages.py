"""Advantages of tokens, from the values of a critic (`LossSpec.critic`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotune.algorithms.samples import Floats


def gae(values: Floats, reward: float, gamma: float, lam: float) -> Floats:
    """The advantages of the tokens of a response, [tokens], by generalized advantage estimation (arXiv 1506.02438,
    equation 16):

        delta_t = r_t + gamma V_(t+1) - V_t,  A_t = delta_t + gamma lam A_(t+1),  V and A after the last token 0

    `values` are the critic's values before each token, [tokens]. The response has one reward, which comes with its last
    token. The critic's target is A + V.
    """
    next_values = np.append(values[1:], 0.0)
    rewards = np.zeros(len(values))
    rewards[-1] = reward
    deltas = rewards + gamma * next_values - values
    advantages = np.zeros(len(values))
    next_advantage = 0.0
    for t in reversed(range(len(values))):
        advantages[t] = deltas[t] + gamma * lam * next_advantage
        next_advantage = advantages[t]
    return advantages


def whitened(advantages: Sequence[Floats]) -> list[Floats]:
    """(A - mean) / std over all tokens of a batch; A - mean if all are equal. `advantages` has an array per response,
    [tokens] each, as has the result."""
    all_tokens = np.concatenate(advantages)
    mean = all_tokens.mean()
    deviation = float(all_tokens.std())
    scale = deviation + 1e-8 if deviation > 0.0 else 1.0
    return [(of_response - mean) / scale for of_response in advantages]
