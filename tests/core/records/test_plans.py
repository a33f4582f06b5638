"""Plans: how many candidates, what is compared, which one goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cotune.errors import ConfigError
from cotune.records.plans import Plan, seed_of


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


def test_seeds_are_those_of_every_process():
    assert seed_of(0, "train", 3, "t1", 0, "planner", 2) == 1161270541
    code = "from cotune.records.plans import seed_of; print(seed_of(0, 'train', 3, 't1', 0, 'planner', 2))"
    assert int(subprocess.check_output([sys.executable, "-c", code])) == 1161270541


def test_seeds_keep_their_parts_apart():
    assert seed_of("ab", "c") != seed_of("a", "bc")
    assert 0 <= seed_of(1) < 2**31
