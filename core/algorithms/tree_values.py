"""Values of the answers of a search tree, from the outcomes of its episodes (MALT, arXiv 2412.01928, section 4.2,
whose formulas have no numbers).

V of an answer that ends an episode is the episode's outcome; V of any other is the mean of V over the answers that were
sampled after it: a verifier's critique has the mean value of its refinements, a generator's answer the mean value of
its critiques.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean


def tree_values(paths: Iterable[tuple[Sequence[Hashable], float]]) -> dict[Hashable, float]:
    """The value V of each answer: the mean of V over the answers that were sampled after it. The last answer of an
    episode has the outcome of the episode.

    `paths` has the answers of each episode in their order, at least one, with its outcome. Episodes share answers until
    they diverge. If several episodes end with the same answer, the outcome of each has the same weight in V.
    """
    next_answers: dict[Hashable, dict[Hashable, None]] = {}
    final_outcomes: dict[Hashable, list[float]] = {}
    for path, outcome in paths:
        for answer in path:
            next_answers.setdefault(answer, {})
        for answer, next_answer in pairwise(path):
            next_answers[answer][next_answer] = None
        final_outcomes.setdefault(path[-1], []).append(outcome)
    values: dict[Hashable, float] = {}
    # Later answers come first, as earlier ones need their values.
    for answer in TopologicalSorter(next_answers).static_order():
        values_after = [values[next_answer] for next_answer in next_answers[answer]]
        values[answer] = fmean([*values_after, *final_outcomes.get(answer, ())])
    return values
