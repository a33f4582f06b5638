"""The search for the call that lost an episode, on episodes whose V is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.trainer.blame.decisive import (
    ForkCounts,
    ForkSearch,
    consider,
    draw_curves,
    fresh_forks,
    loss_interval,
)


def searched(
    values: Sequence[float],
    seed: int,
    runs: int = 30,
    forkable: Sequence[int] | None = None,
    diverges_at: int | None = None,
) -> ForkSearch:
    """Search an episode with these V by call; forks succeed by chance. The application sends another request than
    recorded at the call `diverges_at`."""
    rng = np.random.default_rng(seed)
    calls = len(values)
    search = ForkSearch(calls, runs * calls, range(calls) if forkable is None else forkable, str(seed))
    while forks := search.next_forks():
        for call in forks:
            if diverges_at is not None and call >= diverges_at:
                search.add(call, None, diverged=True)
            else:
                search.add(call, float(rng.random() < values[call]))
    return search


def test_curves_follow_the_forks() -> None:
    counts = ForkCounts([40, 40, 40, 40], [36.0, 36.0, 4.0, 4.0])
    curves = draw_curves(counts, np.random.default_rng(0))
    assert curves.shape == (400, 5)
    assert curves[:, -1].max() == 0
    assert curves.mean(axis=0) == pytest.approx([0.9, 0.9, 0.1, 0.1, 0.0], abs=0.05)


def test_calls_without_forks_take_the_level_of_their_neighbours() -> None:
    counts = ForkCounts([30, 0, 30], [27.0, 0.0, 27.0])
    assert draw_curves(counts, np.random.default_rng(0)).mean(axis=0)[1] == pytest.approx(0.9, abs=0.1)


@pytest.mark.parametrize(
    ("values", "call"),
    [([0.9, 0.9, 0.1, 0.1, 0.1], 1), ([0.8, 0.1, 0.1, 0.1], 0), ([0.8, 0.8, 0.8, 0.8, 0.8], 4), ([0.7], 0)],
)
def test_the_decisive_call_is_found(values: list[float], call: int) -> None:
    found = [searched(values, seed).decision.call for seed in range(10)]
    assert found.count(call) >= 9


def test_no_single_call_decides_an_episode_that_fails_anyway() -> None:
    found = [searched([0.02] * 5, seed).decision.call for seed in range(10)]
    assert found.count(None) >= 8


def test_a_clear_case_takes_few_forks_and_the_budget_is_kept() -> None:
    clear = searched([0.95, 0.95, 0.02, 0.02, 0.02, 0.02], 1)
    assert clear.spent < 0.7 * clear.budget
    hard = searched([0.5, 0.45, 0.4, 0.35, 0.3, 0.25], 1)
    # What is left is for the fresh forks.
    assert hard.spent < hard.budget


def test_a_search_leaves_room_for_the_fresh_forks_or_has_fewer() -> None:
    search = ForkSearch(4, 120, range(4), "0")
    # A fork before call 1 makes 3 calls, one after it 2: together 5.
    search.spent = 30
    assert fresh_forks(search, 1) == 12
    search.spent = 80
    assert fresh_forks(search, 1) == 8
    search.spent = 108
    assert fresh_forks(search, 1) == 2
    # The budget is what the command announces, so no fork passes it.
    search.spent = 119
    assert fresh_forks(search, 1) == 0
    search.spent = 130
    assert fresh_forks(search, 1) == 0


@pytest.mark.parametrize(("calls", "runs"), [(60, 30), (80, 30), (12, 5), (4, 1), (3, 2)])
def test_long_episodes_and_small_budgets_are_kept_too(calls: int, runs: int) -> None:
    search = searched([0.9] * (calls // 2) + [0.1] * (calls - calls // 2), 1, runs)
    assert 0 < search.spent <= search.budget
    if runs == 30:
        # The last call before V falls, or one next to it.
        assert search.decision.call is not None
        assert abs(search.decision.call - (calls // 2 - 1)) <= 1


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 70), st.integers(1, 4), st.sets(st.integers(0, 69), min_size=1), st.integers(0, 9))
def test_no_search_spends_more_than_its_budget(calls: int, runs: int, places: set[int], seed: int) -> None:
    forkable = sorted({place % calls for place in places})
    rng = np.random.default_rng(seed)
    search = ForkSearch(calls, runs * calls, forkable, str(seed))
    while forks := search.next_forks():
        for call in forks:
            outcome = None if rng.random() < 0.3 else float(rng.random() < 0.5)
            search.add(call, outcome, diverged=outcome is None and rng.random() < 0.5)
    assert 0 < search.spent <= search.budget


def test_the_most_likely_answer_is_known_where_none_is_claimed() -> None:
    # A loss of about 25 points at call 1: too little to claim after these forks.
    decision = consider(ForkCounts([8, 8, 8, 8], [2.0, 2.0, 0.0, 0.0]), np.random.default_rng(0), range(4))
    assert decision.probability < 0.95 and decision.call == 1
    # After these it is more likely that no single call decides.
    decision = consider(ForkCounts([5, 5, 5, 5], [0.0, 0.0, 0.0, 0.0]), np.random.default_rng(0), range(4))
    assert 0.5 < decision.probability < 0.95 and decision.call is None


def test_calls_that_cannot_be_repeated_are_never_forked() -> None:
    search = ForkSearch(4, 120, (0, 1), "0")
    while forks := search.next_forks():
        assert set(forks) <= {0, 1}
        for call in forks:
            search.add(call, 1.0)
    assert search.counts.forks[2:] == [0, 0]


def test_a_loss_is_found_among_the_calls_that_can_be_repeated() -> None:
    # The record of call 3 was redacted, so later calls cannot be forked. Call 1 loses 90 points.
    values = [0.95, 0.95, *[0.05] * 10]
    found = [searched(values, seed, forkable=range(4)) for seed in range(10)]
    assert [search.decision.call for search in found].count(1) >= 9
    for search in found:
        assert search.counts.forks[1] > 0 and search.counts.forks[4:] == [0] * 8


@pytest.mark.parametrize("calls", [3, 12, 60])
def test_an_application_that_never_repeats_its_episode_takes_few_forks(calls: int) -> None:
    search = searched([0.5] * calls, 0, diverges_at=0)
    # The middle first, and then ever earlier ones, down to the first call.
    assert search.diverged[calls // 2] == 1 and search.diverged[0] == 2
    assert not any(call > calls // 2 for call in search.diverged)
    assert search.diverged.total() <= 7 and search.spent < search.budget / 4
    assert search.decision.call is None and search.decision.probability == 0


@pytest.mark.parametrize(("calls", "diverges_at"), [(12, 5), (12, 9)])
def test_a_loss_before_the_application_diverges_is_found(calls: int, diverges_at: int) -> None:
    values = [0.95, 0.95, 0.95, *[0.05] * (calls - 3)]
    found = [searched(values, seed, diverges_at=diverges_at) for seed in range(10)]
    assert [search.decision.call for search in found].count(2) >= 9
    for search in found:
        assert all(number <= 3 for number in search.diverged.values())
        wasted = sum(number * (calls - call) for call, number in search.diverged.items())
        assert wasted < search.budget / 4


def test_a_search_ends_when_models_fail() -> None:
    search = ForkSearch(6, 180, range(6), "0")
    tried = []
    while forks := search.next_forks():
        tried += forks
        for call in forks:
            search.add(call, None)
    assert len(tried) == 3
    # One that failed for a moment goes on.
    search = ForkSearch(6, 180, range(6), "0")
    search.add(3, None)
    search.add(3, 1.0)
    assert search.errors_in_a_row == 0 and search.next_forks()


def test_equal_forks_give_an_equal_decision() -> None:
    first = searched([0.7, 0.7, 0.3, 0.3, 0.2], 3)
    # A second command counts the same forks, by call.
    second = ForkSearch(5, first.budget, range(5), "3")
    for call, number in enumerate(first.counts.forks):
        for place in range(number):
            second.add(call, float(place < first.counts.successes[call]))
    assert second.next_forks() == []
    assert (second.decision.call, second.decision.probability) == (first.decision.call, first.decision.probability)


def test_a_call_that_loses_less_than_decides_is_not_named_beside_a_larger_loss() -> None:
    # Call 0 loses 9 points, and call 1 loses 14: 9 are more than half of that, and too few to decide.
    counts = ForkCounts([16_000] * 3, [0.23 * 16_000, 0.14 * 16_000, 0.0])
    decision = consider(counts, np.random.default_rng(0), range(3))
    assert decision.call == 1 and decision.probability > 0.97


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0, 1)), min_size=1, max_size=8))
def test_any_counts_give_a_decision(cells: list[tuple[int, float]]) -> None:
    counts = ForkCounts([forks for forks, _ in cells], [forks * share for forks, share in cells])
    decision = consider(counts, np.random.default_rng(0), range(len(cells)))
    assert decision.next_fork is not None and 0 <= decision.next_fork < len(cells)
    assert consider(counts, np.random.default_rng(0), []).next_fork is None
    assert 0 <= decision.probability <= 1
    assert decision.call is None or 0 <= decision.call < len(cells)


def test_the_loss_has_the_interval_of_newcombe() -> None:
    # Newcombe 1998, Statistics in Medicine 17, 873-890, method 10: 56/70 and 48/80 give 0.0524 to 0.3339.
    found = loss_interval([1.0] * 56 + [0.0] * 14, [1.0] * 48 + [0.0] * 32)
    assert found is not None
    assert (found.mean, found.low, found.high) == pytest.approx((0.2, 0.0524, 0.3339), abs=5e-5)


def test_the_last_call_loses_what_a_fork_there_would_win() -> None:
    found = loss_interval([1.0] * 9 + [0.0] * 3, None)
    assert found is not None and found.mean == 0.75
    assert loss_interval([], None) is None and loss_interval([1.0], []) is None
