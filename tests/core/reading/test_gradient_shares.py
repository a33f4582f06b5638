"""Roles that hold most of the gradient of a policy that they share."""

from __future__ import annotations

from cotune.reading.gradient_shares import WINDOW, dominant_roles, shares_of


def test_a_role_is_named_by_its_mean_share() -> None:
    assert dominant_roles([{"a": 0.85, "b": 0.15}] * WINDOW) == {"a": 0.85}
    assert dominant_roles([{"a": 0.8, "b": 0.2}] * WINDOW) == {}
    wavering = [{"a": share, "b": 1.0 - share} for share in (1.0, 0.2, 1.0, 0.3, 1.0)]
    assert dominant_roles(wavering) == {}


def test_few_steps_name_no_role() -> None:
    assert dominant_roles([{"a": 1.0, "b": 0.0}] * (WINDOW - 1)) == {}
    # Steps in which the policy was not trained do not count.
    assert dominant_roles([{"a": 1.0, "b": 0.0}, {}] * (WINDOW - 1)) == {}


def test_roles_that_share_no_policy_have_no_share() -> None:
    assert shares_of({"a": {"reward": 1.0, "gradient_share": 0.9}, "b": {"reward": 0.5}}) == {"a": 0.9}
