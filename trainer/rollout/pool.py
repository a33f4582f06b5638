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
"""Between attempts to start a worker, in seconds."""
_SLACK_SECONDS = 1.0
"""An episode that exceeds its time-out by this much was not stopped by its own event loop."""


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker is given up. Times in seconds."""

    heartbeat: float = 60.0
    """Without an answer for this long, a worker counts as hung."""
    start: float = 600.0
    """To find a place, make the runtime environment, and import the application."""
    stop: float = 10.0
    """To end an episode that was cancelled."""
    deaths: int = 20
    """The rollout stops after this many lost workers in a row without a finished episode."""


class _Worker:
    def __init__(self, number: int, process: RayProcess) -> None:
        """Track an open process as worker `number`."""
        self.number = number
        self.process = process
        self.running: dict[str, Job] = {}
        """By the id of the request."""
        self.exclusive = False
        """Whether it runs one episode alone and takes no other until that has ended."""
        self.overdue = 0
        """Number of episodes that have ended while their code still runs. If there are any, the worker takes no further
        episode."""
        self.gone: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()

    @property
    def free(self) -> bool:
        return not (self.exclusive or self.overdue or self.gone.done())

    def lose(self, loss: Loss) -> None:
        if not self.gone.done():
            self.gone.set_result(loss)

    def replace_if_idle(self) -> None:
        if self.overdue and not self.running:
            self.lose(Loss(f"code of {self.overdue} episodes that have ended still runs in it", fault=False))


class WorkerPool:
    """Keeps the configured number of processes up. Everything here happens on the event loop that opened it.

    Episodes go to the worker with the fewest.
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
        """`check` raises if a worker has not imported the same workflow. `on_loss` gets a message for every worker that
        is lost or replaced: the reason, and the episodes ("task/rollout") that run again or failed."""
        self.counters: Counter[str] = Counter()
        self._setup = setup
        self._config = config
        self._limits = limits
        self._check = check
        self._on_loss = on_loss
        self._workers: list[_Worker] = []
        self._queue = JobQueue()
        self._deaths = 0
        self._failure: CotuneError | None = None
        self._open: set[Job] = set()
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
            self._spawn(self._keep(number, process))

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
        """Cancel a job. Returns its records, if it had begun. A worker that does not stop it in time is replaced."""
        job.cancelled = True
        worker = next((w for w in self._workers if job.request.id in w.running), None)
        if worker is None:
            job.ended.cancel()
        else:
            try:
                async with asyncio.timeout(self._limits.stop):
                    await worker.process.call("cancel", job.request.id)
                    await asyncio.wait({job.ended})
            except TimeoutError:
                worker.lose(Loss(f"{job.name} did not stop within {self._limits.stop:g} s of being cancelled"))
            except ProcessGone as gone:
                worker.lose(Loss(gone.cause))
            await asyncio.wait({job.ended})
        return None if job.ended.cancelled() or job.ended.exception() else job.ended.result()

    async def aclose(self) -> None:
        """End all workers; jobs still open are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(worker.process.kill() for worker in self._workers))
        self._workers.clear()
        for job in self._open:
            job.ended.cancel()

    async def _keep(self, number: int, process: RayProcess) -> None:
        try:
            await self._run_workers(number, process)
        except CotuneError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001
            self._give_up(WorkflowError(f"Rollout worker {number} cannot be kept up: {error!r}.", "Report this."))

    async def _run_workers(self, number: int, process: RayProcess | None) -> None:
        """Keep one worker with this number running: start the next when it is lost, until the pool gives up."""
        failures = 0
        while self._failure is None:
            try:
                worker = _Worker(number, process or await self._start())
            except (ProcessGone, TimeoutError) as error:
                process = None
                cause = f"its successor did not start: {error or f'not within {self._limits.start:g} s'}"
                self._on_loss(f"rollout worker {number} was not replaced yet: {cause}")
                self._died(cause)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures += 1
                continue
            process = None
            failures = 0
            self._workers.append(worker)
            self._dispatch()
            loss = await self._watch(worker)
            await worker.process.kill()
            self._workers.remove(worker)
            self._settle(worker, loss)

    async def _start(self) -> RayProcess:
        """Start a worker. Raises ProcessGone, TimeoutError, and the errors of the application's import."""
        environment = self._config.runtime_env
        environment = {**environment, "env_vars": {**environment.get("env_vars", {}), MARK: uuid.uuid4().hex}}
        process = RayProcess(_WORKER, cpus=CPUS, runtime_env=environment)
        try:
            async with asyncio.timeout(self._limits.start):
                await process.start()
                started = await process.call("start", self._setup)
            self._check(started)
        except TypeError as error:
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
        """Wait until the worker is gone, hung, held up past an episode's time-out, or to be replaced."""
        while True:
            await asyncio.wait({worker.gone}, timeout=min(_HEARTBEAT_SECONDS, self._limits.heartbeat / 4))
            if worker.gone.done():
                return worker.gone.result()
            call = self._spawn(worker.process.call("heartbeat"))
            # Retrieve its error even if nobody waits for it any more: asyncio would log it.
            call.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({call, worker.gone}, timeout=self._limits.heartbeat, return_when="FIRST_COMPLETED")
            if worker.gone.done():
                return worker.gone.result()
            if not call.done():
                return Loss(f"it did not answer for {self._limits.heartbeat:g} s")
            if (error := call.exception()) is not None:
                return Loss(error.cause if isinstance(error, CotuneError) else str(error))
            heartbeat: Heartbeat = call.result()
            if (stuck := self._stuck(worker, heartbeat)) is not None:
                return stuck
            worker.overdue = max(worker.overdue, heartbeat.overdue)
            worker.replace_if_idle()

    def _stuck(self, worker: _Worker, heartbeat: Heartbeat) -> Loss | None:
        """Return a loss if code blocks the event loop of a worker for longer than the time-out of its episode."""
        if not heartbeat.blocked:
            return None
        text = f"its event loop was blocked for {heartbeat.blocked:.0f} s at {heartbeat.where}"
        limit: float | None
        culprit = worker.running.get(heartbeat.culprit or "")
        if culprit is not None:
            limit = culprit.request.options.timeout
            seconds = time.monotonic() - culprit.started
            text += f", by the episode {culprit.name}, which has a time-out of {limit} s"
        else:  # the blocking code is not known: the shortest time-out of all its episodes counts
            limits = [job.request.options.timeout for job in worker.running.values()]
            limit = min(filter(None, limits), default=None if worker.running else self._limits.heartbeat)
            seconds = heartbeat.blocked
        if limit is None or seconds <= limit + _SLACK_SECONDS:
            return None
        return Loss(text, None if culprit is None else culprit.request.id)

    def _dispatch(self) -> None:
        """Give waiting jobs to free workers until either runs out."""
        while free := [worker for worker in self._workers if worker.free]:
            # The worker with the fewest episodes. Only an idle one gets an episode that must run alone.
            worker = min(free, key=lambda worker: len(worker.running))
            if (job := self._queue.next(idle=not worker.running)) is None:
                return
            worker.exclusive = job.alone
            self._begin(worker, job)

    def _begin(self, worker: _Worker, job: Job) -> None:
        job.started = time.monotonic()
        worker.running[job.request.id] = job
        self._spawn(self._run(worker, job))

    async def _run(self, worker: _Worker, job: Job) -> None:
        """Run a job on a worker and deliver its result. If the process is gone, the worker is lost, and its jobs are
        settled by the caller that watches it."""
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
        """Take the result of a worker. A second result for the same job is dropped, as is a result from a worker that
        was given up.
        """
        if worker.gone.done() or worker.running.pop(job.request.id, None) is not job or job.ended.done():
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
            self._died(loss.cause)
        self._dispatch()

    def _died(self, cause: str) -> None:
        """Count a lost worker. End the rollout if too many are lost in a row without a finished episode."""
        # `deliver` sets this back to 0 whenever an episode finishes.
        self._deaths += 1
        if self._deaths >= self._limits.deaths:
            self._give_up(
                WorkflowError(
                    f"{self._deaths} rollout workers were lost one after another, and no episode finished; the last: "
                    f"{cause}.",
                    "Run the application alone on one of these tasks. Finished episodes are kept.",
                )
            )

    def _give_up(self, error: CotuneError) -> None:
        self._failure = error
        for job in self._open:
            if not job.ended.done():  # a job that has just ended is removed from `_open` a moment later
                job.ended.set_exception(error)
        self._queue.clear()

    def _spawn(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
