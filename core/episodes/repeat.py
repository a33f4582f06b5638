"""Runs a workflow again on a recorded episode."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

from cotune.episodes.workflows import Workflow
from cotune.recording.context import current_episode
from cotune.recording.recorder import Responder
from cotune.replay.responder import ReplayResponder
from cotune.replay.script import Replay


def repeating(workflow: Workflow, replay: Replay, others: Responder | None) -> tuple[Workflow, ReplayResponder]:
    """`workflow`, and the responder of one episode that repeats another; `others` answers new calls.

    The episode fails with ReplayDiverged where it asks something else than is recorded, or less, whatever the
    application makes of that.
    """
    responder = ReplayResponder(replay, others)
    return replace(workflow, fn=_checked(workflow.fn, responder, replay)), responder


def _checked(fn: Callable[[Any], Any], responder: ReplayResponder, replay: Replay) -> Callable[[Any], Any]:
    def begin() -> None:
        live = current_episode.get()
        assert live is not None
        script, until = replay.script, replay.until
        live.tape.give([result for result in script.results if result.started < until])
        if live.chance is not None:
            live.chance.give([read for read in script.reads if read.at < until], script.started)

    async def finish(value: Awaitable[Any]) -> Any:
        try:
            found = await value
        except Exception:
            responder.require_followed()
            raise
        responder.require_complete()
        return found

    async def run_async(task: Any) -> Any:
        begin()
        return await finish(fn(task))

    def run(task: Any) -> Any:
        begin()
        try:
            value = fn(task)
        except Exception:
            responder.require_followed()
            raise
        if inspect.isawaitable(value):
            return finish(value)
        responder.require_complete()
        return value

    return run_async if inspect.iscoroutinefunction(fn) else run
