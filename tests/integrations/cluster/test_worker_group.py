"""A group of actors: one call for all, errors as themselves, and an end for all when one is lost."""

import os
import signal
import threading
import time

import pytest

from cotune.errors import ConfigError, GroupError
from cotune.integrations.cluster.worker_group import WorkerGroup, WorkersClosed, WorkersLost
from tests.integrations.cluster.group_worker import BROKEN, RANK, alive

pytestmark = pytest.mark.usefixtures("ray_runtime")


TIMEOUT = 120.0


def start(size=2, factory=RANK):
    return WorkerGroup.start(
        factory,
        size,
        name="the workers here",
        setting="cluster.size",
        cpus=1,
        gpus=0,
        timeout=TIMEOUT,
    )


@pytest.fixture
def group():
    started = start()
    yield started
    started.close()


def gone(group):
    return not any(alive(pid) for pid in group.processes)


def test_a_call_reaches_all_and_rank_0_answers(group):
    assert group.call("who", b"rows", timeout=TIMEOUT) == (0, 2, b"rows")
    assert len(set(group.processes)) == 2
    with pytest.raises(GroupError, match=r"Rank 0 refuses\. Do not ask it\.") as caught:
        group.call("refuse", (0, 1), timeout=TIMEOUT)  # by all: they are still in step
    assert caught.value.remedy == "Do not ask it."
    assert group.call("who", timeout=TIMEOUT)[0] == 0
    with pytest.raises(GroupError, match="Rank 1 refuses"):
        group.call("refuse", (1,), timeout=TIMEOUT)  # by one: they are not
    assert gone(group)
    with pytest.raises(
        WorkersLost, match=r"Rank 1 of the workers here \(process \d+ on .*\) failed \(Rank 1 refuses\)"
    ):
        group.call("who", timeout=TIMEOUT)


def test_the_rank_that_broke_first_is_named_not_the_one_whose_connection_closed(group):
    with pytest.raises(WorkersLost, match=r"Rank 1 .* failed \(ZeroDivisionError: nothing is left\) in 'fail'"):
        group.call("fail", 1, timeout=TIMEOUT)
    assert gone(group)


def test_a_rank_that_hangs_is_named_with_its_line(group):
    with pytest.raises(WorkersLost, match=r"not end 'sleep' within 3 s: Rank 1 .* in sleep \(group_worker\.py:\d+\)"):
        group.call("sleep", 1, 600.0, timeout=3.0)
    assert gone(group)


def test_a_rank_that_dies_is_named_at_once(group):
    killing = threading.Timer(1.0, os.kill, (group.processes[1], signal.SIGKILL))
    killing.start()
    started = time.monotonic()
    with pytest.raises(WorkersLost, match=r"Rank 1 .* died \(.*in 'sleep'"):
        group.call("sleep", 1, 600.0, timeout=TIMEOUT)
    assert time.monotonic() - started < 60
    assert gone(group)


def test_closing_ends_a_call_that_runs(group):
    closing = threading.Timer(1.0, group.close)
    closing.start()
    with pytest.raises(WorkersClosed, match="were closed"):
        group.call("sleep", 1, 600.0, timeout=TIMEOUT)
    closing.join()
    assert gone(group)


def test_a_rank_that_does_not_start_is_named():
    with pytest.raises(WorkersLost, match=r"Rank 1 of the workers here died .*in 'start'"):
        start(factory=BROKEN)


def test_more_workers_than_the_cluster_has_room_for_are_refused_by_setting():
    with pytest.raises(ConfigError, match=r"cluster\.size = 1000 .* the cluster has no room for"):
        start(size=1000)
