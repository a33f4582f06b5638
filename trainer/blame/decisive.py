"""Which call lost a failed episode: where to fork next, and how to read the forks.

V(t) is the expected outcome, from 0 (failure) to 1, when the episode runs again from call t on, with everything before
as recorded. Call t loses V(t) - V(t + 1); after the last call stands the recorded failure. V is estimated by forks at
call t. Most calls change nothing, so V is taken as constant but for a few jumps: forks at one call also say something
about its neighbours.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.special import betaln

from cotune.intervals import Interval, wilson

Floats = np.ndarray[Any, np.dtype[np.float64]]

LEVEL_PRIOR = 0.6
"""Both parameters of the beta prior of a level of V."""
JUMP = 0.2
"""Prior probability that V changes at a call."""
LEAST_LOSS = 0.1
"""A call that loses less decides nothing, and is not named with a larger loss."""
CONFIDENCE = 0.97
"""Probability with which a search ends. Of the calls that it then claims, 98% were right in simulations of episodes of
4 to 12 calls that lose 20 points or more at one of them."""
LEAST_FRESH = 3
"""Fresh forks before the chosen call, and as many after it, for which the search reserves budget.

It is low because only a claim needs fresh forks, and most claims come early, with enough budget left for `FRESH`."""
LEAST_FORKS = 6
"""Number of forks of an episode from which on a call can be claimed."""
BATCH = 2
"""Forks that are made at the same time."""
MOST_TRIES = 2
"""Forks at one call without any outcome after which the call is not forked again."""
MOST_ERRORS = 3
"""Forks in a row that end by the error of a model or of the judge, after which the search ends."""
FRESH = 12
"""Forks before the chosen call, and as many after it, that give the printed loss. The forks that chose the call
overstate its loss by 7 to 28 points in simulations."""
CURVES = 400
"""Curves of V that are drawn from the posterior."""


@dataclass
class ForkCounts:
    """The forks of one episode, by call."""

    forks: list[int]
    successes: list[float]
    """Sums of the outcomes, each from 0 to 1."""
    recorded: float = 0.0
    """The outcome of the episode itself."""

    @classmethod
    def of(cls, calls: int, recorded: float = 0.0) -> ForkCounts:
        return cls([0] * calls, [0.0] * calls, recorded)

    def add(self, call: int, outcome: float) -> None:
        self.forks[call] += 1
        self.successes[call] += outcome


def draw_curves(counts: ForkCounts, rng: np.random.Generator, curves: int = CURVES) -> Floats:
    """Curves of V from their posterior, [curves, calls + 1]. The last value is the recorded outcome.

    V is constant on segments of calls, with a level on each. Segments are filtered forward: the evidence of the calls
    up to `end` is the sum over the start of the last segment of the evidence before it, the probability of these jumps,
    and the beta-binomial likelihood of the segment. Then the segments are drawn backward, and a level for each.
    """
    calls = len(counts.forks)
    # Totals over all earlier calls, [calls + 1]: the totals of a segment are a difference of two.
    forks = np.concatenate([[0.0], np.cumsum(counts.forks)])
    successes = np.concatenate([[0.0], np.cumsum(counts.successes)])

    def level_posterior(start: Any, end: int) -> tuple[Any, Any]:
        """The two parameters of the beta posterior of the level of the calls start..end."""
        won = successes[end + 1] - successes[start]
        lost = forks[end + 1] - forks[start] - won
        return LEVEL_PRIOR + won, LEVEL_PRIOR + lost

    # 1. log_joint[start, end]: log evidence of the calls 0..end if start..end is the last segment. log_evidence[n]: log
    # evidence of the first n calls, whatever their segments.
    log_joint = np.full((calls, calls), -np.inf)
    log_evidence = np.zeros(calls + 1)
    for end in range(calls):
        starts = np.arange(end + 1)
        log_likelihoods = betaln(*level_posterior(starts, end)) - betaln(LEVEL_PRIOR, LEVEL_PRIOR)
        log_jumps = np.where(starts > 0, math.log(JUMP), 0.0)
        log_stays = (end - starts) * math.log(1 - JUMP)
        log_joint[: end + 1, end] = log_evidence[starts] + log_likelihoods + log_jumps + log_stays
        log_evidence[end + 1] = np.logaddexp.reduce(log_joint[: end + 1, end])

    # 2. Draw the segments of each curve from the last call backward, and their levels. `ends` is the end of the next
    # segment to draw, [curves]. All curves with the same end are drawn together.
    values = np.full((curves, calls + 1), counts.recorded)
    ends = np.full(curves, calls - 1)
    for end in reversed(range(calls)):
        curves_with_end = np.flatnonzero(ends == end)
        probabilities = np.exp(log_joint[: end + 1, end] - log_evidence[end + 1])
        starts = rng.choice(end + 1, size=len(curves_with_end), p=probabilities / probabilities.sum())
        ends[curves_with_end] = starts - 1
        for start in np.unique(starts):
            curves_in_segment = curves_with_end[starts == start]
            levels = rng.beta(*level_posterior(start, end), size=len(curves_in_segment))
            values[curves_in_segment, start : end + 1] = levels[:, None]
    return values


@dataclass
class Decision:
    """The state of a search: the call that most likely decides, and the call at which to fork next."""

    call: int | None
    """The call that most likely decides; None if it is more likely that no single call does."""
    probability: float
    """The posterior probability that this is right."""
    next_fork: int | None
    """None if no call can be forked."""


def consider(counts: ForkCounts, rng: np.random.Generator, forkable: Sequence[int]) -> Decision:
    """Find the call that most likely decides, and the best place of the next fork, from curves of the posterior.

    A call is decisive if it loses `LEAST_LOSS` or more and at least half of the largest loss. So naming either of two
    calls that lose about the same is right. The next fork is made at the `forkable` call where its outcome tells most
    about the call with the largest loss, in relation to its cost: the number of calls from there to the end.
    """
    calls = len(counts.forks)
    curves = draw_curves(counts, rng)
    losses = curves[:, :-1] - curves[:, 1:]  # [curves, calls]
    largest_loss = losses.max(axis=1)  # [curves]
    decides = largest_loss >= LEAST_LOSS
    is_decisive = losses >= np.maximum(largest_loss / 2, LEAST_LOSS)[:, None]  # [curves, calls]
    probability_by_call = is_decisive.mean(axis=0)  # [calls]
    leader = int(probability_by_call.argmax())
    probability = float(probability_by_call[leader])
    probability_of_none = 1 - float(decides.mean())

    # The decisive call of each curve, [curves]. The number of calls stands for "no single call decides".
    decisive_calls = np.where(decides, losses.argmax(axis=1), calls)
    # A fork at call t runs the calls t to calls - 1 again: the information is divided by this cost.
    information_per_call = _information(curves[:, :-1], decisive_calls) / (calls - np.arange(calls))
    next_fork = max(forkable, key=lambda call: float(information_per_call[call]), default=None)
    if probability_of_none > probability:
        return Decision(call=None, probability=probability_of_none, next_fork=next_fork)
    return Decision(call=leader, probability=probability, next_fork=next_fork)


def _information(values: Floats, answers: np.ndarray[Any, np.dtype[np.int64]]) -> Floats:
    """How much the outcome of one fork at each call tells about the answer: their mutual information in nats, [calls].

    `values` are curves of V, [curves, calls], which give the probability of a success. `answers` are the answers that
    the curves give. I(outcome; answer) = H(outcome) - sum over answers a of P(a) H(outcome | a).
    """
    information = _entropy(values.mean(axis=0))
    for answer in np.unique(answers):
        with_answer = answers == answer
        information -= with_answer.mean() * _entropy(values[with_answer].mean(axis=0))
    return information


def _entropy(probability: Floats) -> Floats:
    """The entropy of a success with this probability, in nats."""
    success = np.clip(probability, 1e-9, 1 - 1e-9)
    entropy: Floats = -(success * np.log(success) + (1 - success) * np.log(1 - success))
    return entropy


@dataclass
class ForkSearch:
    """Chooses where to fork one episode: first in the middle, then at the call where a fork tells most.

    The search ends when a call is decisive, when no single call is, or when the rest of the budget is needed for the
    fresh forks that measure the loss. It never spends more than the budget. `forkable` are the calls that can be
    repeated; `budget` is in calls of the application. The same `seed` and the same outcomes give the same decision,
    whatever the order of the forks, so a second command comes to the same result as the first.
    """

    calls: int
    budget: float
    forkable: Sequence[int]
    seed: str
    recorded: float = 0.0
    """The outcome of the episode itself."""
    counts: ForkCounts = field(init=False)

    def __post_init__(self) -> None:
        self.counts = ForkCounts.of(self.calls, self.recorded)
        self.spent = 0.0
        self.diverged: Counter[int] = Counter()
        """By call, the forks that did not repeat the episode up to it."""
        self.without_outcome: Counter[int] = Counter()
        """By call, all forks without an outcome."""
        self.errors_in_a_row = 0
        """Number of forks, since the last outcome, that repeated the episode and then had no outcome."""
        self.decision = Decision(call=None, probability=0.0, next_fork=None)

    def add(self, call: int, outcome: float | None, *, diverged: bool = False) -> None:
        """Count a fork. Without an outcome it only costs: it `diverged`, or a model or the judge failed."""
        self.add_cost(call)
        if outcome is not None:
            self.counts.add(call, outcome)
            self.errors_in_a_row = 0
            return
        self.without_outcome[call] += 1
        if diverged:
            self.diverged[call] += 1
        else:
            self.errors_in_a_row += 1

    def add_cost(self, call: int) -> None:
        """Count the cost of a fork, and nothing else."""
        self.spent += self.calls - call

    def next_forks(self) -> list[int]:
        """The calls at which to fork next, each as often as it is forked; empty when the search is over."""
        forks_so_far = sum(self.counts.forks)
        call = self._choose_call()
        if call is None or self.errors_in_a_row >= MOST_ERRORS:
            return []
        if forks_so_far >= LEAST_FORKS and self.decision.probability >= CONFIDENCE:
            return []

        # The first fork is made alone. It decides little, and shows whether forks work at all.
        batch, reserve = 1, 0.0
        if forks_so_far:
            batch = BATCH
            chosen = call if self.decision.call is None else self.decision.call
            # The cost of fresh forks before and after the chosen call. In a short episode that is nearly all of the
            # budget, so at most half of it is reserved.
            reserve = min(LEAST_FRESH * _cost_before_and_after(self.calls, chosen), self.budget / 2)
        if self.spent + reserve + batch * (self.calls - call) > self.budget:
            return []
        return [call] * batch

    def _choose_call(self) -> int | None:
        """Update the decision from the forks so far, and return the call at which to fork next; None without any."""
        # The application repeats the episode up to `furthest`, the last call with an outcome of a fork. Forks beyond
        # `wall`, the first call after it at which a fork diverged, would diverge too.
        furthest = max((call for call, forks in enumerate(self.counts.forks) if forks), default=-1)
        wall = min((call for call in self.diverged if call > furthest), default=self.calls)
        candidates = []
        for call in self.forkable:
            # A call whose forks have no outcome would be chosen again and again, as its V stays unknown.
            is_given_up = not self.counts.forks[call] and self.without_outcome[call] >= MOST_TRIES
            if call <= wall and not is_given_up:
                candidates.append(call)

        # Between `furthest` and `wall` it is not known yet whether the application repeats the episode. Bisection finds
        # the first call that it does not repeat.
        unproven = [call for call in candidates if call > furthest]
        before_wall = [call for call in unproven if call < wall] or unproven
        middle = before_wall[len(before_wall) // 2] if before_wall else None

        if not any(self.counts.forks):
            return middle
        rng = np.random.default_rng(random.Random(self._state()).getrandbits(32))
        self.decision = consider(self.counts, rng, candidates)
        call_of_interest = self.decision.next_fork
        if call_of_interest is not None and call_of_interest > furthest and wall < self.calls:
            return middle
        return call_of_interest

    def _state(self) -> str:
        """The seed and the counts as a text. Sums are rounded, as they depend on the order of their numbers."""
        return f"{self.seed} {self.counts.forks} {[round(total, 6) for total in self.counts.successes]}"


def fresh_forks(search: ForkSearch, call: int) -> int:
    """How many fresh forks before the chosen call, and as many after it, fit into the rest of a search's budget, up to
    `FRESH`. 0 if none fits."""
    affordable = int((search.budget - search.spent) / _cost_before_and_after(search.calls, call))
    return max(0, min(FRESH, affordable))


def _cost_before_and_after(calls: int, call: int) -> int:
    """The calls that one fork before a call and one fork after it make in an episode of so many calls."""
    return (calls - call) + (calls - (call + 1))


def loss_interval(before: Sequence[float], after: Sequence[float] | None, recorded: float = 0.0) -> Interval | None:
    """How much a call loses: the mean outcome of forks before it less that of forks after it; None without forks.

    `before` and `after` are outcomes of fresh forks. `after` is None for the last call of an episode: then the
    `recorded` outcome takes the place of its mean. The result has Newcombe's 95% interval. Outcomes between 0 and 1
    make the interval at most too wide.
    """
    if not before or (after is not None and not after):
        return None
    share = sum(before) / len(before)
    low, high = wilson(share, len(before))
    if after is None:
        return Interval(mean=share - recorded, low=low - recorded, high=high - recorded, n=len(before))
    share_after = sum(after) / len(after)
    low_after, high_after = wilson(share_after, len(after))
    mean = share - share_after
    return Interval(
        mean=mean,
        low=mean - math.hypot(share - low, high_after - share_after),
        high=mean + math.hypot(high - share, share_after - low_after),
        n=len(before) + len(after),
    )
