"""The program of a rollout worker's process: it runs the application's episodes on a separate event loop."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cotune.episodes.episode import Outcome, run_episode
from cotune.episodes.rollout import repeat_episode
from cotune.episodes.workflows import Workflow
from cotune.recording.context import current_episode
from cotune.recording.hooks import hooks
from cotune.recording.recorder import LiveEpisode, Responder
from cotune.records.structs import Record
from cotune.records.wire import pack
from cotune.runtime.loop_watch import running_context
from cotune.runtime.run_context import RunContext, current_run
from cotune.runtime.thread_frames import thread_frame
from cotune.runtime.user_code import thread_place
from cotune.sampling.protocol import ChatFormats, Sampler
from cotune.trainer.rollout.process_reaper import start_reaper
from cotune.trainer.rollout.wire import EpisodeRequest, EpisodeResult, Heartbeat, Setup, Started

log = logging.getLogger("cotune")

_TICK_SECONDS = 0.2
_BLOCKED_SECONDS = 1.0
"""A loop that does not answer for this long counts as blocked."""


class RolloutWorker:
    """Runs episodes. It is hosted by a `RayProcess`, whose event loop the application never blocks.

    Before `start`, nothing of the application is imported and no thread is started.
    """

    def __init__(self) -> None:
        """Prepare the thread and the event loop of episodes; `start` starts them."""
        self._loop = asyncio.SelectorEventLoop()
        self._thread = threading.Thread(target=self._run_loop, name="cotune-episodes", daemon=True)
        self._episodes: dict[str, asyncio.Future[Outcome]] = {}
        """The running episodes by the id of the request. Used only on the episodes' loop."""
        self._in_plain_functions: set[LiveEpisode] = set()
        """Episodes whose workflow is a plain function that is running. It runs on in its thread after a time-out."""
        self._last_tick = time.monotonic()
        """When the episodes' loop last ran `_tick`."""
        self._workflow: Workflow
        self._sampler: Sampler
        self._chats: ChatFormats
        self._run_folder: Path | None = None

    async def start(self, setup: Setup) -> Started:
        """Import the application and load the chat template. Raises ConfigError, WorkflowError."""
        return await asyncio.to_thread(self._start, setup)

    async def run(self, request: EpisodeRequest) -> EpisodeResult:
        """Run one episode to its end, and return its records, also if it fails or is cancelled."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._episode(request), self._loop))

    async def cancel(self, request_id: str) -> None:
        """Cancel an episode, if this worker runs it; `run` returns its records."""
        asyncio.run_coroutine_threadsafe(self._cancel(request_id), self._loop)

    async def heartbeat(self) -> Heartbeat:
        """Return how long the event loop of episodes has been blocked, the episode that blocks it, and the number of
        episodes whose code still runs after their end.

        It runs in another thread than the episodes, so only code that holds the interpreter lock can delay the answer.
        """
        blocked_seconds = time.monotonic() - self._last_tick - _TICK_SECONDS
        # Episodes that have ended, for example by a time-out, while their plain function still runs: a thread cannot be
        # stopped from outside.
        overdue = sum(live.ended for live in list(self._in_plain_functions))
        if blocked_seconds < _BLOCKED_SECONDS:
            return Heartbeat(overdue=overdue)
        # The stack of the loop's thread shows which episode blocks it.
        frame = thread_frame(self._thread.ident)
        context = running_context(frame)
        culprit = context.get(current_run, RunContext()).request if context else None
        return Heartbeat(blocked=blocked_seconds, culprit=culprit or None, where=thread_place(frame), overdue=overdue)

    def _start(self, setup: Setup) -> Started:
        """Import the application, load the chat formats and start the thread of episodes. Returns facts of the
        workflow, so that the driver can compare it with its own."""
        start_reaper()  # first: the import of the application may start processes
        workflow = setup.app.load()
        # Activate integrations now: their imports take time, which would count as the time of the first episode.
        for activate in hooks.activators:
            activate()
        self._workflow = dataclasses.replace(workflow, fn=self._tracked(workflow.fn))
        if setup.sampler is not None:
            from cotune.integrations.models.chat.formats import load_formats, without_torch

            self._sampler = setup.sampler
            with without_torch(setup.tool_formats):
                self._chats = load_formats(setup.bases, setup.tool_formats)
        self._run_folder = Path(setup.run_folder) if setup.run_folder else None
        self._last_tick = time.monotonic()  # the imports above have not blocked the loop, which starts now
        self._thread.start()
        return Started(
            workflow=workflow.name, scorers=tuple(sorted(workflow.scorers)), redactors=len(workflow.redactors)
        )

    def _run_loop(self) -> None:
        """Run the event loop of episodes in its thread. If the application stops it by SystemExit or KeyboardInterrupt,
        run it again."""
        asyncio.set_event_loop(self._loop)
        ticking = self._loop.create_task(self._tick())
        while not ticking.done():
            try:
                self._loop.run_forever()
            except (SystemExit, KeyboardInterrupt) as error:
                # A task of the application raised it. The code that awaits this task gets the error too.
                log.warning("The application raised %r; its worker continues.", error)

    async def _tick(self) -> None:
        """Note again and again that the loop is not blocked."""
        while True:
            self._last_tick = time.monotonic()
            await asyncio.sleep(_TICK_SECONDS)

    async def _cancel(self, request_id: str) -> None:
        """Cancel an episode on its loop, if it has not ended."""
        episode = self._episodes.get(request_id)
        if episode is not None:
            episode.cancel()

    async def _episode(self, request: EpisodeRequest) -> EpisodeResult:
        """Run one episode on the episodes' loop and pack its records."""
        current_run.set(RunContext(folder=self._run_folder, request=request.id))
        sink = _Records()
        policy_responder = None
        if request.responder is not None:
            # Each episode has its own responder, so that it has its own counts.
            policy_responder = request.responder.responder(self._sampler, self._chats, self._workflow)
        workflow: Workflow = self._workflow
        responder: Responder | None = policy_responder
        if request.replay is not None:
            workflow, responder = repeat_episode(workflow, request.replay, policy_responder)
        episode = asyncio.ensure_future(
            run_episode(workflow, request.task, sink=sink, responder=responder, options=request.options)
        )
        self._episodes[request.id] = episode
        # Unlike `await episode`, this raises nothing if the episode is cancelled: its records are returned too.
        await asyncio.wait({episode})
        del self._episodes[request.id]
        if not episode.cancelled():
            episode.result()  # raises errors of cotune; errors of the application are in the records
        records, lost = pack(sink)
        return EpisodeResult(
            records=records,
            lost=lost,
            scorer_errors=dict(policy_responder.scorer_errors) if policy_responder else {},
            unlisted=dict(policy_responder.unlisted) if policy_responder else {},
        )

    def _tracked(self, fn: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return a plain function so that its episode is in `_in_plain_functions` while it runs. A coroutine function
        is returned as it is."""
        if inspect.iscoroutinefunction(fn):
            return fn

        def call(task: Any) -> Any:
            """Run the function as part of its episode."""
            live = current_episode.get()
            assert live is not None
            self._in_plain_functions.add(live)
            try:
                return fn(task)
            finally:
                self._in_plain_functions.discard(live)

        return call


class _Records(list[Record]):
    """The sink of one episode."""

    write = list.extend
