"""The queue of episodes for rollout workers. It decides which episodes of a lost worker run again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from cotune.errors import CotuneError
from cotune.records.failure_cause import FailureCause
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult

RETRIES = 1
"""The number of times that an episode is run again after it was the only one in a lost worker. Then it has failed."""


class EpisodeLost(CotuneError):
    """An episode could not be run, or its worker was lost too often. `blame` is the cause that its record gets."""

    def __init__(self, cause: str, remedy: str = "", *, blame: FailureCause = "infrastructure") -> None:
        self.blame = blame
        super().__init__(cause, remedy)


class Loss(msgspec.Struct, frozen=True):
    """Why a worker is lost."""

    cause: str
    culprit: str | None = None
    """The id of the request that caused the loss, if it is known. Its episode is not run again."""
    fault: bool = True
    """Whether the worker died or hung. False for a worker that is replaced as a precaution."""


class Job:
    """An episode to be run by a worker."""

    def __init__(self, request: EpisodeRequest) -> None:
        self.request = request
        self.ended: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        """Gets the result of the episode, or EpisodeLost."""
        self.losses = 0
        """The number of workers that were lost while the episode ran."""
        self.started = 0.0
        self.cancelled = False

    @property
    def alone(self) -> bool:
        """Whether the episode must be the only one of its worker."""
        return self.losses > 1

    @property
    def name(self) -> str:
        """The task and the rollout, for messages."""
        return f"{self.request.task.id}/{self.request.options.rollout}"


class JobQueue:
    """Jobs that wait for a worker.

    An episode whose worker is lost runs again together with others. After its second loss it runs alone. An episode
    fails only if it ran alone, because then it is the cause of the loss. So an episode that crashes its worker never
    makes another episode fail.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def next(self, *, idle: bool) -> Job | None:
        """Remove the next job for a worker from the queue, and return it. A worker that is not `idle` gets no job that
        must run alone. Cancelled jobs are dropped."""
        self._jobs = deque(job for job in self._jobs if not job.ended.done())
        for job in self._jobs:
            if idle or not job.alone:
                self._jobs.remove(job)
                return job
        return None

    def clear(self) -> None:
        self._jobs.clear()

    def after_loss(self, jobs: Sequence[Job], culprit: str | None) -> tuple[list[Job], list[Job]]:
        """Queue the jobs of a lost worker again, before all others, except the ones that have failed. Returns the jobs
        that run again, and the failed ones.

        The job that has caused the loss fails at once, if it is known (the request `culprit`). Otherwise a job that ran
        alone fails if its worker was lost more than `RETRIES` times.
        """
        failed = [job for job in jobs if job.request.id == culprit]
        if not failed:
            for job in jobs:  # each of them may be the cause
                job.losses += 1
            ran_alone = len(jobs) == 1
            if ran_alone and jobs[0].losses > RETRIES:
                failed = list(jobs)
        rerun = [job for job in jobs if job not in failed]
        self._jobs.extendleft(reversed(rerun))
        return rerun, failed
