"""Refill: further episodes for a step if the rewards of some groups do not differ."""

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
"""A function that runs tasks in a step, by their ids. It returns all of their episodes in the step, also recorded
ones."""
Compare = Callable[[Sequence[Episode]], Awaitable[list[GroupSignal]]]
"""A function that groups episodes that have ended, and says of each group whether its rewards differ."""


class RolledOut(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of a step, and the tasks and episodes of its refill."""

    episodes: Sequence[Episode]
    refill: Refill | None = None
    refilled: int = 0
    """The number of episodes that the refill has added."""
    late: int = 0
    """The number of episodes that the refill has begun and did not wait for."""
    late_tasks: Sequence[str] = ()
    """The ids of the tasks of late episodes."""
    fork_effects: Mapping[Place, float] = {}
    """The effects of places that were used to choose the calls to fork."""


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

    In mode async, the refill waits for running tasks only until training waits for the step (`needed`). The episodes of
    tasks that then still run are counted as late.
    """
    config = run.config
    episodes_per_task = run.plan.episodes_per_task
    policy_of_role = run.trained_roles(step)
    # Only roles whose recipe compares the rewards of a group gain from further groups.
    roles = [role for role in run.learning_roles(step) if not why_no_refill(run.recipes.of(policy_of_role[role]))]
    refill = Refill(config.refill, run.state.drawn[step], roles, await compare(first_episodes))

    async def run_drawn(task_ids: Collection[str]) -> list[Episode]:
        progress.further(len(task_ids) * episodes_per_task)
        return await run_tasks(task_ids)

    at_once: int | None = None
    if config.mode == "async":
        at_once = max(1, config.episodes_at_once // config.largest_k)
    added, late_tasks = await run_refill(refill, first_episodes, run_drawn, compare, at_once, needed)
    run.store.flush()

    # The late tasks were cancelled, but the store has the episodes that they had begun.
    late_episodes = 0
    if late_tasks:
        ended_ids = {episode.id for episode in (*first_episodes, *added)}
        for episode in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
            if episode.task.id in late_tasks and episode.id not in ended_ids:
                late_episodes += 1
    return RolledOut(
        episodes=[*first_episodes, *added],
        refill=refill,
        refilled=len(added),
        late=late_episodes,
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

    `first_episodes` are the episodes of the step's first tasks. Without `at_once`, all drawn tasks must end before more
    are drawn, so the draws do not depend on time. With it, at most `at_once` tasks run at the same time, and the refill
    may be complete whenever one of them ends. Until training waits for this step (`needed`), the refill also waits for
    running tasks that it no longer needs. Otherwise slow tasks would be missing more often than others.
    """
    known_ids = {episode.id for episode in first_episodes}
    added: list[Episode] = []
    running: dict[asyncio.Task[list[Episode]], list[str]] = {}  # jobs, with the ids of the tasks that each runs
    needed = needed or asyncio.Event()
    waiting_for_need = asyncio.ensure_future(needed.wait())

    async def take_episodes(ended: Collection[asyncio.Task[list[Episode]]]) -> None:
        """Take the episodes of jobs that have ended, and count the groups that they make."""
        for job in ended:
            task_ids = running.pop(job)
            episodes = job.result()
            new = [episode for episode in episodes if episode.id not in known_ids]
            known_ids.update(episode.id for episode in new)
            added.extend(new)
            refill.ended(task_ids, [episode.id for episode in new], await compare(episodes))

    try:
        # 1. Draw and run tasks until no useful group is missing.
        while refill.missing:
            running_count = sum(len(task_ids) for task_ids in running.values())
            drawn = refill.more(running_count, at_once)
            # One job for all tasks, or with `at_once` a job for each task, to see at once when it ends.
            tasks_of_jobs = [drawn] if drawn else []
            if at_once:
                tasks_of_jobs = [[task_id] for task_id in drawn]
            for task_ids in tasks_of_jobs:
                running[asyncio.ensure_future(run_drawn(task_ids))] = task_ids
            if not running:
                break  # the budget is spent
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await take_episodes(ended)

        # 2. Wait for running tasks until training waits for this step.
        while running and not needed.is_set():
            awaited: set[asyncio.Task[Any]] = {*running, waiting_for_need}
            ended, _ = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            await take_episodes(ended & running.keys())
        return added, [task_id for task_ids in running.values() for task_id in task_ids]
    finally:
        waiting_for_need.cancel()
        for job in running:
            job.cancel()
        await asyncio.gather(*running, return_exceptions=True)
