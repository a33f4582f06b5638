"""Settings of a gateway: providers, access, limits, and how it finds roles and episodes."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal
from urllib.parse import urlsplit

import msgspec
from starlette.types import Scope

from cotune.errors import ConfigError
from cotune.integrations.web.http.limits import Limits
from cotune.integrations.web.http.requests import header
from cotune.prompts.edits import Prompts
from cotune.recording.redaction import Redactor
from cotune.recording.roles import RolesFunction


class Split(msgspec.Struct, frozen=True):
    """How calls that name no episode are divided into episodes. By default they are not divided."""

    by: Literal["connection"] | None = None
    """connection: one episode for each connection of a client. It ends when the connection is closed."""
    header: str = ""
    """Name of a header that the application sends anyway. Each of its values is one episode."""
    idle: float | None = None
    """Seconds without a call after which an episode ends. Without `by` and `header`, there is one episode at a time."""

    def __post_init__(self) -> None:
        if self.idle is not None and not 0 < self.idle < math.inf:
            raise ConfigError("episode_idle", self.idle, "must be a number of seconds above 0")
        if self.by and self.header:
            raise ConfigError("episode_by", self.by, "cannot be used with --episode-header", "Leave one of them out.")

    def of(self, scope: Scope) -> tuple[Hashable, str] | None:
        """The key of the episode that a request belongs to, and the id that the task of this episode gets.

        Requests with the same key belong to one episode. None if the settings do not put this request into an episode.
        """
        if self.by == "connection":
            connection = scope.get("cotune.connection")
            if connection is None:
                return None
            key, task_id = connection, "connection"
        elif self.header:
            value = header(scope, self.header.lower().encode()).decode("latin-1")[:200]
            if not value:
                return None
            key, task_id = value, value
        elif self.idle is not None:
            key, task_id = "", "gateway"  # one episode for all requests, until none has come for a while
        else:
            return None
        return key, task_id


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The providers of a gateway and how it records. Raises ConfigError for a provider that is no base URL."""

    upstream: str
    """Base URL of the provider."""
    key: str | None = None
    """The provider's key, for clients that send `token` as theirs."""
    anthropic: str | None = None
    """Base URL of the provider of Anthropic's interface; None if it is the same."""
    anthropic_key: str | None = None
    token: str | None = None
    app: str = ""
    """Name of the application, for a collector."""
    limits: Limits = Limits()
    redactors: Sequence[Redactor] = ()
    roles: RolesFunction | None = None
    """Names the roles of calls whose requests do not."""
    prompts: Prompts | None = None
    """Edits the prompts of the calls."""
    role_header: str = ""
    """Name of the application's own header for the role."""
    split: Split = Split()

    def __post_init__(self) -> None:
        """Raises ConfigError for an address that is not the base URL of an API."""
        for url in filter(None, (self.upstream, self.anthropic)):
            if not _is_base_url(url):
                remedy = "For example: --upstream https://api.openai.com/v1"
                raise ConfigError("upstream", url, "is not the base URL of an OpenAI-compatible API", remedy)


def _is_base_url(url: str) -> bool:
    """Whether requests can be sent to paths below this address."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and not parts.query and parts.port != 0
    except ValueError:  # a host or a port that is malformed
        return False
