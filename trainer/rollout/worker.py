"""What runs in a rollout worker's process: the application's episodes on an event loop of their own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import inspect
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from cotune.context import current_episode
from cotune.errors import WorkflowError
from cotune.recording.episodes import activators, run_episode
from cotune.recording.recorder import LiveEpisode
from cotune.recording.records import Record
from cotune.sampling.protocol import ChatFormat
from cotune.sampling.responder import PolicyResponder
from cotune.trainer.rollout.process_reaper import kill_leftovers, leftovers, resident_mb, start_guard
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult, Heartbeat, Setup, Started, pack
from cotune.workflows import Workflow

log = logging.getLogger("cotune")

_TICK_SECONDS = 0.2
_BUSY_SECONDS = 1.0
"""From here on a loop that does not come round is looked into."""


class RolloutWorker:
    """Runs episodes; hosted by a `RayProcess`, whose own event loop the application never blocks.

    Nothing is imported of the application, and no thread started, before `start`.
    """

    def __init__(self) -> None:
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._live, name="cotune-episodes", daemon=True)
        self._running: dict[str, _Running] = {}
        self._inside: set[LiveEpisode] = set()
        """Episodes whose workflow is a plain function, while it runs: at a time-out it goes on in its thread."""
        self._ticked = time.monotonic()
        self._setup: Setup | None = None
        self._workflow: Workflow | None = None
        self._chat: ChatFormat | None = None
        self._guard = 0

    async def start(self, setup: Setup) -> Started:
        """Import the application and load the chat template. Raises ConfigError, WorkflowError."""
        return await asyncio.to_thread(self._start, setup)

    async def run(self, order: EpisodeRequest) -> EpisodeResult:
        """Run one episode to its end; one that fails or is cancelled has records too."""
        running = self._running[order.id] = _Running(order)
        self._loop.call_soon_threadsafe(self._begin, running)
        try:
            return await asyncio.wrap_future(running.reply)
        finally:
            del self._running[order.id]

    async def cancel(self, order: str) -> None:
        """Cancel an episode, if it runs here; `run` returns what it has recorded."""
        if (running := self._running.get(order)) is not None:
            self._loop.call_soon_threadsafe(running.cancel)

    async def pulse(self) -> Heartbeat:
        """How this process is. Answered whatever the application does, short of holding the interpreter lock."""
        blocked = time.monotonic() - self._ticked - _TICK_SECONDS
        culprit, where = self._holding_up() if blocked > _BUSY_SECONDS else (None, "")
        return Heartbeat(
            blocked=max(blocked, 0.0),
            culprit=culprit,
            where=where,
            resident_mb=resident_mb(),
            threads=threading.active_count(),
            processes=len(leftovers(self._setup.mark, os.getpid())) - 1,
            overdue=sum(live.ended for live in list(self._inside)),
        )

    async def close(self) -> int:
        """Kill every process that the application has left; return how many. The worker is of no use afterwards."""
        killed = await asyncio.to_thread(kill_leftovers, self._setup.mark, os.getpid(), os.getpid())
        with contextlib.suppress(OSError):
            os.kill(self._guard, 9)
        return killed

    def _start(self, setup: Setup) -> Started:
        self._setup = setup
        with contextlib.suppress(OSError):  # Ray's newer versions have done it
            os.setpgid(0, 0)
        self._guard = start_guard(setup.mark)
        workflow = setup.app.load()
        for activate in activators:  # here, where what it imports is on no episode's time
            activate()
        self._workflow = dataclasses.replace(workflow, fn=self._noted(workflow.fn))
        if setup.sampler is not None:
            from cotune.integrations.chat.template import ChatTemplate

            self._chat = ChatTemplate.load_light(setup.model, setup.tool_format)
        self._ticked = time.monotonic()
        self._thread.start()
        return Started(
            workflow=workflow.name,
            scorers=tuple(sorted(workflow.scorers)),
            redactors=len(workflow.redactors),
            resident_mb=resident_mb(),
            torch="torch" in sys.modules,
        )

    def _live(self) -> None:
        asyncio.set_event_loop(self._loop)
        ticking = self._loop.create_task(self._tick())
        while not ticking.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:  # of a task of the application's, whose awaiter has it too
                log.warning("The application raised %r; its worker goes on.", error)

    async def _tick(self) -> None:
        while True:
            self._ticked = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)

    def _begin(self, running: _Running) -> None:
        running.task = self._loop.create_task(self._episode(running))

    async def _episode(self, running: _Running) -> None:
        order, sink, responder = running.order, _Records(), self._responder(running.order)
        episode = asyncio.ensure_future(
            run_episode(
                self._workflow,
                order.task,
                sink=sink,
                responder=responder,
                phase=order.phase,
                training_step=order.training_step,
                rollout=order.rollout,
                timeout=order.timeout,
            )
        )
        try:
            await asyncio.wait({episode})
        except asyncio.CancelledError:
            episode.cancel()
            await asyncio.wait({episode})
        if not episode.cancelled() and (error := episode.exception()) is not None:
            running.reply.set_exception(
                WorkflowError(f"The episode could not be run: {type(error).__name__}: {error}", "Report it.")
            )
            return
        records, lost = pack(sink.records)
        running.reply.set_result(
            EpisodeResult(
                records=records,
                lost=lost,
                scorer_errors=dict(responder.scorer_errors) if responder else {},
                passed_through=dict(responder.passed_through) if responder else {},
                unlisted=dict(responder.unlisted) if responder else {},
            )
        )

    def _responder(self, order: EpisodeRequest) -> PolicyResponder | None:
        """Each episode has its own: what it counts belongs to the episode."""
        if order.responder is None:
            return None
        return order.responder.responder(self._setup.sampler, self._chat, self._workflow)

    def _holding_up(self) -> tuple[str | None, str]:
        """The order whose code the episodes' thread is in, and where that is."""
        frame = inner = sys._current_frames().get(self._thread.ident or 0)
        if inner is None:
            return None, "a thread that has ended"
        where = f"{inner.f_code.co_filename}:{inner.f_lineno} in {inner.f_code.co_name}"
        while frame is not None and frame.f_code is not asyncio.Handle._run.__code__:
            frame = frame.f_back
        context = getattr(frame.f_locals.get("self"), "_context", None) if frame is not None else None
        live: LiveEpisode | None = context.get(current_episode) if context is not None else None
        found = [r.order.id for r in list(self._running.values()) if live is not None and r.order.task is live.task]
        return (found[0] if found else None), where

    def _noted(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """`fn`; a plain function's episode is in `_inside` while it runs."""
        if inspect.iscoroutinefunction(fn):
            return fn

        def call(task: Any) -> Any:
            live = current_episode.get()
            self._inside.add(live)
            try:
                return fn(task)
            finally:
                self._inside.discard(live)

        return call


class _Running:
    """An episode that this worker runs. `task` is set and cancelled on the episodes' loop."""

    def __init__(self, order: EpisodeRequest) -> None:
        self.order = order
        self.reply: Future[EpisodeResult] = Future()
        self.task: asyncio.Task[None] | None = None

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()


class _Records:
    """The sink of one episode."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def write(self, records: Sequence[Record]) -> None:
        self.records.extend(records)
