"""Rollout workers as a pool: who runs which episode, what a lost worker costs, and who takes its place."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cotune.errors import ConfigError, CotuneError, WorkflowError
from cotune.integrations.ray.process import ProcessGone, RayProcess
from cotune.trainer.rollout.process_reaper import MARK
from cotune.trainer.rollout.queue import EpisodeLost, Job, JobQueue, Loss
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult, Heartbeat, Setup, Started

_WORKER = "cotune.trainer.rollout.worker:RolloutWorker"
_PULSE_SECONDS = 5.0
_LONGEST_PAUSE = 30.0
"""Between attempts to start a worker, in seconds."""
_SLACK_SECONDS = 1.0
"""An episode that is this much over its time-out was not stopped by its own event loop."""


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """When a worker is given up, and when it has gathered too much. Times in seconds."""

    heartbeat: float = 60.0
    """Without an answer for this long, a worker counts as hung."""
    start: float = 600.0
    """To find a place, make the runtime environment, and import the application."""
    stop: float = 10.0
    """To end an episode that was cancelled."""
    deaths: int = 20
    """Workers that may be lost one after another without any episode finishing; then the rollout stops."""
    threads: int = 512
    processes: int = 64
    memory_mb: int = 0
    """Above these a worker takes no further episode and is replaced when its last has ended; memory 0: no limit."""


class WorkerLost(msgspec.Struct, frozen=True, kw_only=True):
    """A worker that was lost or replaced: why, and what became of the episodes it ran ("task/rollout")."""

    worker: int
    pid: int | None
    cause: str
    rerun: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    def __str__(self) -> str:
        parts = [f"rollout worker {self.worker} (process {self.pid}) was replaced: {self.cause}"]
        parts += [f"run again: {', '.join(self.rerun)}"] if self.rerun else []
        parts += [f"failed: {', '.join(self.failed)}"] if self.failed else []
        return "; ".join(parts)


class _Worker:
    def __init__(self, number: int, process: RayProcess) -> None:
        self.number = number
        self.process = process
        self.running: dict[str, Job] = {}
        self.exclusive = False
        """Whether it runs a lot of suspects, and nothing else until they have ended."""
        self.full = ""
        """Why it takes no further episode."""
        self.finished = 0
        self.gone: asyncio.Future[Loss] = asyncio.get_running_loop().create_future()

    def lose(self, loss: Loss) -> None:
        if not self.gone.done():
            self.gone.set_result(loss)


class WorkerPool:
    """Keeps `workers` processes up. Everything here happens on the event loop that opened it.

    Episodes go to the worker with the fewest.
    """

    def __init__(
        self,
        setup: Setup,
        *,
        workers: int,
        cpus: float,
        runtime_env: Mapping[str, Any],
        retries: int,
        limits: WorkerLimits,
        check: Callable[[Started], None],
        on_loss: Callable[[WorkerLost], None] | None,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.started: Started | None = None
        self.pulses: dict[int, Heartbeat] = {}
        """The latest of each worker, by number."""
        self._setup = setup
        self._size = workers
        self._cpus = cpus
        self._runtime_env = dict(runtime_env)
        self._limits = limits
        self._check = check
        self._on_loss = on_loss or (lambda lost: None)
        self._workers: list[_Worker] = []
        self._queue = JobQueue(retries)
        self._deaths = 0
        self._failure: CotuneError | None = None
        self._open: set[Job] = set()
        self._tasks: set[asyncio.Task[Any]] = set()

    async def open(self) -> None:
        """Start all workers, and return when each of them is ready. Raises ConfigError, WorkflowError."""
        first = await asyncio.gather(*(self._start() for _ in range(self._size)), return_exceptions=True)
        up = [process for process in first if isinstance(process, RayProcess)]
        if len(up) < self._size:
            await asyncio.gather(*(process.kill() for process in up))
            raise self._not_started(next(error for error in first if isinstance(error, BaseException)))
        for number, process in enumerate(up):
            self._spawn(self._keep(number, process))

    def submit(self, order: EpisodeRequest) -> Job:
        """Run an order as soon as a worker is free."""
        job = Job(order)
        if self._failure is not None:
            job.ended.set_exception(self._failure)
            return job
        self._open.add(job)
        job.ended.add_done_callback(lambda ended: self._open.discard(job))
        self._queue.add(job)
        self._dispatch()
        return job

    async def cancel(self, job: Job) -> EpisodeResult | None:
        """Cancel a job; what it has recorded, if it had begun. A worker that does not stop it in time is replaced."""
        job.cancelled = True
        worker = next((w for w in self._workers if job.order.id in w.running), None)
        if worker is None:
            job.ended.cancel()
        else:
            try:
                async with asyncio.timeout(self._limits.stop):
                    await worker.process.call("cancel", job.order.id)
                    await asyncio.wait({job.ended})
            except TimeoutError:
                worker.lose(Loss(f"{job.name} did not stop within {self._limits.stop:g} s of being cancelled"))
            except ProcessGone as gone:
                worker.lose(Loss(gone.cause))
            await asyncio.wait({job.ended})
        return None if job.ended.cancelled() or job.ended.exception() else job.ended.result()

    async def aclose(self) -> None:
        """End all workers and what their episodes have left running; jobs still open are cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(self._end(worker) for worker in self._workers))
        self._workers.clear()
        for job in list(self._open):
            job.ended.cancel()

    async def _keep(self, number: int, process: RayProcess) -> None:
        try:
            await self._kept(number, process)
        except CotuneError as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001
            self._give_up(WorkflowError(f"Rollout worker {number} cannot be kept up: {error!r}.", "Report this."))

    async def _kept(self, number: int, process: RayProcess | None) -> None:
        """One worker after another under this number, until the pool gives up."""
        failures = 0
        while self._failure is None:
            try:
                worker = _Worker(number, process or await self._start())
            except (ProcessGone, TimeoutError) as error:
                process = None
                cause = f"its successor did not start: {error or f'not within {self._limits.start:g} s'}"
                self._on_loss(WorkerLost(worker=number, pid=None, cause=cause))
                self._died(cause)
                await asyncio.sleep(min(2.0**failures, _LONGEST_PAUSE))
                failures += 1
                continue
            process, failures = None, 0
            self._workers.append(worker)
            self._dispatch()
            loss = await self._watch(worker)
            await (worker.process.kill() if loss.fault else self._end(worker))
            self._workers.remove(worker)
            self._settle(worker, loss)

    async def _start(self) -> RayProcess:
        """A worker that is ready. Raises ProcessGone, TimeoutError, and what importing the application raises."""
        mark = uuid.uuid4().hex
        variables = {**self._runtime_env.get("env_vars", {}), MARK: mark}
        process = RayProcess(_WORKER, cpus=self._cpus, runtime_env={**self._runtime_env, "env_vars": variables})
        try:
            async with asyncio.timeout(self._limits.start):
                await process.start()
                started = await process.call("start", msgspec.structs.replace(self._setup, mark=mark))
            self._check(started)
        except TypeError as error:
            await asyncio.shield(process.kill())
            allowed = f"one that crosses processes ({str(error).splitlines()[0]})"
            raise ConfigError(
                "sampler", type(self._setup.sampler).__name__, allowed, "Host it by start_sampler."
            ) from error
        except BaseException:
            await asyncio.shield(process.kill())
            raise
        self.started = started
        return process

    def _not_started(self, error: BaseException) -> BaseException:
        if isinstance(error, TimeoutError):
            return ConfigError(
                "rollout workers",
                self._size,
                f"as many as the cluster has room for: not all were up within {self._limits.start:g} s",
                f"Each takes {self._cpus:g} CPUs: ask for fewer workers or CPUs, or look at `ray status`.",
            )
        if isinstance(error, ProcessGone):
            return WorkflowError(
                f"A rollout worker died while it imported {self._setup.app.path}: {error.cause}",
                "Import the application in a process of its own and read what it says.",
            )
        return error

    async def _watch(self, worker: _Worker) -> Loss:
        """Wait until the worker is gone, hung, held up past an episode's time-out, or full and idle."""
        while True:
            await asyncio.wait({worker.gone}, timeout=min(_PULSE_SECONDS, self._limits.heartbeat / 4))
            if worker.gone.done():
                return worker.gone.result()
            beat = self._spawn(worker.process.call("pulse"))
            beat.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.wait({beat, worker.gone}, timeout=self._limits.heartbeat, return_when="FIRST_COMPLETED")
            if worker.gone.done():
                return worker.gone.result()
            if not beat.done():
                return Loss(f"it did not answer for {self._limits.heartbeat:g} s")
            if (error := beat.exception()) is not None:
                return Loss(error.cause if isinstance(error, CotuneError) else str(error))
            self.pulses[worker.number] = beat.result()
            if (stuck := self._stuck(worker, beat.result())) is not None:
                return stuck
            self._weigh(worker, beat.result())

    def _stuck(self, worker: _Worker, pulse: Heartbeat) -> Loss | None:
        """A loss where one piece of code holds the worker up past the time-out of its episode."""
        what = f"its event loop was blocked for {pulse.blocked:.0f} s at {pulse.where}"
        culprit = worker.running.get(pulse.culprit or "")
        if culprit is not None:
            limit, past = culprit.order.timeout, time.monotonic() - culprit.started
            late = limit is not None and past > limit + _SLACK_SECONDS
            said = f"{what}, by the episode {culprit.name}, which has a time-out of {limit} s"
            return Loss(said, culprit.order.id) if late else None
        limits = [job.order.timeout for job in worker.running.values() if job.order.timeout is not None]
        limit = min(limits) if limits else None if worker.running else self._limits.heartbeat
        return Loss(what) if limit is not None and pulse.blocked > limit + _SLACK_SECONDS else None

    def _weigh(self, worker: _Worker, pulse: Heartbeat) -> None:
        limits = self._limits
        if not worker.full and worker.finished:
            if limits.memory_mb and pulse.resident_mb > limits.memory_mb:
                worker.full = f"it has {pulse.resident_mb} MB of memory"
            elif pulse.overdue:
                worker.full = f"code of {pulse.overdue} episodes that have ended still runs in it"
            elif pulse.threads > limits.threads:
                worker.full = f"it has {pulse.threads} threads"
            elif pulse.processes > limits.processes:
                worker.full = f"it has {pulse.processes} child processes"
        self._retire_if_full(worker)

    def _retire_if_full(self, worker: _Worker) -> None:
        if worker.full and not worker.running:
            worker.lose(Loss(worker.full, fault=False))

    def _dispatch(self) -> None:
        for worker in self._workers:
            if self._is_free(worker) and not worker.running:
                for job in self._queue.next_lot():
                    worker.exclusive = True
                    self._begin(worker, job)
        while free := [worker for worker in self._workers if self._is_free(worker)]:
            if (job := self._queue.next()) is None:
                return
            self._begin(min(free, key=lambda worker: len(worker.running)), job)

    @staticmethod
    def _is_free(worker: _Worker) -> bool:
        return not (worker.exclusive or worker.full or worker.gone.done())

    def _begin(self, worker: _Worker, job: Job) -> None:
        job.started = time.monotonic()
        worker.running[job.order.id] = job
        self._spawn(self._run(worker, job))

    async def _run(self, worker: _Worker, job: Job) -> None:
        try:
            answer: EpisodeResult | EpisodeLost = await worker.process.call("run", job.order)
        except ProcessGone as gone:
            return worker.lose(Loss(gone.cause))
        except CotuneError as error:
            answer = EpisodeLost(error.cause, error.remedy)
        except Exception as error:  # noqa: BLE001
            answer = EpisodeLost(f"Its worker could not run it: {error!r}.", "Report this.")
        self.deliver(worker, job, answer)

    def deliver(self, worker: _Worker, job: Job, answer: EpisodeResult | EpisodeLost) -> None:
        """Take the answer of a worker; one from a worker that was given up, or a second one, is dropped."""
        if worker.gone.done() or worker.running.pop(job.order.id, None) is not job or job.ended.done():
            self.counters["results_dropped"] += 1
            return
        if isinstance(answer, EpisodeLost):
            job.ended.set_exception(answer)
        else:
            job.ended.set_result(answer)
            self._deaths = 0
        worker.finished += 1
        worker.exclusive = worker.exclusive and bool(worker.running)
        self._retire_if_full(worker)
        self._dispatch()

    def _settle(self, worker: _Worker, loss: Loss) -> None:
        """What becomes of the episodes of a worker that is gone."""
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
        names = {"rerun": tuple(job.name for job in rerun), "failed": tuple(job.name for job in failed)}
        self._on_loss(WorkerLost(worker=worker.number, pid=worker.process.pid, cause=loss.cause, **names))
        if loss.fault:
            self._died(loss.cause)
        self._dispatch()

    def _died(self, cause: str) -> None:
        self._deaths += 1
        if self._deaths >= self._limits.deaths:
            self._give_up(
                WorkflowError(
                    f"{self._deaths} rollout workers were lost one after another, and no episode finished; the last: "
                    f"{cause}.",
                    "Run the application on one of these tasks in a process of its own. Finished episodes are kept.",
                )
            )

    def _give_up(self, error: CotuneError) -> None:
        self._failure = error
        for job in list(self._open):
            job.ended.set_exception(error)
        self._queue.clear()

    async def _end(self, worker: _Worker) -> None:
        with contextlib.suppress(CotuneError, TimeoutError):
            async with asyncio.timeout(self._limits.stop):
                self.counters["processes_killed"] += await worker.process.call("close")
        await worker.process.kill()

    def _spawn(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task
