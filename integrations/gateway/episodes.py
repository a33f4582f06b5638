"""The episodes of a gateway, opened and ended over HTTP or attached by a workflow, and the calls of each."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from cotune.errors import RecordError
from cotune.ids import message_id
from cotune.integrations.gateway.address import Identity
from cotune.integrations.gateway.exchange import Exchange
from cotune.integrations.gateway.requests import chat_of
from cotune.integrations.gateway.sessions import Sessions, Split
from cotune.integrations.http.requests import RequestError
from cotune.integrations.openai.forms import Form
from cotune.recording.pending_call import CallerContext
from cotune.recording.recorder import LiveEpisode, Sink
from cotune.recording.records import Episode, EpisodeStatus, Reward, Task
from cotune.recording.redaction import Redactor
from cotune.recording.role_functions import RolesFunction

log = logging.getLogger("cotune.gateway")

IMPLICIT_SECONDS = 600.0
"""How long an implicit episode takes new calls; then the next one does, so that a gateway that runs for weeks stays
small."""
IMPLICIT = "implicit"
"""Workflow and task id of calls that name no open episode."""


class Episodes:
    """Open episodes by id, and the exchanges of each. All on the gateway's event loop.

    Without a `sink`, as inside a workflow's process, episodes can only be attached and other calls are not recorded.
    """

    def __init__(
        self,
        sink: Sink | None,
        *,
        limit: int = 10_000,
        redactors: Sequence[Redactor] = (),
        roles: RolesFunction | None = None,
        split: Split | None = None,
    ) -> None:
        self.sink = sink
        self.roles = roles
        self.split = split or Split()
        """How calls that name no episode are divided into episodes."""
        self._sessions = Sessions(self.split, self._begin, self._finish, lambda episode: episode in self._exchanges)
        self.redactors = redactors
        self.limit = limit
        self.open: dict[str, LiveEpisode] = {}
        self.counts: Counter[str] = Counter()
        """Calls recorded, `unattributed` calls, rewards, and episodes by how they ended."""
        self.failures: Counter[str] = Counter()
        """Calls that did not end well, by status."""
        self.warnings: Counter[str] = Counter()
        self._attached: set[str] = set()
        self._exchanges: dict[str, set[Exchange]] = {}
        self._gone: dict[str, None] = {}
        """Attached episodes that have ended, the latest ones: policies may have played them, so no provider may."""

    def start(
        self, task: Any, *, workflow: str, rollout: int = 0, phase: str = "trace", training_step: int | None = None
    ) -> LiveEpisode:
        """Open an episode. Raises RequestError when too many are open, or none can be recorded here."""
        if self.sink is None:
            raise RequestError(404, "The workflow that runs here opens its episodes itself.", code="not_recording")
        if len(self.open) >= self.limit:
            raise RequestError(
                429,
                f"{self.limit} episodes are open: end some first.",
                code="too_many_episodes",
                headers={"retry-after": "1"},
            )
        episode = LiveEpisode(
            self.sink,
            task_of(task),
            workflow=workflow,
            rollout=rollout,
            phase=phase,
            training_step=training_step,
            redactors=self.redactors,
            roles=self.roles,
        )
        self.open[episode.id] = episode
        return episode

    def attach(self, episode: LiveEpisode) -> None:
        """Take the calls of an episode that something else opened and will end."""
        self.open[episode.id] = episode
        self._attached.add(episode.id)

    def detach(self, episode_id: str) -> None:
        """Settle the calls of an attached episode that have their answer; it takes no more."""
        if self.open.pop(episode_id, None) is not None:
            self._attached.discard(episode_id)
            self._settle(episode_id)
            self._gone[episode_id] = None
            if len(self._gone) > self.limit:
                del self._gone[next(iter(self._gone))]

    def end(
        self,
        episode_id: str,
        status: EpisodeStatus,
        rewards: Mapping[str, float],
        metrics: Mapping[str, float],
        error: str | None,
    ) -> Episode:
        """End an open episode. Raises RequestError (404, 409) when it is not open here."""
        if episode_id in self._attached:
            raise RequestError(409, "The workflow that opened this episode ends it.", code="attached")
        self._sessions.forget(episode_id)
        episode = self.open.pop(episode_id, None)
        if episode is None:
            raise RequestError(404, f"No episode {episode_id} is open.", param="id", code="unknown_episode")
        return self._close(episode, status, rewards, metrics, error)

    def reward(self, target: str, rewards: Mapping[str, float]) -> None:
        """Record rewards of an episode or a candidate, before or after the end of its episode."""
        if self.sink is None:
            raise RequestError(404, "The workflow that runs here rewards its episodes itself.", code="not_recording")
        now = time.time()
        self.sink.write([Reward(target, name, value, now) for name, value in rewards.items()])
        self.counts["rewards"] += len(rewards)

    def exchange(
        self,
        who: Identity,
        form: Form,
        asked: dict[str, Any],
        upstream: bool,
        session: tuple[Hashable, str] | None = None,
    ) -> Exchange | None:
        """The exchange of a call.

        `session` is what its episode is known by, where it names none. None where it cannot be recorded. Raises
        RequestError (409) when it belongs nowhere and no provider is there.
        """
        own = session is not None and self.sink is not None and upstream
        episode = self._sessions.episode(*session) if session and own else self._episode(who, upstream)
        if episode is None:
            return None
        caller = CallerContext(who.role, "gateway", read=who.parents, given=who.named)
        chat, unsupported_reason = chat_of(form, asked, episode)
        try:
            call = episode.start(caller, chat)
        except RecordError as error:
            raise RequestError(409, str(error), code="episode_ended") from None
        call.caller.output, call.unsupported_reason = call.id, unsupported_reason
        exchange = Exchange(call, form, asked, self._ended)
        self._exchanges.setdefault(episode.id, set()).add(exchange)
        return exchange

    def health(self) -> dict[str, Any]:
        """What is open and what was counted."""
        warnings, failures = self.warnings.copy(), self.failures.copy()
        for episode in self.open.values():
            warnings.update(episode.warnings)
            failures.update(episode.failures)
        return {
            "open_episodes": len(self.open),
            "open_calls": sum(map(len, self._exchanges.values())),
            "records": dict(self.counts),
            "failures": dict(failures),
            "warnings": dict(warnings),
        }

    def close(self) -> None:
        """End all that is open: orphaned episodes as cancelled."""
        for episode_id in list(self._attached):
            self.detach(episode_id)
        self._sessions.close()
        for episode in list(self.open.values()):
            self._close(episode, "cancelled", {}, {}, "the gateway stopped before the episode ended")
        self.open.clear()

    def warn(self, kind: str, text: str) -> None:
        """Count something that the user should know about; say each kind once."""
        self.warnings[kind] += 1
        if self.warnings[kind] == 1:
            log.warning("%s", text)

    def _episode(self, who: Identity, upstream: bool) -> LiveEpisode | None:
        if who.episode is not None and who.episode in self.open:
            return self.open[who.episode]
        if who.episode in self._gone:
            raise RequestError(409, f"The episode {who.episode} has ended.", code="episode_ended")
        if not upstream:
            raise RequestError(
                409, "The call names no open episode, and there is no provider behind this gateway.", code="no_episode"
            )
        self.counts["unattributed"] += 1
        if who.episode is not None:
            self.warn("late_call", f"A call names the episode {who.episode}, which is not open. {self._instead}")
        else:
            self.warn("no_episode", f"A call names no episode. {self._instead}")
        if self.sink is None:
            return None
        return self._sessions.episode((IMPLICIT, time.monotonic() // IMPLICIT_SECONDS), None)

    @property
    def _instead(self) -> str:
        return "It is not recorded." if self.sink is None else "It is recorded under an implicit episode."

    def _close(
        self,
        episode: LiveEpisode,
        status: EpisodeStatus,
        rewards: Mapping[str, float],
        metrics: Mapping[str, float],
        error: str | None,
    ) -> Episode:
        self._settle(episode.id)
        record = episode.end(status, rewards=rewards, metrics=metrics, error=error)
        self.counts["calls"] += len(self._exchanges.pop(episode.id, ()))
        self.warnings.update(episode.warnings)
        self.failures.update(episode.failures)
        self.counts[f"episodes_{status}"] += 1
        return record

    def _settle(self, episode_id: str) -> None:
        """End the calls that have their answer; the others end with their episode."""
        for exchange in list(self._exchanges.get(episode_id, ())):
            if exchange.finish():
                self._ended(exchange)

    def _ended(self, exchange: Exchange) -> None:
        episode_id = exchange.call.episode.id
        mine = self._exchanges.get(episode_id)
        if mine is None or exchange not in mine:
            return
        mine.discard(exchange)
        self.counts["calls"] += 1
        if not mine:
            del self._exchanges[episode_id]
            self._sessions.ended(episode_id)

    def _begin(self, task: str | None) -> LiveEpisode:
        """The episode of a session; without a task the one of calls that belong to none, which no limit refuses."""
        if task is not None:
            return self.start({"id": task}, workflow="gateway")
        assert self.sink is not None
        episode = LiveEpisode(
            self.sink, Task(id=IMPLICIT, input=None), workflow=IMPLICIT, redactors=self.redactors, roles=self.roles
        )
        self.open[episode.id] = episode
        return episode

    def _finish(self, episode_id: str) -> None:
        self._close(self.open.pop(episode_id), "ok", {}, {}, None)


def task_of(value: Any) -> Task:
    """The task of any JSON value: an object's `id` names it, else its content does."""
    if isinstance(value, Mapping) and value.get("id") is not None:
        return Task(id=str(value["id"]), input=value)
    return Task(id=message_id({"task": value})[:12], input=value)
