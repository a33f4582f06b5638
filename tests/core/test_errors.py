"""Errors keep what they say on their way to another process."""

from __future__ import annotations

import pickle

import pytest

from cotune.errors import ConfigError, CotuneError, SampleTimeout


@pytest.mark.parametrize(
    "error",
    [SampleTimeout("It took 3 s.", "Wait."), ConfigError("host", "moon", "must be process or thread", "Choose one.")],
)
def test_errors_cross_processes_whole(error: CotuneError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
