"""The further episodes of a step whose groups have nothing to compare."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import msgspec

from cotune.algorithms.task_signals import GroupSignal
from cotune.records.structs import Episode
from cotune.storage.episode_filters import EpisodeFilters
from cotune.trainer.reporting.progress import Progress
from cotune.trainer.run.run import RolloutRun
from cotune.trainer.schedules.refill import Refill, why_no_refill

RunTasks = Callable[[Collection[str], Mapping[str, int]], Awaitable[list[Episode]]]
"""Runs tasks that were drawn so many times in a step, and returns all of their episodes in the step, old and new."""
Roll = Callable[[Collection[str]], Awaitable[list[Episode]]]
"""Runs tasks as often as the refill has drawn them, and returns all of their episodes in the step, old and new."""
Judge = Callable[[Sequence[Episode]], Awaitable[list[GroupSignal]]]
"""The groups of episodes that have ended."""


class RolledOut(msgspec.Struct, frozen=True, kw_only=True):
    """The episodes of a step, and what its refill has drawn."""

    episodes: Sequence[Episode]
    refill: Refill | None = None
    refilled: int = 0
    """Episodes that the refill has added."""
    late: int = 0
    """Episodes that the refill has begun, and did not wait for."""
    late_tasks: Sequence[str] = ()
    """The tasks of these episodes."""


async def refill_step(
    run: RolloutRun,
    progress: Progress,
    step: int,
    own: Sequence[Episode],
    run_tasks: RunTasks,
    compared: Judge,
    needed: asyncio.Event,
) -> RolledOut:
    """The episodes of a step's own tasks with those of further tasks, drawn until enough groups have different rewards
    or the budget is spent.

    In mode async, late tasks are waited for until the step is `needed`. Their episodes are counted as late.
    """
    config, per_task = run.config, run.plan.episodes_per_task
    players = run.trained_roles(step)
    roles = [role for role in run.learning_roles(step) if not why_no_refill(run.recipes.of(players[role]))]
    refill = Refill(config.refill, run.state.drawn[step], roles, await compared(own))

    async def run_drawn(task_ids: Collection[str]) -> list[Episode]:
        progress.further(len(task_ids) * per_task)
        return await run_tasks(task_ids, refill.times)

    at_once = max(1, config.concurrency // run.plan.k) if config.mode == "async" else None
    added, late_tasks = await run_refill(refill, own, run_drawn, compared, at_once, needed)
    run.store.flush()

    late = 0
    if late_tasks:
        ended = {episode.id for episode in (*own, *added)}
        for episode in run.store.episodes(EpisodeFilters(phase="train", training_step=step)):
            late += episode.task.id in late_tasks and episode.id not in ended
    return RolledOut(
        episodes=[*own, *added],
        refill=refill,
        refilled=len(added),
        late=late,
        late_tasks=sorted(set(late_tasks)),
    )


async def run_refill(
    refill: Refill,
    own: Sequence[Episode],
    roll: Roll,
    judge: Judge,
    at_once: int | None,
    needed: asyncio.Event | None = None,
) -> tuple[list[Episode], list[str]]:
    """Draw tasks until no role lacks groups or the budget is spent. Returns the new episodes, and the tasks that had
    not ended in time: their episodes are cancelled.

    Without `at_once` the tasks that are drawn together are waited for, so that what is drawn does not depend on time.
    With it, so many run at once, and each that ends may be the last that is drawn. Tasks that run at that moment are
    waited for until the step is `needed` for training: to leave them out would leave out slow tasks more often.
    """
    before, added = {episode.id for episode in own}, list[Episode]()
    running: dict[asyncio.Task[list[Episode]], list[str]] = {}
    asked_for: asyncio.Task[Literal[True]] | None = None

    async def take(done: Collection[asyncio.Task[list[Episode]]]) -> None:
        """Add the new episodes of tasks that have ended."""
        for one in done:
            names, episodes = running.pop(one), one.result()
            new = [episode for episode in episodes if episode.id not in before]
            before.update(episode.id for episode in new)
            added.extend(new)
            refill.ended(names, [episode.id for episode in new], await judge(episodes))

    try:
        while refill.missing:
            drawn = refill.more(sum(map(len, running.values())), at_once)
            parts = [[name] for name in drawn] if at_once else [drawn] if drawn else []
            running |= {asyncio.ensure_future(roll(part)): part for part in parts}
            if not running:
                break
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            await take(done)
        asked = needed or asyncio.Event()
        asked_for = asyncio.ensure_future(asked.wait())
        while running and not asked.is_set():
            waiting: set[asyncio.Task[Any]] = {*running, asked_for}
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            await take(done & running.keys())
        return added, [name for names in running.values() for name in names]
    finally:
        if asked_for is not None:
            asked_for.cancel()
        for one in running:
            one.cancel()
        await asyncio.gather(*running, return_exceptions=True)
