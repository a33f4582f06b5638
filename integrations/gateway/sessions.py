"""Episodes that the gateway opens itself, for applications that know nothing of it: by connection, header or pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Literal

from starlette.types import Scope

from cotune.errors import ConfigError
from cotune.integrations.http.requests import header
from cotune.recording.recorder import LiveEpisode

PAUSE = 300.0
"""Seconds without a call after which an episode ends where no pause is set."""


@dataclass(frozen=True)
class Split:
    """How calls that name no episode are divided into episodes; not at all where everything is left out."""

    by: Literal["connection"] | None = None
    """connection: an episode for each connection of a client, until it is closed."""
    header: str = ""
    """Name of a header that the application sends anyway: an episode for each of its values."""
    idle: float | None = None
    """Seconds without a call after which an episode ends; without `by` and `header`, one episode at a time."""

    def __post_init__(self) -> None:
        if self.idle is not None and not 0 < self.idle < float("inf"):
            raise ConfigError("episode_idle", self.idle, "a number of seconds above 0")
        if self.by and self.header:
            raise ConfigError("episode_by", self.by, "one of --episode-by and --episode-header")

    def of(self, scope: Scope) -> tuple[Hashable, str] | None:
        """What a request's episode is known by, and its task's id; None where its calls are not divided."""
        if self.by == "connection":
            connection = scope.get("cotune.connection")
            return None if connection is None else (connection, "connection")
        if self.header:
            value = header(scope, self.header.lower().encode()).decode("latin-1")[:200]
            return (value, value) if value else None
        return None if self.idle is None else ("", "gateway")


class Sessions:
    """The open episodes of a `Split`. All on the gateway's event loop."""

    def __init__(
        self,
        split: Split,
        start: Callable[[str | None], LiveEpisode],
        end: Callable[[str], None],
        busy: Callable[[str], bool],
    ) -> None:
        """`start(task)` opens an episode (without a task one for calls that belong to none), `end(episode)` ends it,
        `busy(episode)` tells whether a call of it is open."""
        self.split = split
        self._start = start
        self._end = end
        self._busy = busy
        self._open: dict[Hashable, LiveEpisode] = {}
        self._keys: dict[str, Hashable] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def episode(self, key: Hashable, task: str | None) -> LiveEpisode:
        """The episode that is open for a key; a new one where there is none."""
        found = self._open.get(key)
        if found is None:
            found = self._open[key] = self._start(task)
            self._keys[found.id] = key
            if isinstance(key, asyncio.Future):
                key.add_done_callback(lambda closed: self._pause_over(found.id))
        self._wait(found.id)
        return found

    def ended(self, episode: str) -> None:
        """A call of an episode has ended: the pause begins anew."""
        key = self._keys.get(episode)
        if isinstance(key, asyncio.Future) and key.done():
            self._pause_over(episode)
        elif key is not None:
            self._wait(episode)

    def _wait(self, episode: str) -> None:
        """End an episode when a pause has passed without a call; one of a connection only where a pause is set."""
        if (timer := self._timers.pop(episode, None)) is not None:
            timer.cancel()
        if self.split.idle is not None or not isinstance(self._keys[episode], asyncio.Future):
            loop, seconds = asyncio.get_running_loop(), self.split.idle or PAUSE
            self._timers[episode] = loop.call_later(seconds, self._pause_over, episode)

    def close(self) -> None:
        """End all of them."""
        for episode in list(self._keys):
            self._forget(episode)
            self._end(episode)

    def forget(self, episode: str) -> None:
        """An episode was ended by a request."""
        if episode in self._keys:
            self._forget(episode)

    def _pause_over(self, episode: str) -> None:
        if episode in self._keys and not self._busy(episode):
            self._forget(episode)
            self._end(episode)

    def _forget(self, episode: str) -> None:
        del self._open[self._keys.pop(episode)]
        if (timer := self._timers.pop(episode, None)) is not None:
            timer.cancel()
