"""When a worker counts as stuck or is replaced, and what is recorded of an episode that took its worker with it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from cotune.config.cluster import ClusterConfig
from cotune.episodes.episode import EpisodeOptions
from cotune.episodes.workflows import workflow_of
from cotune.records.structs import Episode, Task
from cotune.trainer.rollout.app_source import AppSource
from cotune.trainer.rollout.pool import WorkerLimits, WorkerPool, _Worker
from cotune.trainer.rollout.queue import EpisodeLost, Job, Loss
from cotune.trainer.rollout.wire import EpisodeRequest, Heartbeat, Setup
from cotune.trainer.rollout.workers import RolloutWorkers
from tests.trainer import trouble_app


def pool() -> WorkerPool:
    setup = Setup(app=AppSource(path="app:solve"))
    limits = WorkerLimits(heartbeat=9.0)
    return WorkerPool(setup, ClusterConfig(), limits=limits, check=lambda started: None, on_loss=lambda lost: None)


def request(name: str, timeout: float | None = None) -> EpisodeRequest:
    task = Task(id=name, input={"secret": "hidden"})
    options = EpisodeOptions(phase="train", training_step=2, rollout=1, timeout=timeout)
    return EpisodeRequest(id=name, task=task, options=options, responder=None)


def worker(*jobs: tuple[str, float | None, float]) -> _Worker:
    """A worker that runs these requests: name, time-out, seconds since it began."""
    made = _Worker(0, None)
    for name, timeout, age in jobs:
        made.running[name] = Job(request(name, timeout))
        made.running[name].started = time.monotonic() - age
    return made


@pytest.mark.parametrize(
    ("jobs", "heartbeat", "culprit"),
    [
        ([("a", 5.0, 9.0)], {"blocked": 8.0, "culprit": "a"}, "a"),
        ([("a", 5.0, 3.0)], {"blocked": 3.0, "culprit": "a"}, "nobody"),
        ([("a", 50.0, 20.0), ("b", 5.0, 20.0)], {"blocked": 20.0, "culprit": "a"}, "nobody"),
        ([("a", None, 999.0)], {"blocked": 999.0, "culprit": "a"}, "nobody"),
        ([("a", 50.0, 20.0), ("b", 5.0, 20.0)], {"blocked": 20.0}, None),
        ([("a", 50.0, 20.0)], {"blocked": 20.0}, "nobody"),
        ([("a", None, 99.0)], {"blocked": 99.0}, "nobody"),
        ([], {"blocked": 8.0}, "nobody"),
        ([], {"blocked": 20.0}, None),
    ],
)
def test_stuck(jobs: list[Any], heartbeat: dict[str, Any], culprit: str | None) -> None:
    async def look() -> None:
        loss = pool()._loss_by_blocking(worker(*jobs), Heartbeat(**heartbeat))
        assert (loss.culprit if loss else "nobody") == culprit

    asyncio.run(look())


def test_a_worker_whose_thread_runs_on_is_replaced_when_it_is_idle() -> None:
    async def look() -> None:
        idle, busy, sound = worker(), worker(("a", None, 0.0)), worker()
        for one, overdue in ((idle, 2), (busy, 1), (sound, 0)):
            one.overdue = overdue
            one.replace_if_idle()
        assert idle.loss.result().cause == "code of 2 episodes that have ended still runs in it"
        assert not idle.loss.result().fault
        assert [one.loss.done() for one in (busy, sound)] == [False, False]
        assert [one.free for one in (idle, busy, sound)] == [False, False, True]

    asyncio.run(look())


def test_a_pool_that_gives_up_over_an_episode_that_failed_fails_all_the_others() -> None:
    """The last of the losses that are too many may also be the one that its episode is not run again after."""

    async def look() -> None:
        made = pool()
        made._limits = msgspec.structs.replace(made._limits, deaths=1)
        jobs = [made.submit(request(name)) for name in ("culprit", "left", *map(str, range(20)))]
        lost = worker()
        lost.process = SimpleNamespace(pid=1)
        lost.running = {job.request.id: job for job in jobs[:2]}
        jobs[1].cancelled = True
        made._settle(lost, Loss("it died", culprit="culprit"))
        assert isinstance(jobs[0].ended.exception(), EpisodeLost)
        assert jobs[1].ended.cancelled()
        for job in jobs[2:]:
            assert "lost one after another" in str(job.ended.exception())

    asyncio.run(look())


def test_a_job_that_has_just_ended_keeps_its_records_when_it_is_cancelled() -> None:
    """It has left its worker then, and who waits for it has not gone on yet."""

    async def look() -> None:
        ended, waiting = Job(request("ended")), Job(request("waiting"))
        result: Any = object()
        ended.ended.set_result(result)
        assert await pool().cancel(ended) is result
        assert await pool().cancel(waiting) is None
        assert waiting.ended.cancelled()

    asyncio.run(look())


def test_a_lost_episode_is_redacted() -> None:
    written: list[Any] = []

    class Sink:
        def write(self, records: Sequence[Any]) -> None:
            written.extend(records)

    def hide(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": str(message["content"]).replace("hidden", "[x]")}

    flow = dataclasses.replace(workflow_of(trouble_app.trouble), redactors=[hide])
    episode = RolloutWorkers(flow, pool())._record_failure(request("a"), Sink(), "lost, and hidden", "policy")
    assert written == [episode]
    assert isinstance(episode, Episode)
    assert "hidden" not in repr(episode)
    assert (episode.status, episode.error, episode.training_step, episode.rollout) == ("error", "lost, and [x]", 2, 1)
