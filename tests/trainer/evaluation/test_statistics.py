from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.intervals import Interval, share
from cotune.trainer.evaluation.statistics import mean, paired_difference, paired_shares, pass_at


def bounds(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None and interval.low is not None and interval.high is not None
    return interval.low, interval.high


def test_share_is_the_wilson_interval() -> None:
    # z = 1.959964, p = 0.8, n = 10: centre (0.8 + z^2/20) / (1 + z^2/10), half-width as in Wilson (1927)
    found = share(8, 10)
    assert found is not None and (found.mean, found.n) == (0.8, 10)
    assert bounds(found) == pytest.approx((0.490162, 0.943318), abs=1e-6)


def test_share_of_none_and_all_keeps_a_width() -> None:
    assert bounds(share(0, 10)) == pytest.approx((0.0, 0.277533), abs=1e-6)
    assert bounds(share(10, 10)) == pytest.approx((0.722467, 1.0), abs=1e-6)


def test_mean_is_the_t_interval() -> None:
    # sd = sqrt(2.5), t(0.975, 4) = 2.776445: 3 +- 2.776445 * sqrt(2.5 / 5)
    assert bounds(mean([1, 2, 3, 4, 5])) == pytest.approx((1.036757, 4.963243), abs=1e-6)


def test_nothing_is_made_up_where_there_is_too_little() -> None:
    assert share(0, 0) is None
    assert mean([]) is None
    assert mean([2.5]) == Interval(mean=2.5, low=None, high=None, n=1)
    assert paired_difference({"a": 1.0}, {"b": 1.0}) is None
    assert paired_shares({"a": True}, {"b": True}) is None


def test_pairs_are_the_shared_tasks() -> None:
    after = {"a": 1.0, "b": 2.0, "c": 4.0, "only after": 100.0}
    before = {"a": 0.0, "b": 2.0, "c": 2.0, "only before": -100.0}
    # differences 1, 0, 2: sd = 1, t(0.975, 2) = 4.302653: 1 +- 4.302653 / sqrt(3)
    found = paired_difference(after, before)
    assert found is not None and (found.mean, found.n) == (1.0, 3)
    assert bounds(found) == pytest.approx((-1.484138, 3.484138), abs=1e-6)


def pairs(both: int, gained: int, lost: int, neither: int) -> tuple[dict[str, bool], dict[str, bool]]:
    kinds = [(True, True)] * both + [(True, False)] * gained + [(False, True)] * lost + [(False, False)] * neither
    return {str(i): a for i, (a, _) in enumerate(kinds)}, {str(i): b for i, (_, b) in enumerate(kinds)}


@pytest.mark.parametrize(
    ("cells", "expected"),
    [
        ((36, 12, 2, 0), (0.2, 0.0569, 0.3404)),
        ((20, 12, 2, 16), (0.2, 0.0562, 0.3292)),
        ((53, 0, 1, 0), (-0.0185, -0.0977, 0.0496)),
        ((54, 0, 0, 0), (0.0, -0.0664, 0.0664)),
        ((0, 50, 0, 0), (1.0, 0.8991, 1.0)),
    ],
)
def test_paired_shares_is_newcombes_method_10(cells: tuple[int, ...], expected: tuple[float, ...]) -> None:
    found = paired_shares(*pairs(*cells))
    assert found is not None
    assert (found.mean, *bounds(found)) == pytest.approx(expected, abs=1e-4)


@given(st.lists(st.integers(0, 300), min_size=4, max_size=4).filter(sum))
def test_paired_shares_holds_its_estimate_and_mirrors(cells: list[int]) -> None:
    after, before = pairs(*cells)
    found, mirrored = paired_shares(after, before), paired_shares(before, after)
    assert found is not None and mirrored is not None
    low, high = bounds(found)
    assert -1.0 - 1e-9 <= low <= found.mean + 1e-9 and found.mean - 1e-9 <= high <= 1.0 + 1e-9
    assert (-mirrored.mean, *(-b for b in reversed(bounds(mirrored)))) == pytest.approx((found.mean, low, high))


def test_pass_at_k_is_the_unbiased_estimate_over_tasks() -> None:
    """Of four episodes 1, 0 and 4 succeed: 1 - C(3,2)/C(4,2) = 1/2, 0 and 1 for k = 2."""
    tried = [(4, 1), (4, 0), (4, 4)]
    assert [found.mean for k in (1, 2, 4) if (found := pass_at(k, tried))] == pytest.approx([5 / 12, 1 / 2, 2 / 3])
    # sd = 1/2, t(0.975, 2) = 4.302653: wider than the chances there are
    assert bounds(pass_at(2, tried)) == (0.0, 1.0)
    assert bounds(pass_at(1, [(2, 1)] * 3)) == (0.5, 0.5)
    assert pass_at(1, []) is None
