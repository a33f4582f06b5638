"""Which episode is to blame for a lost worker: no innocent one, whoever runs beside it."""

from __future__ import annotations

import asyncio
import math
import random

import pytest

from cotune.recording.records import Task
from cotune.trainer.rollout.queue import Job, JobQueue
from cotune.trainer.rollout.wire import EpisodeRequest


def job(name: str) -> Job:
    task = Task(id=name, input=None)
    fields = {"phase": "train", "training_step": None, "rollout": 0, "timeout": None, "responder": None}
    return Job(EpisodeRequest(id=name, task=task, **fields))


@pytest.mark.parametrize("retries", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_only_those_that_crash_fail(retries: int, seed: int) -> None:
    async def play() -> None:
        chance = random.Random(seed)
        jobs = [job(f"j{i}") for i in range(chance.randrange(1, 40))]
        bad = set(chance.sample(jobs, min(len(jobs), chance.randrange(4))))
        queue, deaths, failed, finished = JobQueue(retries), 0, [], []
        company = jobs
        while company:
            if bad.isdisjoint(company):
                finished += company
            else:
                deaths += 1
                failed += queue.after_loss(company, None)[1]
            company = queue.next_lot()
        assert set(failed) == bad
        assert set(finished) == set(jobs) - bad
        assert len(failed) + len(finished) == len(jobs)
        assert deaths <= len(bad) * (math.ceil(math.log2(len(jobs))) + retries + 1)
        if bad == set(jobs) and len(jobs) == 1:
            assert deaths == retries + 1

    asyncio.run(play())


def test_a_known_culprit_fails_at_once_and_the_others_go_first() -> None:
    async def play() -> None:
        queue, jobs = JobQueue(5), [job(name) for name in "abc"]
        queue.add(job("later"))
        rerun, failed = queue.after_loss(jobs, "b")
        assert failed == [jobs[1]]
        assert rerun == [jobs[0], jobs[2]]
        assert queue.next_lot() == []
        assert [queue.next() for _ in range(2)] == rerun
        assert queue.next().name == "later/0"
        assert queue.next() is None

    asyncio.run(play())


def test_cancelled_jobs_are_passed_over() -> None:
    async def play() -> None:
        queue, jobs = JobQueue(1), [job(name) for name in "abcd"]
        queue.after_loss(jobs, None)
        jobs[0].ended.cancel()
        jobs[1].ended.cancel()
        assert queue.next_lot() == jobs[2:]
        queue.add(jobs[0])
        assert queue.next() is None

    asyncio.run(play())
