"""Which episode is to blame for a lost worker: no innocent one, whoever runs beside it."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from cotune.episodes.episode import EpisodeOptions
from cotune.records.structs import Task
from cotune.trainer.rollout import queue as queue_module
from cotune.trainer.rollout.queue import Job, JobQueue
from cotune.trainer.rollout.wire import EpisodeRequest


def job(name: str) -> Job:
    task = Task(id=name, input=None)
    return Job(EpisodeRequest(id=name, task=task, options=EpisodeOptions(phase="train"), responder=None))


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_only_those_that_crash_fail(retries: int, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_module, "RETRIES", retries)

    async def play() -> None:
        chance = random.Random(seed)
        jobs = [job(f"j{i}") for i in range(chance.randrange(1, 40))]
        bad = set(chance.sample(jobs, min(len(jobs), chance.randrange(4))))
        queue, runs, failed, finished = JobQueue(), Counter(), [], []
        for one in jobs:
            queue.add(one)
        while running := list(iter(lambda: queue.next(idle=False), None)) or list(
            filter(None, [queue.next(idle=True)])
        ):
            runs.update(running)
            if bad.isdisjoint(running):
                finished += running
            else:
                failed += queue.after_loss(running, None)[1]
        assert set(failed) == bad
        assert set(finished) == set(jobs) - bad
        assert len(failed) + len(finished) == len(jobs)
        assert all(runs[one] == max(retries + 1, 1 if len(jobs) == 1 else 3) for one in bad)
        assert all(runs[one] <= 3 for one in finished)

    asyncio.run(play())


def test_after_a_single_loss_episodes_run_beside_others() -> None:
    """As when a machine was lost: nothing waits for an idle worker."""

    async def play() -> None:
        queue, jobs = JobQueue(), [job(name) for name in "abc"]
        queue.add(job("later"))
        assert queue.after_loss(jobs, None) == (jobs, [])
        assert not any(one.alone for one in jobs)
        assert [queue.next(idle=False) for _ in range(3)] == jobs
        assert queue.next(idle=False).name == "later/0"

    asyncio.run(play())


def test_a_known_culprit_fails_at_once_and_the_others_go_first() -> None:
    async def play() -> None:
        queue, jobs = JobQueue(), [job(name) for name in "abc"]
        queue.add(job("later"))
        for _ in range(3):
            assert queue.after_loss(jobs, "b") == ([jobs[0], jobs[2]], [jobs[1]])
            assert not any(one.alone for one in jobs)
            assert [queue.next(idle=False) for _ in range(2)] == [jobs[0], jobs[2]]
        assert queue.next(idle=False).name == "later/0"
        assert queue.next(idle=False) is None

    asyncio.run(play())


def test_cancelled_jobs_are_passed_over() -> None:
    async def play() -> None:
        queue, jobs = JobQueue(), [job(name) for name in "abcd"]
        for _ in range(2):
            queue.after_loss(jobs, None)
            jobs[1].ended.cancel()
            taken = list(iter(lambda: queue.next(idle=False), None))
        assert taken == []
        assert [queue.next(idle=True) for _ in range(4)] == [jobs[0], jobs[2], jobs[3], None]
        queue.add(jobs[1])
        assert queue.next(idle=False) is None

    asyncio.run(play())
