"""Rollout: runs the workflow on the tasks of a step, many episodes at once, into the store."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from cotune.recording.episodes import run_episode
from cotune.recording.recorder import Responder, Sink
from cotune.recording.records import Episode, Task
from cotune.workflows import Workflow


async def rollout(
    workflow: Workflow,
    tasks: Sequence[Task],
    *,
    sink: Sink,
    responder: Responder | None,
    phase: str,
    training_step: int | None = None,
    rollouts: int = 1,
    concurrency: int = 64,
    timeout: float | None = None,
    done: Sequence[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """Run every task `rollouts` times, at most `concurrency` episodes at once; return `done` and the new episodes, by
    rollout and task.

    Episodes in `done` (finished before an interruption) are not run again.
    """

    async def one(task: Task, number: int) -> Episode:
        outcome = await run_episode(
            workflow,
            task,
            sink=sink,
            responder=responder,
            phase=phase,
            training_step=training_step,
            rollout=number,
            timeout=timeout,
        )
        return outcome.episode

    return await run_all(one, tasks, rollouts, concurrency, done=done, on_episode=on_episode)


async def run_all(
    one: Callable[[Task, int], Awaitable[Episode]],
    tasks: Sequence[Task],
    rollouts: int,
    concurrency: int,
    *,
    done: Sequence[Episode] = (),
    on_episode: Callable[[Episode], None] | None = None,
) -> list[Episode]:
    """`rollout`, where `one` runs an episode of a task under its number."""
    finished = {(episode.task.id, episode.rollout) for episode in done}
    gate = asyncio.Semaphore(concurrency)

    async def gated(task: Task, number: int) -> Episode:
        async with gate:
            episode = await one(task, number)
        if on_episode:
            on_episode(episode)
        return episode

    async with asyncio.TaskGroup() as group:
        running = [
            group.create_task(gated(task, number))
            for number in range(rollouts)
            for task in tasks
            if (task.id, number) not in finished
        ]
    place = {task.id: position for position, task in enumerate(tasks)}
    episodes = [*done, *(task.result() for task in running)]
    return sorted(episodes, key=lambda episode: (episode.rollout, place.get(episode.task.id, len(place))))
