"""Episodes on their way through rollout workers, and what becomes of those whose worker was lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

import msgspec

from cotune.errors import CotuneError
from cotune.sampling.blame import Blame
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult


class EpisodeLost(CotuneError):
    """An episode took its worker with it, more often than it may be run again, or could not be run at all."""

    def __init__(self, cause: str, remedy: str = "", *, blame: Blame = "infrastructure") -> None:
        self.blame = blame
        super().__init__(cause, remedy)


class Loss(msgspec.Struct, frozen=True):
    """Why a worker is gone. `culprit` is the id of the request that is to blame and not run again, where that is known;
    `fault` is False for a worker that is only replaced."""

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
    def name(self) -> str:
        return f"{self.request.task.id}/{self.request.rollout}"


class JobQueue:
    """Jobs that wait for a worker.

    An episode whose worker is lost runs again beside others; from its second loss on it runs alone. Only one that was
    alone can be told to be at fault, so one that crashes fails no other.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._waiting: deque[Job] = deque()
        self._alone: deque[Job] = deque()

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def next(self) -> Job | None:
        """The next job for a worker that may have others."""
        return _next(self._waiting)

    def next_alone(self) -> Job | None:
        """The next job for an idle worker that gets nothing else until it has ended."""
        return _next(self._alone)

    def clear(self) -> None:
        self._waiting.clear()
        self._alone.clear()

    def after_loss(self, jobs: Sequence[Job], culprit: str | None) -> tuple[list[Job], list[Job]]:
        """Queue the jobs of a lost worker again; return those, and those that have failed.

        A known culprit fails at once. A job that was alone fails when it was lost more than `retries` times.
        """
        failed = [job for job in jobs if job.request.id == culprit]
        rerun = [job for job in jobs if job not in failed]
        if failed:
            self._waiting.extendleft(reversed(rerun))
            return rerun, failed
        for job in rerun:
            job.losses += 1
        if len(rerun) == 1 and rerun[0].losses > self._retries:
            return [], rerun
        self._waiting.extendleft(job for job in reversed(rerun) if job.losses == 1)
        self._alone.extend(job for job in rerun if job.losses > 1)
        return rerun, []


def _next(queue: deque[Job]) -> Job | None:
    """The first that nobody has cancelled."""
    while queue:
        if not (job := queue.popleft()).ended.done():
            return job
    return None
