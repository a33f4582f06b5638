"""Waiting with a limit that holds even where the awaited work does not heed its cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_abandoned: set[asyncio.Task[Any]] = set()


class CancelledByItself(Exception):
    """What was waited for ended as cancelled, though nobody here had cancelled it."""


class Interrupted(Exception):
    """What was waited for is of no more use: the `unless` future came first."""


async def run_with_deadline(
    seconds: float, work: Coroutine[Any, Any, T], unless: asyncio.Future[str] | None = None
) -> T:
    """The result of `work`, which is cancelled, and not waited for any longer, when it is not there in time.

    Raises TimeoutError after `seconds`, Interrupted when `unless` is done first, and what `work` raises;
    CancelledByItself when nobody cancelled it.
    """
    task = asyncio.ensure_future(work)
    waited = {task} if unless is None else {task, unless}
    try:
        await asyncio.wait(waited, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        _abandon(task)
        raise
    if task.cancelled():
        raise CancelledByItself("cancelled by itself")
    if task.done():
        return task.result()
    _abandon(task)
    if unless is not None and unless.done():
        raise Interrupted(unless.result())
    raise TimeoutError


def _abandon(task: asyncio.Task[Any]) -> None:
    """Cancel a task; keep it alive until it ends, and take its error off the loop's hands."""
    task.cancel()
    _abandoned.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()
