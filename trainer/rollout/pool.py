"""The pool of rollout workers: it assigns episodes to workers, and replaces workers that are lost."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import msgspec

from cotune.config.cluster import CPUS, ClusterConfig
from cotune.errors import ConfigError, CotuneError, WorkflowError
from cotune.integrations.cluster.process import ProcessGone, RayProcess
from cotune.trainer.rollout.process_reaper import MARK
from cotune.trainer.rollout.queue import EpisodeLost, Job, JobQueue, Loss
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult, Heartbeat, Setup, Started

T = TypeVar("T")

_WORKER = "cotune.trainer.rollout.worker:RolloutWorker"
_HEARTBEAT_SECONDS = 5.0
_LONGEST_PAUSE = 30.0
"""The longest pause between attempts to start a worker, in seconds."""
_SLACK_SECONDS = 1.0
"""If an episode exceeds its time-out by this, its own event loop has not stopped it."""


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The limits after which a worker is replaced, or the rollout ends. Times are in seconds."""

    heartbeat: float = 60.0
    """A worker that does not answer for this long counts as hung."""
    start: float = 600.0
    """The time to find a machine, make the runtime environment, and import the application."""
    stop: float = 10.0
    """The time to end an episode that was cancelled."""
    deaths: int = 20
    """The rollout ends after this many lost workers in a row without a finished episode."""


class _Worker:
    """A worker of the pool, from its start to its loss."""

    def __init__(self, number: int, process: RayProcess) -> None:
        """`process` must be started."""
        self.number = number
        self.process = process
        self.running: dict[str, Job] = {}
        """The jobs that it runs, by the id of the request."""
        self.exclusive = False
        """Whether it runs a job that must run alone. It takes no other job until that has ended."""
        self.overdue = 0
        """The number of episodes that have ended while their code still runs. If there are any, the worker takes no
        further episode."""
        self.loss: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()
        """Set when the worker is lost, or must be replaced."""

    @property
    def free(self) -> bool:
        """Whether the worker can take a job."""
        return not (self.exclusive or self.overdue or self.loss.done())

    def lose(self, loss: Loss) -> None:
        """Mark the worker as lost. Only the first loss counts."""
        if not self.loss.done():
            self.loss.set_result(loss)

    def replace_if_idle(self) -> None:
        """Mark the worker as lost if code of ended episodes still runs in it, and no other episode does."""
        if self.overdue and not self.running:
            self.lose(Loss(f"code of {self.overdue} episodes that have ended still runs in it", fault=False))


class WorkerPool:
    """Keeps the configured number of workers running, and gives episodes to the worker with the fewest.

    All methods run on the event loop that opened the pool.
    """

    def __init__(
        self,
        setup: Setup,
        config: ClusterConfig,
        *,
        limits: WorkerLimits,
        check: Callable[[Started], None],
        on_loss: Callable[[str], None],
    ) -> None:
        """`check` raises an error if a worker has not imported the same workflow. `on_loss` gets a message for every
        worker that is lost or replaced: the reason, and the episodes ("task/rollout") that run again or have failed."""
        self.counters: Counter[str] = Counter()
        self._setup = setup
        self._config = config
        self._limits = limits
        self._check = check
        self._on_loss = on_loss
        self._workers: list[_Worker] = []
        self._queue = JobQueue()
        self._deaths = 0  # workers lost in a row without a finished episode
        self._failure: CotuneError | None = None  # the error that has ended the rollout
        self._open: set[Job] = set()  # the jobs that have not ended
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Start all workers, and return when each of them is ready. Raises ConfigError, WorkflowError."""
        starting = (self._start() for _ in range(self._config.rollout_workers))
        results = await asyncio.gather(*starting, return_exceptions=True)
        processes = [result for result in results if isinstance(result, RayProcess)]
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            await asyncio.gather(*(process.kill() for process in processes))
            raise self._not_started(errors[0])
        for number, process in enumerate(processes):
            self._spawn(self._keep_running(number, process))

    def submit(self, request: EpisodeRequest) -> Job:
        """Run an episode as soon as a worker is free."""
        job = Job(request)
        if self._failure is not None:
            job.ended.set_exception(self._failure)
            return job
        self._open.add(job)
        job.ended.add_done_callback(lambda ended: self._open.discard(job))
        self._queue.add(job)
        self._dispatch()
        return job

    async def cancel(self, job: Job) -> EpisodeResult | None:
        """Cancel a job. Returns its records, also if it has just ended, or None if it had not begun or its worker is
        lost. A worker that does not stop the job in time is replaced."""
        job.cancelled = True
        worker = next((worker for worker in self._workers if job.request.id in worker.running), None)
        if worker is None:
            # The job waits for a worker, or has just ended: then this has no effect.
            job.ended.cancel()
        else:
            # The worker delivers the records of the cancelled episode, which ends the job.
            try:
                async with asyncio.timeout(self._limits.stop):
                    await worker.process.call("cancel", job.request.id)
                    await asyncio.wait({job.ended})
            except TimeoutError:
                worker.lose(Loss(f"{job.name} did not stop within {self._limits.stop:g} s of being cancelled"))
            except ProcessGone as gone:
                worker.lose(Loss(gone.cause))
            # If the worker is lost, by this or for another reason, `_settle` ends the job.
            await asyncio.wait({job.ended})
        if job.ended.cancelled() or job.ended.exception():
            return None
        return job.ended.result()

    async def aclose(self) -> None:
        """End all workers. Jobs that have not ended are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.process.kill() for worker in self._workers))
        self._workers.clear()
        for job in self._open:
            job.ended.cancel()

    async def _keep_running(self, number: int, process: RayProcess) -> None:
        """Keep a worker with this number running, until the rollout has failed. `process` is its first process, and
        whenever it is lost, the next one is started."""
        next_process: RayProcess | None = process
        try:
            while next_process is not None:
                await self._run_worker(number, next_process)
                next_process = await self._start_successor(number)
        except CotuneError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001
            self._fail(WorkflowError(f"Rollout worker {number} cannot be kept running: {error!r}.", "Report this."))

    async def _run_worker(self, number: int, process: RayProcess) -> None:
        """Give jobs to a worker until it is lost, and then settle its jobs."""
        worker = _Worker(number, process)
        self._workers.append(worker)
        self._dispatch()
        loss = await self._watch(worker)
        await worker.process.kill()
        self._workers.remove(worker)
        self._settle(worker, loss)

    async def _start_successor(self, number: int) -> RayProcess | None:
        """Start the process that replaces a lost worker. Attempts are repeated, with longer and longer pauses. Returns
        None if the rollout has failed."""
        failures = 0
        while self._failure is None:
            try:
                return await self._start()
            except (ProcessGone, TimeoutError) as error:
                cause = f"its successor did not start: {error or f'not within {self._limits.start:g} s'}"
                self._on_loss(f"rollout worker {number} was not replaced yet: {cause}")
                self._count_death(cause)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures += 1
        return None

    async def _start(self) -> RayProcess:
        """Start a worker. Raises ProcessGone, TimeoutError, and the errors of the application's import."""
        configured = self._config.runtime_env
        # The reaper finds the processes of a worker by the mark.
        variables = {**configured.get("env_vars", {}), MARK: uuid.uuid4().hex}
        process = RayProcess(_WORKER, cpus=CPUS, runtime_env={**configured, "env_vars": variables})
        try:
            async with asyncio.timeout(self._limits.start):
                await process.start()
                started = await process.call("start", self._setup)
            self._check(started)
        except TypeError as error:  # an object of the setup, usually a sampler of the user's own, cannot be pickled
            await asyncio.shield(process.kill())
            fault = f"does not cross processes ({str(error).splitlines()[0]})"
            raise ConfigError(
                "sampler", type(self._setup.sampler).__name__, fault, "Host it by start_sampler."
            ) from error
        except BaseException:
            await asyncio.shield(process.kill())
            raise
        return process

    def _not_started(self, error: BaseException) -> BaseException:
        """Turn the error of a worker that did not start into one that names the cause and the fix."""
        if isinstance(error, TimeoutError):
            return ConfigError(
                "cluster.rollout_workers",
                self._config.rollout_workers,
                f"are more than the cluster has room for: not all were up within {self._limits.start:g} s",
                f"Each takes {CPUS:g} CPU: ask for fewer workers, or look at `ray status`.",
            )
        if isinstance(error, ProcessGone):
            return WorkflowError(
                f"A rollout worker died while it imported {self._setup.app.path}: {error.cause}",
                "Import the application in a process of its own and read what it says.",
            )
        return error

    async def _watch(self, worker: _Worker) -> Loss:
        """Wait until the worker is lost, does not answer, is blocked for too long, or must be replaced. Returns the
        reason."""
        while True:
            await asyncio.wait({worker.loss}, timeout=min(_HEARTBEAT_SECONDS, self._limits.heartbeat / 4))
            if worker.loss.done():
                return worker.loss.result()
            answer = self._spawn(worker.process.call("heartbeat"))
            # Asyncio logs an error that nobody retrieves, and below nobody does if the worker is lost meanwhile. A
            # cancelled call has no error to retrieve.
            answer.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
            await asyncio.wait({answer, worker.loss}, timeout=self._limits.heartbeat, return_when="FIRST_COMPLETED")
            if worker.loss.done():
                return worker.loss.result()
            if not answer.done():
                return Loss(f"it did not answer for {self._limits.heartbeat:g} s")
            if (error := answer.exception()) is not None:
                return Loss(error.cause if isinstance(error, CotuneError) else str(error))
            heartbeat: Heartbeat = answer.result()
            blocked = self._loss_by_blocking(worker, heartbeat)
            if blocked is not None:
                return blocked
            worker.overdue = max(worker.overdue, heartbeat.overdue)
            worker.replace_if_idle()

    def _loss_by_blocking(self, worker: _Worker, heartbeat: Heartbeat) -> Loss | None:
        """Return a loss if code blocks the event loop of a worker for longer than the time-out of its episode.

        The job whose code blocks it is the culprit. If it is not known, the shortest time-out of all jobs counts.
        """
        if not heartbeat.blocked:
            return None
        culprit = worker.running.get(heartbeat.culprit or "")
        if culprit is None:
            seconds = heartbeat.blocked
            limit = self._shortest_timeout(worker)
        else:
            seconds = time.monotonic() - culprit.started
            limit = culprit.request.options.timeout
        if limit is None or seconds <= limit + _SLACK_SECONDS:
            return None
        text = f"its event loop was blocked for {heartbeat.blocked:.0f} s at {heartbeat.where}"
        if culprit is None:
            return Loss(text)
        text += f", by the episode {culprit.name}, which has a time-out of {limit} s"
        return Loss(text, culprit.request.id)

    def _shortest_timeout(self, worker: _Worker) -> float | None:
        """Return the shortest time-out of the episodes of a blocked worker; None if they have none. A
        worker without an episode may be blocked for as long as it may be silent."""
        if not worker.running:
            return self._limits.heartbeat
        timeouts = [job.request.options.timeout for job in worker.running.values()]
        return min((timeout for timeout in timeouts if timeout), default=None)

    def _dispatch(self) -> None:
        """Give waiting jobs to free workers, until there is no job or no free worker."""
        while free := [worker for worker in self._workers if worker.free]:
            # The worker with the fewest episodes. Only an idle one gets an episode that must run alone.
            worker = min(free, key=lambda worker: len(worker.running))
            job = self._queue.next(idle=not worker.running)
            if job is None:
                return
            worker.exclusive = job.alone
            worker.running[job.request.id] = job
            job.started = time.monotonic()
            self._spawn(self._run(worker, job))

    async def _run(self, worker: _Worker, job: Job) -> None:
        """Run a job on a worker and deliver its result. If the process is gone, mark the worker as lost: `_run_worker`
        then settles its jobs."""
        try:
            result: EpisodeResult | EpisodeLost = await worker.process.call("run", job.request)
        except ProcessGone as gone:
            return worker.lose(Loss(gone.cause))
        except CotuneError as error:
            result = EpisodeLost(error.cause, error.remedy)
        except Exception as error:  # noqa: BLE001
            result = EpisodeLost(f"Its worker could not run it: {error!r}.", "Report this.")
        self.deliver(worker, job, result)

    def deliver(self, worker: _Worker, job: Job, result: EpisodeResult | EpisodeLost) -> None:
        """Take the result of a job from a worker. A second result of the same job is dropped, and so is the result of a
        lost worker, whose jobs are run again."""
        is_expected = False
        if not worker.loss.done():  # a lost worker keeps its jobs in `running`, for `_settle`
            is_expected = worker.running.pop(job.request.id, None) is job
        if not is_expected or job.ended.done():
            self.counters["results_dropped"] += 1
            return
        if isinstance(result, EpisodeLost):
            job.ended.set_exception(result)
        else:
            job.ended.set_result(result)
            self._deaths = 0
        worker.exclusive = False
        worker.replace_if_idle()
        self._dispatch()

    def _settle(self, worker: _Worker, loss: Loss) -> None:
        """Run the episodes of a lost worker again, or let them fail, and report the loss."""
        jobs = [job for job in worker.running.values() if not job.ended.done()]
        for job in jobs:
            if job.cancelled:
                job.ended.cancel()
        rerun, failed = self._queue.after_loss([job for job in jobs if not job.cancelled], loss.culprit)
        for job in failed:
            job.ended.set_exception(
                EpisodeLost(
                    f"The episode's worker was lost: {loss.cause}.", "Look at what its task does.", blame="policy"
                )
            )
        self.counters["workers_lost" if loss.fault else "workers_replaced"] += 1
        self.counters["episodes_run_again"] += len(rerun)
        self.counters["episodes_lost"] += len(failed)
        report = [f"rollout worker {worker.number} (process {worker.process.pid}) was replaced: {loss.cause}"]
        if rerun:
            report.append(f"run again: {', '.join(job.name for job in rerun)}")
        if failed:
            report.append(f"failed: {', '.join(job.name for job in failed)}")
        self._on_loss("; ".join(report))
        if loss.fault:
            self._count_death(loss.cause)
        self._dispatch()

    def _count_death(self, cause: str) -> None:
        """Count a lost worker. End the rollout if too many are lost in a row without a finished episode."""
        # `deliver` sets this back to 0 whenever an episode finishes.
        self._deaths += 1
        if self._deaths >= self._limits.deaths:
            self._fail(
                WorkflowError(
                    f"{self._deaths} rollout workers were lost one after another, and no episode finished; the last: "
                    f"{cause}.",
                    "Run the application alone on one of these tasks. Finished episodes are kept.",
                )
            )

    def _fail(self, error: CotuneError) -> None:
        """End the rollout: all jobs that have not ended, and all later ones, get the error."""
        self._failure = error
        for job in self._open:
            if not job.ended.done():  # a job that has just ended is removed from `_open` a moment later
                job.ended.set_exception(error)
        self._queue.clear()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start a task that `aclose` cancels. asyncio itself keeps no reference to tasks."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
