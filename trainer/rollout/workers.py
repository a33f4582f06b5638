"""Rollout workers: the workflow in several Ray processes, as an `EpisodeRunner`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from cotune.config.train import TrainConfig
from cotune.episodes.episode import live_episode
from cotune.episodes.rollout import EpisodeBatch, run_batch
from cotune.episodes.workflows import Workflow
from cotune.errors import ConfigError
from cotune.recording.recorder import Sink
from cotune.records.failure_cause import FailureCause
from cotune.records.ids import new_id
from cotune.records.structs import Episode, Record, Task
from cotune.records.wire import unpack
from cotune.runtime.run_context import current_run
from cotune.sampling.protocol import Sampler
from cotune.trainer.rollout.app_source import app_source
from cotune.trainer.rollout.pool import WorkerLimits, WorkerPool
from cotune.trainer.rollout.process_reaper import MARK
from cotune.trainer.rollout.queue import EpisodeLost
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult, Setup, Started
from cotune.trainer.run.episode_runner import ResponderConfig

log = logging.getLogger("cotune")


class RolloutWorkers:
    """An `EpisodeRunner` in processes of the cluster. `open` creates it; use it on the event loop that opened it.

    Each process has its own copy of the application and its own recorder. The records of an episode come back when it
    has ended, and are stored by this process, once.
    """

    def __init__(self, workflow: Workflow, pool: WorkerPool) -> None:
        self.scorer_errors: Counter[str] = Counter()
        self.unlisted: Counter[str] = Counter()
        self._workflow = workflow
        self._pool = pool

    @classmethod
    async def open(
        cls,
        workflow: Workflow,
        path: str,
        config: TrainConfig,
        sampler: Sampler | None,
        *,
        limits: WorkerLimits | None = None,
        on_loss: Callable[[str], None] = lambda lost: None,
    ) -> RolloutWorkers:
        """Start `cluster.rollout_workers` processes and import the workflow in each; Ray must be up (`open_ray`).

        `path` is the import path of `workflow`. `sampler` must be one that can be sent to other processes, such as
        RaySampler; None leaves all calls to the application's provider. The workers get this process's folder, import
        paths and environment variables in `PASSED_ON`, and the variables of `cluster.env`. Raises ConfigError,
        WorkflowError.
        """
        if MARK in os.environ:
            raise ConfigError(
                "workflow",
                workflow.name,
                "starts training when its module is imported",
                'Put the call under `if __name__ == "__main__":`.',
            )
        run_folder = current_run.get().folder
        setup = Setup(
            app=app_source(path, config, workflow.prompts),
            sampler=sampler,
            bases={_absolute_model(model): names for model, names in config.bases.items()},
            tool_formats={_absolute_model(model): format for model, format in config.tool_formats.items()},
            run_folder=str(run_folder) if run_folder else None,
        )
        pool = WorkerPool(
            setup,
            config.cluster,
            limits=limits or WorkerLimits(),
            check=lambda started: _check_same_workflow(workflow, path, started),
            on_loss=on_loss,
        )
        await pool.open()
        return cls(workflow, pool)

    @property
    def counters(self) -> Mapping[str, int]:
        """The numbers of workers lost and replaced, episodes run again and lost, results dropped, and records lost."""
        return self._pool.counters

    async def run(self, batch: EpisodeBatch, responder: ResponderConfig | None) -> list[Episode]:
        """Run a batch: see `EpisodeRunner`. The same seed gives the same episodes as in this process.

        An episode whose worker is lost is run again. If that happens too often (see `JobQueue`), it is recorded as
        failed. Raises WorkflowError if workers are lost again and again without a finished episode.
        """

        async def run_one(task: Task, number: int) -> Episode:
            """Request episode `number` of a task from the pool."""
            request = EpisodeRequest(
                id=new_id(),
                task=task,
                options=batch.options(number),
                responder=responder,
                replay=batch.replays.get((task.id, number)),
            )
            return await self._episode(request, batch.sink)

        return await run_batch(run_one, batch)

    async def aclose(self) -> None:
        """End the workers and all processes that their episodes have started. Safe to call twice."""
        await self._pool.aclose()

    async def _episode(self, request: EpisodeRequest, sink: Sink) -> Episode:
        """Run one episode on the pool and store its records, also after a cancellation. An episode that the pool has
        lost is recorded as failed."""
        job = self._pool.submit(request)
        try:
            # Shielded, because the pool settles the job and still takes its records after a cancellation.
            result = await asyncio.shield(job.ended)
        except EpisodeLost as lost:
            return self._record_failure(request, sink, str(lost), lost.blame)
        except asyncio.CancelledError:
            cancelled_result = await self._pool.cancel(job)
            if cancelled_result is not None:
                self._store(cancelled_result, sink)
            raise
        episode = self._store(result, sink)
        if episode is None:
            cause = "It came back from its worker without an end."
            return self._record_failure(request, sink, cause, "infrastructure")
        return episode

    def _store(self, result: EpisodeResult, sink: Sink) -> Episode | None:
        """Store the records of a result, and add its counts. Returns the episode, if the records contain its end."""
        self._pool.counters["records_lost"] += result.lost
        self.scorer_errors.update(result.scorer_errors)
        self.unlisted.update(result.unlisted)
        try:
            records: list[Record] = unpack(result.records)
        except msgspec.DecodeError as error:
            log.warning("The records of an episode cannot be read (%s).", error)
            self._pool.counters["records_lost"] += 1
            return None
        try:
            sink.write(records)
        except Exception as broken:  # noqa: BLE001
            log.warning("The store refused %d records (%r).", len(records), broken)
            self._pool.counters["records_lost"] += len(records)
        last = records[-1] if records else None
        return last if isinstance(last, Episode) else None

    def _record_failure(self, request: EpisodeRequest, sink: Sink, cause: str, blame: FailureCause) -> Episode:
        """Record an episode that no worker has run to its end as failed."""
        live = live_episode(self._workflow, request.task, sink, request.options)
        return live.end("error", error=cause, blame=blame)


def _absolute_model(model: str) -> str:
    """Return the absolute path of a model folder, because a worker may have another working directory. The id of a
    model is returned as it is."""
    return str(Path(model).resolve()) if Path(model).exists() else model


def _check_same_workflow(workflow: Workflow, path: str, started: Started) -> None:
    """Raise ConfigError unless a worker has imported the same workflow as this process."""
    expected = (workflow.name, sorted(workflow.scorers), len(workflow.redactors))
    imported = (started.workflow, list(started.scorers), started.redactors)
    if expected != imported:
        raise ConfigError(
            "workflow",
            path,
            f"is another one in a rollout worker. Name, scorers and redactors are {expected} in this process, and "
            f"{imported} in the worker",
            "Add scorers and redactors in the module that defines the workflow, when it is imported.",
        )
