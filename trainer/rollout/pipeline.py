"""Rolls out the steps of a run in order, some of them ahead of training."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Generic, TypeVar

Rolled = TypeVar("Rolled")


class RolloutPipeline(Generic[Rolled]):
    """Rolls out one step after the other, while training uses the results.

    Step s + `ahead` starts at the earliest when training asks for step s. So its samples are drawn by policies that are
    at most `ahead` updates behind the ones that train on them.
    """

    def __init__(
        self, roll_out: Callable[[int, asyncio.Event], Awaitable[Rolled]], *, steps: int, ahead: int = 0
    ) -> None:
        """Prepare the pipeline for `steps` steps. Nothing runs before `episodes_of`.

        `roll_out` takes the number of a step, and an event that is set once training waits for this step. It returns
        the samples of the step.
        """
        self._roll_out = roll_out
        self._steps = steps
        self._ahead = ahead
        self._tasks: dict[int, asyncio.Task[Rolled]] = {}
        self._needed: defaultdict[int, asyncio.Event] = defaultdict(asyncio.Event)

    async def __aenter__(self) -> RolloutPipeline[Rolled]:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.cancel()

    async def episodes_of(self, step: int) -> Rolled:
        """Wait for the samples of `step` and return them. Starts its rollout and the rollouts of the `ahead` steps
        after it, unless they have started. Cancelling this cancels the rollout of `step`."""
        self._needed[step].set()
        for next_step in range(step, min(step + self._ahead + 1, self._steps)):
            if next_step not in self._tasks:
                previous = self._tasks.get(next_step - 1)
                self._tasks[next_step] = asyncio.create_task(self._roll_out_after(previous, next_step))
        try:
            return await self._tasks[step]
        finally:
            # Forget the step before. The task of this step stays until then, because the next rollout waits for it.
            self._tasks.pop(step - 1, None)
            self._needed.pop(step - 1, None)

    async def cancel(self) -> None:
        """Cancel all running rollouts. Finished episodes stay recorded."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        self._needed.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _roll_out_after(self, previous: asyncio.Task[Rolled] | None, step: int) -> Rolled:
        """Roll out a step when the previous one has ended."""
        if previous is not None:
            await previous
        return await self._roll_out(step, self._needed[step])
