"""Rollout: run the workflow on the tasks of a step, many episodes at once, or repeat recorded episodes."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import msgspec

from cotune.episodes.episode import EpisodeOptions, run_episode
from cotune.episodes.workflows import Workflow
from cotune.errors import CotuneError
from cotune.recording.context import current_episode
from cotune.recording.recorder import Responder, Sink
from cotune.records.structs import Episode, Task
from cotune.replay.responder import ReplayResponder
from cotune.replay.script import Replay


class EpisodeBatch(msgspec.Struct, frozen=True, kw_only=True):
    """Episodes to run: every task `rollouts` times, at most `concurrency` episodes at once.

    With `replays`, by task id and rollout, the batch consists of these: each repeats a recorded episode.
    """

    tasks: Sequence[Task]
    sink: Sink
    """Takes the records of the episodes."""
    phase: str
    training_step: int | None = None
    rollouts: int = 1
    replays: Mapping[tuple[str, int], Replay] = {}
    concurrency: int = 64
    timeout: float | None = None
    """Maximum seconds of one episode."""
    max_calls: int | None = None
    """Maximum calls of one episode."""
    record_tools: bool = False
    """Whether the results of a framework's tools are recorded, and returned again in `replays`."""
    freeze: bool = False
    """Whether the values of clock, uuid and random are recorded, and returned again in `replays`."""
    done: Sequence[Episode] = ()
    """Episodes of the batch that finished before an interruption. They are not run again."""
    on_episode: Callable[[Episode], None] | None = None
    """Called when an episode has ended."""

    def options(self, number: int) -> EpisodeOptions:
        """The options of episodes with this rollout number."""
        return EpisodeOptions(
            phase=self.phase,
            training_step=self.training_step,
            rollout=number,
            timeout=self.timeout,
            max_calls=self.max_calls,
            record_tools=self.record_tools,
            freeze=self.freeze,
        )


async def rollout(workflow: Workflow, batch: EpisodeBatch, responder: Responder | None = None) -> list[Episode]:
    """Run a batch in this process. `responder` answers the calls instead of the application's provider.

    Returns the episodes, including `batch.done`, ordered by rollout and task.
    """

    async def run_one(task: Task, rollout_number: int) -> Episode:
        """Run the workflow on one task, or repeat the recorded episode of this task and rollout in `batch.replays`."""
        workflow_to_run: Workflow = workflow
        responder_of_episode: Responder | None = responder
        replay = batch.replays.get((task.id, rollout_number))
        if replay is not None:
            workflow_to_run, responder_of_episode = repeat_episode(workflow, replay, responder)
        outcome = await run_episode(
            workflow_to_run,
            task,
            sink=batch.sink,
            responder=responder_of_episode,
            options=batch.options(rollout_number),
        )
        return outcome.episode

    return await run_batch(run_one, batch)


async def run_batch(run_one: Callable[[Task, int], Awaitable[Episode]], batch: EpisodeBatch) -> list[Episode]:
    """Like `rollout`, but `run_one(task, rollout)` runs one episode.

    If it raises, all other episodes are cancelled, and the first error is raised.
    """
    finished = {(episode.task.id, episode.rollout) for episode in batch.done}
    gate = asyncio.Semaphore(batch.concurrency)

    async def run_when_free(task: Task, number: int) -> Episode:
        async with gate:
            episode = await run_one(task, number)
        if batch.on_episode:
            batch.on_episode(episode)
        return episode

    try:
        async with asyncio.TaskGroup() as group:
            running: list[asyncio.Task[Episode]] = []
            for task, number in _tasks_and_numbers(batch):
                if (task.id, number) not in finished:
                    running.append(group.create_task(run_when_free(task, number)))
    except BaseExceptionGroup as errors:  # for example a framework that is too old, in all episodes
        # An error of cotune names the fix. The others may only follow from it.
        cotune_errors, _ = errors.split(CotuneError)
        if cotune_errors is not None:
            raise cotune_errors.exceptions[0] from errors
        raise errors.exceptions[0] from errors
    position_of_task = {task.id: position for position, task in enumerate(batch.tasks)}
    last = len(batch.tasks)  # for a finished episode of a task that the batch no longer has
    episodes = [*batch.done, *(run.result() for run in running)]
    return sorted(episodes, key=lambda episode: (episode.rollout, position_of_task.get(episode.task.id, last)))


def _tasks_and_numbers(batch: EpisodeBatch) -> list[tuple[Task, int]]:
    """Task and rollout of each episode of the batch."""
    if not batch.replays:
        return [(task, number) for number in range(batch.rollouts) for task in batch.tasks]
    tasks = {task.id: task for task in batch.tasks}
    return [(tasks[task], number) for task, number in batch.replays]


def repeat_episode(
    workflow: Workflow, replay: Replay, responder_of_new_calls: Responder | None
) -> tuple[Workflow, ReplayResponder]:
    """For one episode that repeats a recorded episode: the workflow to run, and the responder, which answers from the
    record. `responder_of_new_calls` answers at the fork, and calls after it that are not in the record.

    If a request of the episode differs from the record, or is missing, the episode fails with ReplayDiverged, even if
    the application swallows the error.
    """
    responder = ReplayResponder(replay, responder_of_new_calls)
    return replace(workflow, fn=_checked_function(workflow.fn, responder, replay)), responder


def _checked_function(fn: Callable[[Any], Any], responder: ReplayResponder, replay: Replay) -> Callable[[Any], Any]:
    """A wrapper of `fn`, the workflow's function, for an episode that repeats a recorded one.

    It gives the episode the recorded tool results, clock, uuid and random values up to the fork, runs `fn`, and then
    fails the episode if the application made other calls than the record. The responder refuses this call, but the
    application may swallow this error.
    """

    def give_recorded_values() -> None:
        """Give the episode the recorded tool results, times and random values before `replay.until`, the fork."""
        live = current_episode.get()
        assert live is not None
        script = replay.script
        until = replay.until
        live.tape.set_recorded([result for result in script.results if result.started < until])
        if live.chance is not None:
            live.chance.set_recorded([read for read in script.reads if read.at < until], script.started)

    @contextmanager
    def raise_divergence_first() -> Iterator[None]:
        """A block that runs the workflow. If it raises after a divergence, the divergence is raised as the cause."""
        try:
            yield
        except Exception:
            responder.require_followed()
            raise

    async def run_to_end(value: Awaitable[Any]) -> Any:
        with raise_divergence_first():
            result = await value
        responder.require_complete()
        return result

    async def run_async(task: Any) -> Any:
        give_recorded_values()
        return await run_to_end(fn(task))

    def run(task: Any) -> Any:
        give_recorded_values()
        with raise_divergence_first():
            value = fn(task)
        if inspect.isawaitable(value):  # the workflow is still to be run, by the caller
            return run_to_end(value)
        responder.require_complete()
        return value

    return run_async if inspect.iscoroutinefunction(fn) else run
