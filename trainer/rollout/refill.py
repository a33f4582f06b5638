"""The further episodes of a step whose groups have nothing to compare."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Any, Literal

import msgspec

from cotune.algorithms.task_signals import GroupSignal
from cotune.records.structs import Episode
from cotune.trainer.schedules.refill import Refill

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
