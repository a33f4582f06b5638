"""The queue of episodes for rollout workers, and the decision which episodes of a lost worker run again."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from cotune.errors import CotuneError
from cotune.records.failure_cause import FailureCause
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult

RETRIES = 1
"""Number of times that an episode that was alone in a lost worker is run again before it counts as failed."""


class EpisodeLost(CotuneError):
    """An episode took its worker with it, more often than it may be run again, or could not be run at all."""

    def __init__(self, cause: str, remedy: str = "", *, blame: FailureCause = "infrastructure") -> None:
        self.blame = blame
        super().__init__(cause, remedy)


class Loss(msgspec.Struct, frozen=True):
    """The reason why a worker is gone. `culprit` is the id of the request that caused it, if that is known: it is not
    run again. `fault` is False for a worker that is only replaced."""

    cause: str
    culprit: str | None = None
    fault: bool = True


class Job:
    """An episode on its way. `ended` gets its result, or EpisodeLost."""

    def __init__(self, request: EpisodeRequest) -> None:
        self.request = request
        self.ended: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        self.losses = 0
        """Workers that were lost while it ran."""
        self.started = 0.0
        self.cancelled = False

    @property
    def alone(self) -> bool:
        """Whether it runs on a worker that has nothing else."""
        return self.losses > 1

    @property
    def name(self) -> str:
        return f"{self.request.task.id}/{self.request.options.rollout}"


class JobQueue:
    """Jobs that wait for a worker.

    An episode whose worker is lost runs again together with others; after its second loss it runs alone. Only an
    episode that ran alone is certain to be the cause, so an episode that crashes never makes another one fail.
    """

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()

    def add(self, job: Job) -> None:
        self._jobs.append(job)

    def next(self, *, idle: bool) -> Job | None:
        """The next job for a worker that has others, or is `idle` and may run one alone; none that was cancelled."""
        self._jobs = deque(job for job in self._jobs if not job.ended.done())
        job = next((job for job in self._jobs if idle or not job.alone), None)
        if job is not None:
            self._jobs.remove(job)
        return job

    def clear(self) -> None:
        self._jobs.clear()

    def after_loss(self, jobs: Sequence[Job], culprit: str | None) -> tuple[list[Job], list[Job]]:
        """Decide about the jobs of a worker that has died. Returns the jobs that are queued again, before all others,
        and the jobs that have failed.

        A job that is known to have ended the worker (`culprit`) fails at once. A job that ran alone fails when its
        worker was lost more than `RETRIES` times: it is probably the cause.
        """
        failed = [job for job in jobs if job.request.id == culprit]
        rerun = [job for job in jobs if job not in failed]
        for job in rerun:
            if not failed:  # the cause is unknown: it may be this job
                job.losses += 1
        if len(jobs) == 1 and jobs[0].losses > RETRIES:
            return [], list(jobs)
        self._jobs.extendleft(reversed(rerun))
        return rerun, failed
