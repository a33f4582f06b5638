"""The figures of `cotune blame` as they are shown."""

from __future__ import annotations

from typing import Any

import pytest

from cotune.intervals import Interval
from cotune.reading.blame import (
    Blame,
    ScoringNoise,
    loss_points,
    noise_points,
    shown_money,
    shown_outcome,
    shown_points,
    shown_seconds,
)


def result(span: float) -> Blame:
    fields: dict[str, Any] = {"outcome": None, "swapped": None, "luck": None, "roles": [], "all_roles": []}
    return Blame(
        workflow="w", references={}, removes=False, tasks=5, runs=5, calls=5, cost=None, span=span, verdict="untested",
        **fields,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("span", "shown"),
    [
        (1.0, "0.30 (0.00 to 0.60)"),
        (0.02, "0.3000 (0.0037 to 0.5960)"),
        (5.0, "0.30 (0.00 to 0.60)"),
        (100.0, "0 (0 to 1)"),
        (0.0, "0.30 (0.00 to 0.60)"),
    ],
)
def test_an_outcome_has_the_digits_that_its_span_needs(span: float, shown: str) -> None:
    assert shown_outcome(result(span), Interval(mean=0.3, low=0.00365, high=0.596, n=10)) == shown


def test_an_outcome_without_an_interval_is_a_number() -> None:
    assert shown_outcome(result(1.0), Interval(mean=0.3, n=3)) == shown_outcome(result(1.0), 0.3) == "0.30"
    assert shown_outcome(result(1.0), -0.0001) == "0.00"
    assert shown_outcome(result(2000.0), 1234.4) == "1,234"


def test_points_are_whole_and_never_minus_zero() -> None:
    interval = Interval(mean=-0.001, low=-0.254, high=0.246, n=10)
    assert loss_points(interval) == shown_points(result(1.0), interval) == "0 (-25 to 25)"
    assert shown_points(result(0.5), interval, signed=True) == "+0 (-51 to +49)"
    noise = ScoringNoise(runs=4, changed=2, deviation=0.1183, share=0.2)
    assert noise_points(noise, result(0.5)) == "± 24"


@pytest.mark.parametrize(
    ("money", "shown"),
    [(12.3456, "12.35"), (1234.5, "1,234.50"), (0.0, "0.00"), (0.0123, "0.012"), (1.26e-5, "0.000013")],
)
def test_small_amounts_of_money_have_two_digits(money: float, shown: str) -> None:
    assert shown_money(money) == shown


def test_differences_have_a_sign() -> None:
    assert (shown_money(-0.0004, signed=True), shown_money(0.5, signed=True)) == ("-0.00040", "+0.50")
    assert (shown_seconds(0.36), shown_seconds(-12.0)) == ("+0.4", "-12.0")
