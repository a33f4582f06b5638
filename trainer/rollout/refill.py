"""Refill: further episodes for a step in which the rewards of some groups do not differ."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec

from cotune.algorithms.task_signals import GroupSignal
from cotune.records.structs import Episode
from cotune.replay.forks import Place
from cotune.storage.episode_filters import EpisodeFilters
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.schedules.refill import Refill, why_no_refill

RunTasks = Callable[[Collection[str]], Awaitable[list[Episode]]]
"""Runs tasks in a step, and returns all of their episodes in the step, with those that are on record."""
Compare = Callable[[Sequence[Episode]], Awaitable[list[GroupSignal]]]
"""The groups of episodes that have ended, and whether their rewards differ."""


class RolledOut(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of a step, and the tasks and episodes of its refill."""

    episodes: Sequence[Episode]
    refill: Refill | None = None
    refilled: int = 0
    """Episodes that the refill has added."""
    late: int = 0
    """Episodes that the refill has begun, and did not wait for."""
    late_tasks: Sequence[str] = ()
    """The tasks of these episodes."""
    fork_effects: Mapping[Place, float] = {}
    """The effects of places by which the calls to fork were chosen."""


async def refill_step(
    run: RolloutRun,
    progress: Progress,
    step: int,
    first_episodes: Sequence[Episode],
    run_tasks: RunTasks,
    compare: Compare,
    needed: asyncio.Event,
) -> RolledOut:
    """Add further tasks to a step until enough groups have different rewards or the budget is spent. Returns the
    episodes of the step's first tasks (`first_episodes`) and of the added ones.

    In mode async, late tasks are waited for until the step is `needed`. Their episodes are counted as late.
    """
    config = run.config
    episodes_per_task = run.plan.episodes_per_task
    players = run.trained_roles(step)
    roles = [role for role in run.learning_roles(step) if not why_no_refill(run.recipes.of(players[role]))]
    refill = Refill(config.refill, run.state.drawn[step], roles, await compare(first_episodes))

    async def run_drawn(task_ids: Collection[str]) -> list[Episode]:
        progress.further(len(task_ids) * episodes_per_task)
        return await run_tasks(task_ids)

    at_once = max(1, config.episodes_at_once // config.largest_k) if config.mode == "async" else None
    added, late_tasks = await run_refill(refill, first_episodes, run_drawn, compare, at_once, needed)
    run.store.flush()

    n_late = 0
    if late_tasks:
        ended = {episode.id for episode in (*first_episodes, *added)}
        for episode in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
            n_late += episode.task.id in late_tasks and episode.id not in ended
    return RolledOut(
        episodes=[*first_episodes, *added],
        refill=refill,
        refilled=len(added),
        late=n_late,
        late_tasks=sorted(set(late_tasks)),
    )


async def run_refill(
    refill: Refill,
    first_episodes: Sequence[Episode],
    run_drawn: RunTasks,
    compare: Compare,
    at_once: int | None,
    needed: asyncio.Event | None = None,
) -> tuple[list[Episode], list[str]]:
    """Draw tasks until every role has enough groups with different rewards or the budget is spent. Returns the new
    episodes, and the ids of the tasks that did not end in time, whose episodes are cancelled.

    `first_episodes` are the episodes of the step's first tasks. `compare` groups ended episodes, and says which groups
    differ.

    Without `at_once`, all drawn tasks are waited for before more are drawn, so the draws do not depend on time. With
    it, at most `at_once` tasks run at the same time, and the end of each may end the refill. Until training waits for
    this step (`needed`), the refill also waits for running tasks that it no longer requires. Otherwise slow tasks would
    be missing more often than others.
    """
    known_ids = {episode.id for episode in first_episodes}
    added: list[Episode] = []
    running: dict[asyncio.Task[list[Episode]], list[str]] = {}  # the ids of the tasks that each of them runs
    needed = needed or asyncio.Event()
    waiting_for_need = asyncio.ensure_future(needed.wait())

    async def take(ended: Collection[asyncio.Task[list[Episode]]]) -> None:
        """Take the episodes of jobs that have ended, and count the groups that they make."""
        for job in ended:
            task_ids = running.pop(job)
            episodes = job.result()
            new = [episode for episode in episodes if episode.id not in known_ids]
            known_ids.update(episode.id for episode in new)
            added.extend(new)
            refill.ended(task_ids, [episode.id for episode in new], await compare(episodes))

    try:
        while refill.missing:
            running_count = sum(len(task_ids) for task_ids in running.values())
            drawn = refill.more(running_count, at_once)
            # A job of its own for each task, so that the first one to end is seen at once; or one job for all.
            parts = [[task_id] for task_id in drawn] if at_once else [drawn]
            for part in parts:
                if part:
                    running[asyncio.ensure_future(run_drawn(part))] = part
            if not running:
                break  # the budget is spent
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await take(ended)

        while running and not needed.is_set():
            either: set[asyncio.Task[Any]] = {*running, waiting_for_need}
            ended, _ = await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            await take(ended & running.keys())
        late = [task_id for task_ids in running.values() for task_id in task_ids]
        return added, late
    finally:
        waiting_for_need.cancel()
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
