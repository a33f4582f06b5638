"""Episodes on their way through rollout workers, and which of them is to blame when a worker is lost."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec

from cotune.errors import CotuneError
from cotune.sampling.blame import Blame
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult

T = TypeVar("T")


class EpisodeLost(CotuneError):
    """An episode took its worker with it, more often than it may be run again, or could not be run at all."""

    def __init__(self, cause: str, remedy: str = "", *, blame: Blame = "infrastructure") -> None:
        self.blame = blame
        super().__init__(cause, remedy)


class Loss(msgspec.Struct, frozen=True):
    """Why a worker is gone. `culprit` is the order that is to blame and not run again, where that is known; `fault` is
    False for a worker that is only replaced."""

    cause: str
    culprit: str | None = None
    fault: bool = True


class Job:
    """An episode on its way. `ended` gets its reply, or EpisodeLost."""

    def __init__(self, order: EpisodeRequest) -> None:
        self.order = order
        self.ended: asyncio.Future[EpisodeResult] = asyncio.get_running_loop().create_future()
        self.losses = 0
        self.started = 0.0
        self.cancelled = False

    @property
    def name(self) -> str:
        return f"{self.order.task.id}/{self.order.rollout}"


class JobQueue:
    """Jobs that wait for a worker: any worker, or, for the suspects of a lost one, a worker of their own.

    Which of several episodes took a worker down is found by running them again in halves: only an episode that was
    alone is to blame, so that one that crashes costs no other.
    """

    def __init__(self, retries: int) -> None:
        self._retries = retries
        self._waiting: deque[Job] = deque()
        self._lots: deque[list[Job]] = deque()

    def add(self, job: Job) -> None:
        self._waiting.append(job)

    def next(self) -> Job | None:
        """The next job for a worker that may have others."""
        return next((job for job in _popped(self._waiting) if not job.ended.done()), None)

    def next_lot(self) -> list[Job]:
        """The next suspects for an idle worker, which must get nothing else until they have ended."""
        open_lots = ([job for job in lot if not job.ended.done()] for lot in _popped(self._lots))
        return next(filter(None, open_lots), [])

    def clear(self) -> None:
        self._waiting.clear()
        self._lots.clear()

    def after_loss(self, jobs: Sequence[Job], culprit: str | None) -> tuple[list[Job], list[Job]]:
        """Queue the jobs of a lost worker again; return those, and those that have failed."""
        failed = [job for job in jobs if job.order.id == culprit]
        if failed:
            rerun = [job for job in jobs if job not in failed]
            self._waiting.extendleft(reversed(rerun))
            return rerun, failed
        if len(jobs) == 1:
            return self._after_lone_loss(jobs[0])
        for job in jobs:
            job.losses = max(job.losses, 1)
        half = (len(jobs) + 1) // 2
        self._lots.extend(list(lot) for lot in (jobs[:half], jobs[half:]) if lot)
        return list(jobs), []

    def _after_lone_loss(self, job: Job) -> tuple[list[Job], list[Job]]:
        job.losses += 1
        if job.losses > self._retries:
            return [], [job]
        self._lots.append([job])
        return [job], []


def _popped(queue: deque[T]) -> Iterator[T]:
    while queue:
        yield queue.popleft()
