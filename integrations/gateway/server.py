"""The gateway: an OpenAI-compatible endpoint between an application in any language and its provider, which records.

`running_gateway` and `serve` run one for other processes; `gateway` gives a workflow the address of one for an
application that it runs as another process, whose calls are then answered like the workflow's own.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send

from cotune.context import current_episode
from cotune.errors import WorkflowError
from cotune.integrations.gateway.address import address_of
from cotune.integrations.gateway.control import control_app
from cotune.integrations.gateway.episodes import Episodes
from cotune.integrations.gateway.proxy import KEYS, Limits, Proxy
from cotune.integrations.gateway.sessions import Split
from cotune.integrations.gateway.upstream import Upstream, checked_url
from cotune.integrations.http.requests import Access, RequestError
from cotune.integrations.http.responses import refusal
from cotune.integrations.http.server import RunningServer, running, stopped_by_signals
from cotune.recording.redaction import Redactor
from cotune.recording.role_functions import RolesFunction
from cotune.storage.sqlite_store import SqliteStore

_TOKENS = (b"x-cotune-token", *KEYS)


class Gateway:
    """The ASGI application of one gateway, with what it forwards to and records into."""

    def __init__(
        self,
        upstream: str | None,
        store: SqliteStore | None,
        *,
        token: str | None = None,
        limits: Limits | None = None,
        key: str | None = None,
        redactors: Sequence[Redactor] = (),
        anthropic: str | None = None,
        anthropic_key: str | None = None,
        roles: RolesFunction | None = None,
        role_header: str = "",
        split: Split | None = None,
    ) -> None:
        """`upstream` is the base URL of the provider, `key` its key for clients that send `token` as theirs;
        `anthropic` and its key are those for Anthropic's interface, where another provider serves it. `roles` names
        the roles of calls that do not, `role_header` a header that does, `split` divides calls without an episode."""
        limits = limits or Limits()
        access = Access(token, _TOKENS)
        self.loop = asyncio.get_running_loop()
        self.store = store
        self.upstream = None if upstream is None else Upstream(upstream, key)
        self.episodes = Episodes(store, redactors=redactors, roles=roles, split=split)
        self.anthropic = None if anthropic is None else Upstream(anthropic, anthropic_key)
        self.proxy = Proxy(self.upstream, self.episodes, access, limits, self.anthropic, role_header)
        self._control = control_app(self.episodes, self.proxy, access, store, limits.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            raise RuntimeError(f"The gateway takes HTTP requests, not {scope['type']!r}.")
        try:
            address = address_of(scope)
            if address is None:
                await self._control(scope, receive, send)
            else:
                await self.proxy(address, scope, receive, send)
        except RequestError as error:
            self.proxy.counts[f"refused_{error.status}"] += 1
            await refusal(error)(scope, receive, send)

    def on_loop(self, work: Callable[[], None]) -> None:
        """Do something on the gateway's event loop, from another thread, and wait for it."""

        async def run() -> None:
            work()

        asyncio.run_coroutine_threadsafe(run(), self.loop).result()

    async def close(self) -> None:
        """End what is open and close the connections to the provider; the store stays open."""
        self.episodes.close()
        for upstream in filter(None, (self.upstream, self.anthropic)):
            await upstream.close()


def running_gateway(
    upstream: str | None,
    records: str | Path | None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limits: Limits | None = None,
    key: str | None = None,
    redactors: Sequence[Redactor] = (),
    anthropic: str | None = None,
    **options: Any,
) -> AbstractContextManager[RunningServer[Gateway]]:
    """Run a gateway in a background thread; `options` are further ones of `Gateway`, `records` is a folder or a records
    file, None records nothing by itself.

    Raises ConfigError, RunError when it cannot start.
    """
    for url in filter(None, (upstream, anthropic)):
        checked_url(url)

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, Gateway]]:
        store = None if records is None else _opened(Path(records))
        try:
            options.update(key=key, redactors=redactors, anthropic=anthropic)
            made = Gateway(upstream, store, token=token, limits=limits, **options)
            try:
                yield made, made
            finally:
                await made.close()
        finally:
            if store is not None:
                store.close()

    return running(
        opening,
        host=host,
        port=port,
        token=token,
        name="cotune-gateway",
        date_header=False,
        seconds=(limits or Limits()).seconds,
    )


def serve(upstream: str, records: str | Path, say: Callable[[str], None], **options: Any) -> None:
    """Run a gateway until Ctrl-C or SIGTERM; `options` are those of `running_gateway`."""
    with stopped_by_signals(), running_gateway(upstream, records, **options) as found:
        say(f"Gateway at {found.url}/v1 for {upstream}")
        if options.get("anthropic"):
            say(f"Anthropic's interface at {found.url} for {options['anthropic']}")
        say(f"Records: {found.opened.store.path}")  # type: ignore[union-attr]
        say("Ctrl-C stops it.")
        found.wait()


@dataclass(frozen=True)
class Gate:
    """The address of an episode on this process's gateway, for an application in another process."""

    origin: str
    episode: str

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients. Their role is what the header X-Cotune-Role or baggage says, else `app`."""
        return f"{self.origin}/e/{self.episode}/v1"

    def role_url(self, role: str) -> str:
        """Base URL for clients that play `role`."""
        return f"{self.origin}/e/{self.episode}/r/{quote(role, safe='')}/v1"


@contextlib.contextmanager
def gateway(upstream: str | None = None) -> Iterator[Gate]:
    """The gateway of this process, for the episode that runs here; use it inside a workflow.

    Its calls are recorded in the episode and answered by whatever answers the episode's other calls; those that no
    policy answers go to `upstream` (without it, to the environment's OPENAI_BASE_URL, else the OpenAI API; those of
    Anthropic's interface to its ANTHROPIC_BASE_URL, else Anthropic's API). One server per provider runs in a background
    thread, on loopback, for the life of the process. Raises WorkflowError outside an episode.
    """
    episode = current_episode.get()
    if episode is None:
        raise WorkflowError(
            "gateway() was used where no episode runs.",
            "Use it inside a @cotune.workflow function that cotune runs; elsewhere start `cotune gateway`.",
        )
    anthropic = (os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com").rstrip("/") + "/v1"
    found = _shared(upstream or os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1", upstream or anthropic)
    made = found.opened
    made.on_loop(lambda: made.episodes.attach(episode))
    episode.gateway = found.url
    try:
        yield Gate(found.url, episode.id)
    finally:
        made.on_loop(lambda: made.episodes.detach(episode.id))


_opening = threading.Lock()
_running: dict[tuple[str, str], RunningServer[Gateway]] = {}


def _shared(upstream: str, anthropic: str) -> RunningServer[Gateway]:
    """The gateway of this process for two providers, started when it is first used and stopped at exit."""
    with _opening:
        if (upstream, anthropic) not in _running:
            stack = contextlib.ExitStack()
            # In an empty context: the server's thread outlives the episode that happens to start it.
            start = functools.partial(stack.enter_context, running_gateway(upstream, None, anthropic=anthropic))
            _running[upstream, anthropic] = contextvars.Context().run(start)
            atexit.register(stack.close)
        return _running[upstream, anthropic]


def _opened(records: Path) -> SqliteStore:
    if not records.suffix:
        records.mkdir(parents=True, exist_ok=True)
    return SqliteStore.open(records)
