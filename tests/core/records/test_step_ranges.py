"""Ranges of steps: what they hold, and what is wrong with bad ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.errors import ConfigError
from cotune.records.step_ranges import check_ranges, step_ranges, within


def test_ranges_count_from_one_and_hold_both_ends() -> None:
    assert step_ranges(" 1:20, 40: ") == ((1, 20), (40, None)) == step_ranges("40:,1:20")
    assert [step + 1 for step in range(50) if within("1:3,6:6,9:", step)] == [1, 2, 3, 6, *range(9, 51)]
    assert all(within("", step) for step in range(5)), "without ranges every step"


@given(st.sets(st.integers(1, 60)), st.booleans())
def test_the_ranges_of_any_steps_hold_these_alone(steps: set[int], endless: bool) -> None:
    """Whatever steps are written down as ranges, in any order: these are read, and no other."""
    ordered = sorted(steps | ({80} if endless else set()))
    begins = [step for step in ordered if step - 1 not in ordered]
    ends = [step for step in ordered if step + 1 not in ordered]
    parts = [f"{first}:{last}" for first, last in zip(begins, ends, strict=True)]
    if endless:
        parts[-1] = f"{begins[-1]}:"
    text = ",".join(reversed(parts))
    if text:
        wanted = {*steps, *(range(80, 101) if endless else ())}
        assert {step for step in range(1, 101) if within(text, step - 1)} == wanted


@given(st.text("0123456789:, -x", max_size=8))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        found = step_ranges(text)
    except ConfigError as error:
        assert error.field == "policy.train" and error.value == text
    else:
        assert all(first >= 1 and (last is None or last >= first) for first, last in found)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "has '', which is not a range of steps"),
        ("1:20;40:", "is not a range of steps"),
        ("7", "is not a range of steps"),
        ("1:20,", "has '', which is not a range of steps"),
        ("0:4", "steps count from 1"),
        ("20:1", "has '20:1', which is empty"),
        ("1:20,20:30", "overlap in step 20"),
        ("5:,9:10", "overlap in step 9"),
        ("5:10,5:8", "overlap in step 5. Leave one of the two out"),
    ],
)
def test_bad_ranges_are_named(text: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        step_ranges(text)


def test_ranges_of_all_policies_cover_the_run_and_stay_in_it() -> None:
    check_ranges({"a": "1:2,4:", "b": "3:3"}, 9)
    check_ranges({"a": "2:3", "b": ""}, 9)
    with pytest.raises(ConfigError, match="leaves step 3 without a policy that is trained"):
        check_ranges({"a": "1:2", "b": "4:"}, 9)
    with pytest.raises(ConfigError, match="leaves step 9 without"):
        check_ranges({"a": "1:8"}, 9)
    for beyond in ("10:", "5:10"):
        with pytest.raises(ConfigError, match="names step 10, beyond the last step"):
            check_ranges({"a": "", "b": beyond}, 9)
