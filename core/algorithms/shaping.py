"""What the advantages of the other roles of an episode add to a role's own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cotune.algorithms.attribution import Floats
from cotune.algorithms.recipes import Shaping
from cotune.algorithms.samples import Sample


def shape(samples: Sequence[Sample], advantages: Floats, shaping: Shaping) -> Floats:
    """[n] advantages with the term of Advantage Alignment (arXiv 2406.14662; for language models 2511.19405):

        A*_t = A_t + opponent * (sum over k < t of opponent_gamma^(t - k) A_k) * B_t

    A_t is the role's own advantage at its turn t of the episode, B_t the sum of the other roles' at that turn. What the
    other has gained where one's own past was good is encouraged, and the reverse. A turn that is not there counts 0.
    """
    if not shaping.opponent:
        return advantages
    own: dict[tuple[str, str], dict[int, float]] = {}
    total: dict[tuple[str, int], float] = {}
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        own.setdefault((sample.rollout, sample.role), {})[sample.turn] = advantage
    for (rollout, _), turns in own.items():
        for turn, advantage in turns.items():
            total[rollout, turn] = total.get((rollout, turn), 0.0) + advantage
    shaped = advantages.copy()
    for i, sample in enumerate(samples):
        turns = own[sample.rollout, sample.role]
        past = sum(shaping.opponent_gamma ** (sample.turn - k) * a for k, a in turns.items() if k < sample.turn)
        shaped[i] += shaping.opponent * past * (total[sample.rollout, sample.turn] - turns[sample.turn])
    return np.asarray(shaped)
