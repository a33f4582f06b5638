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
    """V of each answer. `paths` has the answers of each episode in their order, at least one, with its outcome.

    Episodes share answers until they diverge. Episodes that end with the same answer have the same weight in it.
    """
    after: dict[Hashable, dict[Hashable, None]] = {}
    ends: dict[Hashable, list[float]] = {}
    for path, outcome in paths:
        for answer in path:
            after.setdefault(answer, {})
        for answer, following in pairwise(path):
            after[answer][following] = None
        ends.setdefault(path[-1], []).append(outcome)
    values: dict[Hashable, float] = {}
    for answer in TopologicalSorter(after).static_order():  # later answers first, as earlier ones need their values
        of_following = [values[following] for following in after[answer]]
        values[answer] = fmean([*of_following, *ends.get(answer, ())])
    return values
