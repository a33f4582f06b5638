"""Episodes of the coming steps: rolled out when they are asked for, or up to `ahead` steps before."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType

from cotune.recording.records import Episode


class RolloutPipeline:
    """Rolls out one step after the other; the step in hand may be trained meanwhile.

    `roll_out` gives the episodes of a step. Step s + `ahead` starts when step s is asked for at the earliest, so its
    policies are at most `ahead` updates behind those that train on it.
    """

    def __init__(self, roll_out: Callable[[int], Awaitable[list[Episode]]], *, steps: int, ahead: int = 0) -> None:
        self._roll_out = roll_out
        self._steps = steps
        self._ahead = ahead
        self._tasks: dict[int, asyncio.Task[list[Episode]]] = {}

    async def __aenter__(self) -> RolloutPipeline:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    async def episodes_of(self, step: int) -> list[Episode]:
        """The episodes of `step`. Cancelling this cancels their rollout."""
        for coming in range(step, min(step + self._ahead + 1, self._steps)):
            if coming not in self._tasks:
                self._tasks[coming] = asyncio.create_task(self._after(self._tasks.get(coming - 1), coming))
        try:
            return await self._tasks[step]
        finally:
            self._tasks.pop(step - 1, None)

    async def cancel(self) -> None:
        """Stop whatever is under way; episodes that have finished stay recorded."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _after(self, before: asyncio.Task[list[Episode]] | None, step: int) -> list[Episode]:
        if before is not None:
            await before
        return await self._roll_out(step)
