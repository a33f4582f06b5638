"""The episodes of a gateway and their calls. Episodes are opened and ended over HTTP, or attached by a workflow."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec

from cotune.errors import RecordError
from cotune.integrations.apps.openai.forms import Form
from cotune.integrations.web.gateway.address import Identity
from cotune.integrations.web.gateway.exchange import Exchange
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.http.bodies import in_thread_if_large
from cotune.integrations.web.http.requests import RequestError, checked_key
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode, Sink
from cotune.recording.redaction import Redaction
from cotune.recording.rewards import reward_records
from cotune.records.structs import Episode, Task
from cotune.records.tasks import task_digest

log = logging.getLogger("cotune.gateway")

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
Rewards = Annotated[dict[Name, float | bool], msgspec.Meta(max_length=1000)]
"""Named numbers; true is 1, and false 0."""
Text = Annotated[str, msgspec.Meta(max_length=1_000_000)]
"""The reasons for rewards."""
IMPLICIT_SECONDS = 600.0
"""Seconds that an implicit episode takes new calls. Then the next one begins, so that the memory of a gateway that runs
for weeks stays bounded."""
IMPLICIT = "implicit"
"""Workflow and task id of calls that name no open episode."""
PAUSE = 300.0
"""Default of the seconds without a call after which an episode ends that the gateway opened itself."""
MOST_OPEN = 10_000
"""Most episodes that may be open at once."""


class OpenEpisode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /cotune/episodes."""

    task: Any
    workflow: Name = "gateway"
    rollout: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] = 0
    phase: Name = "trace"
    training_step: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None = None
    key: str = ""
    """The application's own key for the episode, which rewards may refer to."""


class EndEpisode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /cotune/episodes/{id}/end."""

    rewards: Rewards = {}
    feedback: Text = ""
    metrics: Rewards = {}
    status: Literal["ok", "error", "cancelled"] = "ok"
    error: Annotated[str, msgspec.Meta(max_length=10_000)] | None = None


@dataclass(eq=False)
class _OpenedEpisode:
    """An open episode and its calls in flight."""

    live: LiveEpisode
    attached: bool = False
    """Whether a workflow has opened it and will end it."""
    key: Hashable | None = None
    """The key of a session, which is an episode that the gateway opened itself; None for other episodes."""
    exchanges: set[Exchange] = field(default_factory=set)
    timer: asyncio.TimerHandle | None = None
    """Ends a session that is idle."""


class Episodes:
    """The open episodes of a gateway, by id. Use it on the gateway's event loop only.

    Without a `sink`, as inside a workflow's process, episodes can only be attached, and other calls are not recorded.
    """

    def __init__(self, sink: Sink | None, config: GatewayConfig) -> None:
        """The open episodes of a gateway. Without a `sink`, only calls of episodes that a run opened are recorded."""
        self.sink = sink
        self.config = config
        self.open: dict[str, _OpenedEpisode] = {}
        self.counts: Counter[str] = Counter()
        """Numbers of recorded calls, `unattributed` calls, rewards, and ended episodes by status."""
        self.failures: Counter[str] = Counter()
        """Failed calls, by status."""
        self.warnings: Counter[str] = Counter()
        self._sessions: dict[Hashable, _OpenedEpisode] = {}
        self._ended_attached: dict[str, None] = {}
        """Latest ended episodes that were attached. Policies may have answered their calls, so a late call must be
        refused, not sent to the provider."""

    def live(self, episode_id: str | None) -> LiveEpisode | None:
        """An open episode; None if no episode with this id is open."""
        opened = self.open.get(episode_id or "")
        return None if opened is None else opened.live

    def start(self, options: OpenEpisode, task: Task) -> LiveEpisode:
        """Open an episode of a task. Raises RequestError if too many are open, or if this gateway does not record."""
        if self.sink is None:
            raise RequestError(404, "The workflow that runs here opens its episodes itself.", code="not_recording")
        checked_key(options.key)
        if len(self.open) >= MOST_OPEN:
            text = f"{MOST_OPEN} episodes are open: end some first."
            raise RequestError(429, text, code="too_many_episodes", headers={"retry-after": "1"})
        return self._open_new(task, options).live

    def attach(self, episode: LiveEpisode) -> None:
        """Accept calls of an episode that a workflow opened and will end."""
        self.open[episode.id] = _OpenedEpisode(episode, attached=True)

    async def detach(self, episode_id: str) -> None:
        """End the answered calls of an attached episode, and accept no more calls of it."""
        await self._end_answered_calls(episode_id)
        if self.open.pop(episode_id, None) is not None:
            self._ended_attached[episode_id] = None
            if len(self._ended_attached) > MOST_OPEN:
                del self._ended_attached[next(iter(self._ended_attached))]

    async def end(self, episode_id: str, ending: EndEpisode) -> Episode:
        """End an open episode. Raises RequestError (404, 409) if it is not open here."""
        if (opened := self.open.get(episode_id)) is not None and opened.attached:
            raise RequestError(409, "The workflow that opened this episode ends it.", code="attached")
        await self._end_answered_calls(episode_id)
        if episode_id not in self.open:
            raise RequestError(404, f"No episode {episode_id} is open.", param="id", code="unknown_episode")
        episode = self._remove(episode_id)
        # In a thread: it may wait for large calls that are being recorded.
        record = await asyncio.to_thread(_end_episode, episode, ending)
        self._count_episode(episode, ending)
        return record

    def reward(self, target: str, rewards: Mapping[str, float], feedback: str = "") -> None:
        """Record rewards of an episode or a candidate, with their reasons, before or after the end of the episode."""
        if self.sink is None:
            raise RequestError(404, "The workflow that runs here rewards its episodes itself.", code="not_recording")
        redaction = Redaction(self.config.redactors) if self.config.redactors else None
        numbers = {name: float(value) for name, value in rewards.items()}
        self.sink.write(reward_records(target, numbers, feedback, redaction=redaction))
        self.counts["rewards"] += len(rewards)

    async def exchange(
        self, who: Identity, form: Form, body: dict[str, Any], session: tuple[Hashable, str] | None, size: int
    ) -> Exchange | None:
        """Start the call of a request in its episode, and return its exchange; None if the call cannot be recorded.

        `session` is the key and the id of the task of an episode, for a request that names no episode. If the call
        begins this episode, the episode gets the application's key from the call. The request has `size` bytes. Raises
        RequestError (409) if the episode has ended.
        """
        if session and self.sink is not None:
            session_key, task = session
            opened: _OpenedEpisode | None = self._use_session(session_key, task, episode_key=who.key)
        else:
            opened = self._episode_of_call(who)
        if opened is None:
            return None
        call = await in_thread_if_large(
            size,
            functools.partial(_start_call, opened.live, who, form, body),
            undo=lambda call: call.fail("cancelled", "the request ended before its call had started"),
        )
        on_end = functools.partial(self._call_ended, opened)
        exchange = Exchange(call, form, body, size, self.config.limits, on_end)
        # The episode may have ended while the call was started in a thread.
        if opened.live.id not in self.open:
            await exchange.fail("cancelled", "the episode ended before the call did")
            raise RequestError(409, f"The episode {opened.live.id} has ended.", code="episode_ended")
        opened.exchanges.add(exchange)
        return exchange

    def health(self) -> dict[str, Any]:
        """Counts of open and ended episodes and calls."""
        warnings = self.warnings.copy()
        failures = self.failures.copy()
        for opened in self.open.values():
            warnings.update(opened.live.warnings)
            failures.update(opened.live.failures)
        health: dict[str, Any] = {
            "open_episodes": len(self.open),
            "open_calls": sum(len(opened.exchanges) for opened in self.open.values()),
            "records": dict(self.counts),
            "failures": dict(failures),
            "warnings": dict(warnings),
        }
        if self.config.prompts is not None:
            health["prompts"] = self.config.prompts.id
        return health

    async def close(self) -> None:
        """End all open episodes. Episodes that were opened over HTTP end as cancelled."""
        stopped = EndEpisode(status="cancelled", error="the gateway stopped before the episode ended")
        for episode_id, opened in list(self.open.items()):
            if opened.attached:
                await self.detach(episode_id)
            else:
                # A session may end by itself meanwhile.
                with contextlib.suppress(RequestError):
                    await self.end(episode_id, stopped if opened.key is None else EndEpisode())

    def warn(self, kind: str, text: str) -> None:
        """Count a warning; each kind is logged once."""
        self.warnings[kind] += 1
        if self.warnings[kind] == 1:
            log.warning("%s", text)

    def _episode_of_call(self, who: Identity) -> _OpenedEpisode | None:
        """The episode that records a call; None if it is not recorded.

        A call that names no open episode gets an implicit one, and is counted. Raises RequestError (409) if its episode
        has ended.
        """
        if who.episode is not None and who.episode in self.open:
            return self.open[who.episode]
        if who.episode in self._ended_attached:
            raise RequestError(409, f"The episode {who.episode} has ended.", code="episode_ended")
        self.counts["unattributed"] += 1
        effect = "It is not recorded." if self.sink is None else "It is recorded under an implicit episode."
        if who.episode is not None:
            self.warn("late_call", f"A call names the episode {who.episode}, which is not open. {effect}")
        else:
            self.warn("no_episode", f"A call names no episode. {effect}")
        if self.sink is None:
            return None
        period = time.monotonic() // IMPLICIT_SECONDS
        return self._use_session((IMPLICIT, period), task=None)

    def _open_new(self, task: Task, options: OpenEpisode) -> _OpenedEpisode:
        """Open an episode for a task, with the settings of the gateway."""
        assert self.sink is not None
        episode = LiveEpisode(
            self.sink,
            task,
            workflow=options.workflow,
            rollout=options.rollout,
            phase=options.phase,
            training_step=options.training_step,
            redactors=self.config.redactors,
            roles=self.config.roles,
            prompts=self.config.prompts,
            app=self.config.app,
            key=options.key,
        )
        self.open[episode.id] = _OpenedEpisode(episode)
        return self.open[episode.id]

    async def _end_answered_calls(self, episode_id: str) -> None:
        """End the answered calls of an episode one by one, so that other requests run meanwhile. Calls without an
        answer end with the episode."""
        opened = self.open.get(episode_id)
        if opened is not None:
            for exchange in list(opened.exchanges):
                await exchange.end_if_complete()

    def _remove(self, episode_id: str) -> LiveEpisode:
        """Remove an episode from the open ones, and return it to be ended. No further calls are recorded in it."""
        opened = self.open.pop(episode_id)
        is_session = opened.key is not None
        if is_session:
            del self._sessions[opened.key]
            _stop_timer(opened)
        # Calls in flight end with the episode, so they are counted here instead of in `_call_ended`.
        self.counts["calls"] += len(opened.exchanges)
        opened.exchanges.clear()
        return opened.live

    def _count_episode(self, episode: LiveEpisode, ending: EndEpisode) -> None:
        self.warnings.update(episode.warnings)
        self.failures.update(episode.failures)
        self.counts[f"episodes_{ending.status}"] += 1

    def _call_ended(self, opened: _OpenedEpisode, exchange: Exchange) -> None:
        """Remove a call from its episode. After its last call, a session is idle until the next one."""
        if exchange in opened.exchanges:
            opened.exchanges.discard(exchange)
            self.counts["calls"] += 1
            if not opened.exchanges and opened.live.id in self.open and opened.key is not None:
                self._restart_timer(opened)

    def _use_session(self, key: Hashable, task: str | None, episode_key: str = "") -> _OpenedEpisode:
        """Find or open the session with this key: an episode that the gateway opens for a request and ends by itself.

        A new session is for the task with the id `task`, and has the application's key `episode_key`. Without a task,
        it is an implicit episode, which is opened even beyond the limit of open episodes. Each use starts the time
        again after which an idle session ends.
        """
        session = self._sessions.get(key)
        if session is None:
            if task is not None:
                options = OpenEpisode(task={"id": task}, key=episode_key)
                episode = self.start(options, task_of(options.task))
                session = self.open[episode.id]
            else:
                options = OpenEpisode(task=None, workflow=IMPLICIT)
                session = self._open_new(Task(id=IMPLICIT, input=None), options)
            self._sessions[key] = session
            session.key = key
            if isinstance(key, asyncio.Future):
                key.add_done_callback(functools.partial(self._end_if_idle, session))
        self._restart_timer(session)
        return session

    def _restart_timer(self, session: _OpenedEpisode) -> None:
        """Start the time again after which the session ends if it is idle.

        A session for each connection ends with its connection. It has a time limit only if the user has set one. Its
        key is a future that is done when the connection is closed.
        """
        _stop_timer(session)
        idle_seconds = self.config.split.idle
        if isinstance(session.key, asyncio.Future):
            connection_closed = session.key.done()
            if connection_closed:
                self._end_if_idle(session)
            if connection_closed or idle_seconds is None:
                return
        session.timer = asyncio.get_running_loop().call_later(idle_seconds or PAUSE, self._end_if_idle, session)

    def _end_if_idle(self, opened: _OpenedEpisode, closed_connection: object = None) -> None:
        """End a session that has no call in flight. A call in flight calls this again when it ends, by its timer.

        `closed_connection` is not used: the callback of a connection's future passes the future.
        """
        if opened.live.id in self.open and not opened.exchanges:
            episode = self._remove(opened.live.id)
            _end_episode(episode, EndEpisode())
            self._count_episode(episode, EndEpisode())


def _stop_timer(opened: _OpenedEpisode) -> None:
    if opened.timer is not None:
        opened.timer.cancel()
        opened.timer = None


def task_of(value: Any) -> Task:
    """The task of a JSON value. Its id is the `id` of an object, else a digest of the value."""
    if isinstance(value, Mapping) and value.get("id") is not None:
        return Task(id=str(value["id"]), input=value)
    return Task(id=task_digest(value), input=value)


def _end_episode(episode: LiveEpisode, ending: EndEpisode) -> Episode:
    rewards = {name: float(value) for name, value in ending.rewards.items()}
    metrics = {name: float(value) for name, value in ending.metrics.items()}
    return episode.end(ending.status, rewards=rewards, metrics=metrics, feedback=ending.feedback, error=ending.error)


def _start_call(episode: LiveEpisode, who: Identity, form: Form, body: dict[str, Any]) -> LiveCall:
    """Start the call of a request. Raises RequestError if it cannot be read, or if the episode has ended."""
    caller = CallerContext(who.role, "gateway", read=who.parents, given=who.named)
    try:
        chat, unsupported_reason = form.read(body, episode)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RecursionError) as error:
        raise RequestError(400, f"The request cannot be read: {error}.", code="invalid_value") from None
    try:
        call = episode.start(caller, chat)
    except RecordError as error:
        raise RequestError(409, str(error), code="episode_ended") from None
    # Later calls name this call as their parent by its id.
    call.caller.output = call.id
    call.unsupported_reason = unsupported_reason
    return call
