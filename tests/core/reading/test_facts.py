"""A run in a few words."""

from __future__ import annotations

import time

import pytest

from cotune.reading.facts import _local_time


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("2026-11-29T10:00:00+0000", "2026-11-29 11:00"),
        ("2026-11-29T10:00:00-0500", "2026-11-29 16:00"),
        ("2026-11-29T10:00:00", "2026-11-29 10:00"),
        ("", ""),
        ("yesterday", "yesterday"),
    ],
)
def test_a_time_of_another_zone_is_shown_in_this_one(written: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the times of records are, in the same list."""
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert _local_time(written) == shown
    finally:
        monkeypatch.undo()
        time.tzset()
