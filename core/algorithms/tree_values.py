"""Values of the answers of a search tree, from the outcomes of its episodes (MALT, arXiv 2412.01928, section 4.2,
whose formulas have no numbers).

V of an answer that ends an episode is the episode's outcome; V of any other is the mean of V over the answers that were
drawn after it: a verifier's critique is worth the mean of its refinements, a generator's answer that of its critiques.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from graphlib import TopologicalSorter
from itertools import pairwise
from statistics import fmean


def tree_values(paths: Iterable[tuple[Sequence[Hashable], float]]) -> dict[Hashable, float]:
    """V of each answer; `paths` are the answers of each episode in their order, at least one, with its outcome.

    Episodes share the answers up to where they part. Several that end with one answer count alike there.
    """
    after: dict[Hashable, dict[Hashable, None]] = {}
    ends: dict[Hashable, list[float]] = {}
    for path, outcome in paths:
        for answer in path:
            after.setdefault(answer, {})
        for answer, following in pairwise(path):
            after[answer][following] = None
        ends.setdefault(path[-1], []).append(outcome)
    found: dict[Hashable, float] = {}
    for answer in TopologicalSorter(after).static_order():  # those that come later first
        found[answer] = fmean([*(found[following] for following in after[answer]), *ends.get(answer, ())])
    return found
