"""Workflows of single calls whose values are known exactly, for the search of `cotune blame` for decisive calls.

A run is right until a call breaks it. Later calls may mend it again, and it succeeds if it ends right. So the value of
each place, V(t), follows from the calls behind it, and the loss of call t in an episode is V(t) - V(t + 1).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

from cotune.trainer.blame.decisive import CONFIDENCE, LEAST_LOSS, ForkSearch


@dataclass
class CallChain:
    """Calls one after the other: each breaks what is right, and mends what is broken, with its own probability."""

    breaks: Sequence[float]
    mends: Sequence[float]

    def values(self) -> tuple[list[float], list[float]]:
        """The probability of success from before each call on, [calls + 1], if the run is right and if it is broken."""
        right, broken = [1.0], [0.0]
        for breaks, mends in zip(reversed(self.breaks), reversed(self.mends), strict=True):
            right.append((1 - breaks) * right[-1] + breaks * broken[-1])
            # `right` is one longer here: its value behind this call is the second last.
            broken.append(mends * right[-2] + (1 - mends) * broken[-1])
        return right[::-1], broken[::-1]

    def play(self, rng: random.Random) -> list[bool]:
        """Whether the run is broken before each call, and at the end."""
        states = [False]
        for breaks, mends in zip(self.breaks, self.mends, strict=True):
            if states[-1]:
                states.append(rng.random() >= mends)
            else:
                states.append(rng.random() < breaks)
        return states


@dataclass
class FailedEpisode:
    """An episode that failed: the exact value before each call, and 0 at the end."""

    values: list[float]

    @property
    def losses(self) -> list[float]:
        return [before - after for before, after in itertools.pairwise(self.values)]

    @property
    def largest(self) -> float:
        return max(self.losses)

    def is_right(self, call: int | None) -> bool:
        """Whether a call loses at least half as much as the largest loss, and no less than decides an episode."""
        return call is not None and self.losses[call] >= max(self.largest / 2, LEAST_LOSS)

    def fork(self, call: int, rng: random.Random) -> float:
        """The outcome of a run that repeats the episode up to a call."""
        return float(rng.random() < self.values[call])


def failed_episode(rng: random.Random, calls: int, rate: float) -> FailedEpisode:
    """A failed episode of a chain in which one call breaks the run at this rate, the others in 2 to 15% of the cases.
    In two of three chains a third of the calls are checks, which mend in 30 to 90% of the cases."""
    while True:
        breaks = [rng.uniform(0.02, 0.15) for _ in range(calls)]
        mends = [0.0] * calls
        if rng.random() < 2 / 3:
            for place in rng.sample(range(1, calls), calls // 3):
                mends[place] = rng.uniform(0.3, 0.9)
        breaks[rng.randrange(calls)] = rate
        chain = CallChain(breaks, mends)
        states = chain.play(rng)
        if states[-1]:
            right, broken = chain.values()
            values = [broken[place] if state else right[place] for place, state in enumerate(states)]
            return FailedEpisode(values)


@dataclass
class Search:
    """The end of a search: the call that the command names, whether it is claimed, and the runs that chose it.

    A call that is not claimed is named with "perhaps". `call` is None where no single call is the most likely answer.
    """

    call: int | None
    claimed: bool
    runs: float


def search_adaptively(episode: FailedEpisode, rng: random.Random, runs: int) -> Search:
    """The search of the command, with a budget of so many whole runs."""
    calls = len(episode.values) - 1
    search = ForkSearch(calls, runs * calls, range(calls), str(rng.getrandbits(32)))
    while forks := search.next_forks():
        for call in forks:
            search.add(call, episode.fork(call, rng))
    decision = search.decision
    claimed = decision.probability >= CONFIDENCE and decision.call is not None
    return Search(decision.call, claimed, search.spent / calls)


def search_equally(episode: FailedEpisode, rng: random.Random, runs: float) -> int:
    """Equally many forks at every call, for about so many whole runs; the largest difference of means is the call."""
    calls = len(episode.values) - 1
    # A fork at call t makes the calls from t on: (calls + 1) / 2 on average.
    each = max(1, round(runs * calls / (calls * (calls + 1) / 2)))
    means = [sum(episode.fork(call, rng) for _ in range(each)) / each for call in range(calls)] + [0.0]
    losses = [before - after for before, after in itertools.pairwise(means)]
    return losses.index(max(losses))
