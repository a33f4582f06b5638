"""Plans: how many candidates, what is compared, which one goes on."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cotune.errors import ConfigError
from cotune.records.plans import Plan, choose, seed_of


@pytest.mark.parametrize("kind", ["tree", "independent"])
@pytest.mark.parametrize("k", [1, 0, -3])
def test_a_group_of_one_has_no_baseline(kind, k):
    with pytest.raises(ConfigError) as caught:
        Plan(kind=kind, k=k)
    assert (caught.value.field, caught.value.value) == ("plan.k", k)
    assert "2 or more" in caught.value.fault
    assert "cotune trace" in caught.value.remedy


def test_episodes_per_task():
    assert Plan(kind="tree", k=8).episodes_per_task == 1
    assert Plan(kind="independent", k=8).episodes_per_task == 8


@pytest.mark.parametrize(
    ("rewards", "select", "chosen"),
    [
        ([0.1, 0.9, 0.3], "argmax", 1),
        ([0.5, 0.9, 0.9], "argmax", 1),
        ([-1.0, -0.5], "argmax", 1),
        ([0.1, 0.9], "first", 0),
        ([math.nan, -5.0], "argmax", 1),
        ([math.nan, math.nan], "argmax", 0),
        ([], "argmax", 0),
        ([], "sample", 0),
    ],
)
def test_choose(rewards, select, chosen):
    assert choose(rewards, select, seed=7) == chosen


def test_sample_takes_every_candidate_and_repeats():
    drawn = [choose([0.0] * 4, "sample", seed) for seed in range(64)]
    assert set(drawn) == {0, 1, 2, 3}
    assert drawn == [choose([0.0] * 4, "sample", seed) for seed in range(64)]


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.integers(0, 2**31 - 1))
def test_argmax_is_the_earliest_best(rewards, seed):
    index = choose(rewards, "argmax", seed)
    assert rewards[index] == max(rewards)
    assert max(rewards) not in rewards[:index]


def test_seeds_are_those_of_every_process():
    assert seed_of(0, "train", 3, "t1", 0, "planner", 2) == 1161270541
    code = "from cotune.records.plans import seed_of; print(seed_of(0, 'train', 3, 't1', 0, 'planner', 2))"
    assert int(subprocess.check_output([sys.executable, "-c", code])) == 1161270541


def test_seeds_keep_their_parts_apart():
    assert seed_of("ab", "c") != seed_of("a", "bc")
    assert 0 <= seed_of(1) < 2**31
