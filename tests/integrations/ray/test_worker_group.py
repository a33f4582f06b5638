"""A gang of actors: one call for all, errors as themselves, and an end for all when one is lost."""

import os
import signal
import threading
import time

import pytest

from cotune.errors import GroupError, LearnerError, LearnerLost
from cotune.integrations.ray.worker_group import RayGang
from tests.integrations.ray.group_member import BROKEN, RANK, alive

pytestmark = pytest.mark.usefixtures("ray_runtime")


TIMEOUT = 120.0


def start(size=2, factory=RANK):
    return RayGang.start(
        factory, size, name="here", cpus=1, gpus=0, placement="PACK", runtime_env=None, timeout=TIMEOUT
    )


@pytest.fixture
def gang():
    started = start()
    yield started
    started.close()


def gone(gang):
    return not any(alive(pid) for pid in gang.processes)


def test_a_call_reaches_all_and_rank_0_answers(gang):
    assert gang.call("who", b"rows", timeout=TIMEOUT) == (0, 2, b"rows")
    assert gang.call_first("who", timeout=TIMEOUT) == (0, 2, b"")
    assert len(set(gang.processes)) == 2
    with pytest.raises(GroupError, match=r"Rank 0 refuses\. Do not ask it\.") as caught:
        gang.call("refuse", (0, 1), timeout=TIMEOUT)  # by all: they are still in step
    assert caught.value.remedy == "Do not ask it."
    assert gang.call("who", timeout=TIMEOUT)[0] == 0
    with pytest.raises(GroupError, match="Rank 1 refuses"):
        gang.call("refuse", (1,), timeout=TIMEOUT)  # by one: they are not
    assert gone(gang)
    with pytest.raises(LearnerLost, match=r"Rank 1 of the learners here \(process \d+ on .*\) failed \(GroupError"):
        gang.call("who", timeout=TIMEOUT)


def test_the_rank_that_broke_first_is_named_not_the_one_whose_connection_closed(gang):
    with pytest.raises(LearnerLost, match=r"Rank 1 .* failed \(ZeroDivisionError: nothing is left\) in 'fail'"):
        gang.call("fail", 1, timeout=TIMEOUT)
    assert gone(gang)


def test_a_rank_that_hangs_is_named_with_its_line(gang):
    with pytest.raises(LearnerLost, match=r"not end 'sleep' within 1 s: Rank 1 .* is in sleep \(gang_member\.py:\d+\)"):
        gang.call("sleep", 1, 600.0, timeout=1.0)
    assert gone(gang)


def test_a_rank_that_dies_is_named_at_once(gang):
    killing = threading.Timer(1.0, os.kill, (gang.processes[1], signal.SIGKILL))
    killing.start()
    started = time.monotonic()
    with pytest.raises(LearnerLost, match=r"Rank 1 .* died \(\w+: .*in 'sleep'"):
        gang.call("sleep", 1, 600.0, timeout=TIMEOUT)
    assert time.monotonic() - started < 60
    assert gone(gang)


def test_closing_ends_a_call_that_runs(gang):
    closing = threading.Timer(1.0, gang.close)
    closing.start()
    with pytest.raises(LearnerError, match="were closed"):
        gang.call("sleep", 1, 600.0, timeout=TIMEOUT)
    closing.join()
    assert gone(gang)


def test_a_rank_that_does_not_start_is_named():
    with pytest.raises(LearnerLost, match=r"Rank 1 of the learners here died .*in 'start'"):
        start(factory=BROKEN)
