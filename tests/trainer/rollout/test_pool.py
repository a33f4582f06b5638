"""When a worker counts as stuck or full, and what is recorded of an episode that took its worker with it."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import pytest

from cotune.recording.records import Episode, Task
from cotune.trainer.rollout.app_source import AppSource
from cotune.trainer.rollout.pool import WorkerLimits, WorkerPool, _Worker
from cotune.trainer.rollout.queue import Job
from cotune.trainer.rollout.wire import EpisodeRequest, Heartbeat, Setup
from cotune.trainer.rollout.workers import RolloutWorkers
from cotune.workflows import workflow_of
from tests.trainer import trouble_app

LIMITS = WorkerLimits(heartbeat=9.0, memory_mb=100, threads=10, processes=5)
WELL = {"blocked": 0.0, "culprit": None, "where": "", "resident_mb": 100, "threads": 10, "processes": 5, "overdue": 0}


def pool() -> WorkerPool:
    setup = Setup(app=AppSource(path="app:solve"), mark="")
    settings = {"workers": 1, "cpus": 1.0, "runtime_env": {}, "retries": 1, "limits": LIMITS}
    return WorkerPool(setup, check=lambda started: None, on_loss=None, **settings)


def order(name: str, timeout: float | None = None) -> EpisodeRequest:
    task = Task(id=name, input={"secret": "hidden"})
    return EpisodeRequest(
        id=name, task=task, phase="train", training_step=2, rollout=1, timeout=timeout, responder=None
    )


def worker(*jobs: tuple[str, float | None, float]) -> _Worker:
    """A worker that runs these orders: name, time-out, seconds since it began."""
    made = _Worker(0, None)
    made.finished = 1
    for name, timeout, age in jobs:
        made.running[name] = Job(order(name, timeout))
        made.running[name].started = time.monotonic() - age
    return made


@pytest.mark.parametrize(
    ("jobs", "pulse", "culprit"),
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
def test_stuck(jobs: list[Any], pulse: dict[str, Any], culprit: str | None) -> None:
    async def look() -> None:
        loss = pool()._stuck(worker(*jobs), Heartbeat(**{**WELL, **pulse}))
        assert (loss.culprit if loss else "nobody") == culprit

    asyncio.run(look())


@pytest.mark.parametrize(
    ("pulse", "why"),
    [
        ({}, ""),
        ({"resident_mb": 101}, "it has 101 MB of memory"),
        ({"threads": 11}, "it has 11 threads"),
        ({"processes": 6}, "it has 6 child processes"),
        ({"overdue": 2}, "code of 2 episodes that have ended still runs in it"),
    ],
)
def test_full(pulse: dict[str, int], why: str) -> None:
    async def weigh() -> None:
        found, busy, fresh = worker(), worker(("a", None, 0.0)), worker()
        fresh.finished = 0
        for one in (found, busy, fresh):
            pool()._weigh(one, Heartbeat(**{**WELL, **pulse}))
        assert [found.full, busy.full, fresh.full] == [why, why, ""]
        assert found.gone.done() == bool(why)
        assert not busy.gone.done()
        assert not fresh.gone.done()
        if why:
            assert not found.gone.result().fault

    asyncio.run(weigh())


def test_a_lost_episode_is_redacted() -> None:
    written: list[Any] = []

    class Sink:
        def write(self, records: Sequence[Any]) -> None:
            written.extend(records)

    def hide(message: dict[str, Any]) -> dict[str, Any]:
        return {**message, "content": str(message["content"]).replace("hidden", "[x]")}

    flow = dataclasses.replace(workflow_of(trouble_app.trouble), redactors=[hide])
    episode = RolloutWorkers(flow, pool())._failed(order("a"), Sink(), "lost, and hidden", "policy")
    assert written == [episode]
    assert isinstance(episode, Episode)
    assert "hidden" not in repr(episode)
    assert (episode.status, episode.error, episode.training_step, episode.rollout) == ("error", "lost, and [x]", 2, 1)
