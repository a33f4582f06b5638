"""The gateway: an OpenAI-compatible endpoint that records the calls between an application and its provider.

`running_gateway` and `serve` run a gateway for other processes. `gateway` is for a workflow that runs the application
as another process: calls through its address are answered like the workflow's own calls.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import functools
import os
import re
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar
from urllib.parse import quote

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cotune.collect.open_sink import open_sink
from cotune.collect.sink import Collector
from cotune.errors import CotuneError, RecordError, WorkflowError
from cotune.integrations.web.gateway.address import address_of
from cotune.integrations.web.gateway.episodes import EndEpisode, Episodes, OpenEpisode, Rewards, Text, task_of
from cotune.integrations.web.gateway.proxy import KEYS, Proxy
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.http.bodies import read_json
from cotune.integrations.web.http.limits import Limits
from cotune.integrations.web.http.requests import (
    Access,
    RequestError,
    application,
    json_response,
    refusal,
)
from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.recording.context import current_episode
from cotune.runtime.process_state import ProcessState
from cotune.storage.open_store import without_password
from cotune.storage.protocol import Store
from cotune.terminal import suggest

_TOKENS = (b"x-cotune-token", *KEYS)


class Gateway:
    """The ASGI application of one gateway, with its providers and its store."""

    def __init__(self, config: GatewayConfig, sink: Store | Collector | None) -> None:
        """The application of a gateway: the proxy for calls, and the control requests that open and end episodes."""
        access = Access(config.token, _TOKENS)
        store = sink if isinstance(sink, Store) else None
        self.loop = asyncio.get_running_loop()
        self.store = store
        self.episodes = Episodes(sink, config)
        self.proxy = Proxy(config, self.episodes, access)
        self._control = control_app(self.episodes, self.proxy, access, store, config.limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request: calls go to the proxy, other paths to the control interface."""
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

    async def close(self) -> None:
        """End open episodes and close the connections to the providers. The store stays open."""
        await self.episodes.close()
        for upstream in (self.proxy.upstream, self.proxy.anthropic):
            await upstream.close()


def running_gateway(
    config: GatewayConfig, records: str | Path | None, *, host: str = "127.0.0.1", port: int = 0
) -> AbstractContextManager[RunningServer[Gateway]]:
    """Run a gateway in a background thread.

    `records` is the address of a store or of a collector. With None, only attached episodes are recorded. Raises
    ConfigError, RunError if it cannot start.
    """

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, Gateway]]:
        with contextlib.nullcontext() if records is None else open_sink(records, config.app) as sink:
            new_gateway = Gateway(config, sink)
            try:
                yield new_gateway, new_gateway
            finally:
                await new_gateway.close()

    return running(
        opening,
        host=host,
        port=port,
        token=config.token,
        name="cotune-gateway",
        date_header=False,
        seconds=config.limits.timeout,
    )


def serve(config: GatewayConfig, records: str | Path, say: Callable[[str], None], *, host: str, port: int) -> None:
    """Run a gateway until Ctrl-C, SIGTERM or SIGHUP."""
    with stopped_by_signals(), running_gateway(config, records, host=host, port=port) as server:
        say(f"Gateway at {server.url}/v1 for {config.upstream}")
        if config.anthropic:
            say(f"Anthropic's interface at {server.url} for {config.anthropic}")
        store = server.opened.store
        say(f"Records: {records if store is None else store.address}")
        say("Ctrl-C stops it.")
        suggest(f"OPENAI_BASE_URL={server.url}/v1 python my_app.py", f"cotune show {without_password(records)}")
        server.wait()


@dataclass(frozen=True)
class Gate:
    """The address of an episode on this process's gateway, for an application in another process."""

    origin: str
    episode: str

    @property
    def url(self) -> str:
        """Base URL for OpenAI clients. Their role comes from the header X-Cotune-Role or baggage, else it is `app`."""
        return f"{self.origin}/e/{self.episode}/v1"

    def role_url(self, role: str) -> str:
        """Base URL for clients that play `role`."""
        return f"{self.origin}/e/{self.episode}/r/{quote(role, safe='')}/v1"


@contextlib.contextmanager
def gateway(upstream: str | None = None) -> Iterator[Gate]:
    """The gateway of this process, for the present episode. Use it inside a workflow.

    Calls through it are recorded in the episode, and answered like its other calls. A call that no policy answers is
    sent to `upstream`. Without `upstream` it is sent to OPENAI_BASE_URL or, if that is not set, to OpenAI; a call of
    Anthropic's interface to ANTHROPIC_BASE_URL or Anthropic. One server per provider runs in a background thread, on
    loopback, until the process ends. Raises WorkflowError outside an episode.

    ```python
    @cotune.workflow
    def solve(task):
        with cotune.gateway() as gate:
            environment = {**os.environ, "PLANNER_URL": gate.role_url("planner")}
            answer = subprocess.check_output(["node", "app.mjs", task["question"]], env=environment, text=True)
        return answer.strip() == task["answer"]
    ```
    """
    episode = current_episode.get()
    if episode is None:
        raise WorkflowError(
            "gateway() was used where no episode runs.",
            "Use it inside a @cotune.workflow function that cotune runs; elsewhere start `cotune gateway`.",
        )
    anthropic = (os.environ.get("ANTHROPIC_BASE_URL") or "https://api.anthropic.com").rstrip("/") + "/v1"
    openai = os.environ.get("OPENAI_BASE_URL") or "https://api.openai.com/v1"
    server = _shared(GatewayConfig(upstream=upstream or openai, anthropic=upstream or anthropic))
    episodes = server.opened.episodes
    loop = server.opened.loop
    loop.call_soon_threadsafe(episodes.attach, episode)
    episode.gateway = server.url
    try:
        yield Gate(server.url, episode.id)
    finally:
        asyncio.run_coroutine_threadsafe(episodes.detach(episode.id), loop).result()


class SharedGateways(ProcessState):
    """The gateways of this process, by their providers."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running: dict[GatewayConfig, RunningServer[Gateway]] = {}


_gateways = SharedGateways()


def _shared(config: GatewayConfig) -> RunningServer[Gateway]:
    """The gateway of this process with these providers. It starts at its first use and stops at exit."""
    with _gateways.lock:
        if config not in _gateways.running:
            stack = contextlib.ExitStack()
            # In an empty context, because the server's thread outlives the episode that starts it.
            start = functools.partial(stack.enter_context, running_gateway(config, None))
            _gateways.running[config] = contextvars.Context().run(start)
            atexit.register(stack.close)
        return _gateways.running[config]


T = TypeVar("T")
_TARGET = re.compile(r"([0-9A-HJKMNP-TV-Z]{26})(?:\.\d{1,4})?")


class GiveRewards(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of POST /cotune/rewards: `target` is an episode id, or a call id and the index of a candidate."""

    target: str
    rewards: Annotated[Rewards, msgspec.Meta(min_length=1)]
    feedback: Text = ""


def control_app(episodes: Episodes, proxy: Proxy, access: Access, store: Store | None, limits: Limits) -> Starlette:
    """The Starlette application for paths outside the interfaces of the providers: episodes, rewards, health."""

    async def body(request: Request, kind: type[T]) -> T:
        return await read_json(request.scope, request.receive, access, kind, limits, proxy.room)

    async def open_(request: Request) -> Response:
        options = await body(request, OpenEpisode)
        task = await asyncio.to_thread(task_of, options.task)
        episode = episodes.start(options, task)
        base = f"{request.base_url}e/{episode.id}"
        opened = {"id": episode.id, "task": episode.task.id, "base_url": f"{base}/v1", "roles_url": f"{base}/r"}
        return json_response(opened, 201)

    async def end(request: Request) -> Response:
        record = await episodes.end(request.path_params["id"], await body(request, EndEpisode))
        return json_response({"id": record.id, "status": record.status, "calls": record.calls})

    async def reward(request: Request) -> Response:
        reward_body = await body(request, GiveRewards)
        await _check_target(reward_body.target, episodes, store)
        episodes.reward(reward_body.target, reward_body.rewards, reward_body.feedback)
        return json_response({"target": reward_body.target, "rewards": reward_body.rewards})

    async def health(request: Request) -> Response:
        access.check_local(request.scope)
        stored = {"lost": store.health.lost, "refused": store.health.refused} if store is not None else {}
        status = "store_failed" if store is not None and store.health.failing else "ok"
        counts = {"requests": proxy.counts, "in_flight": proxy.in_flight}
        return json_response({"status": status, **counts, **episodes.health(), **stored})

    return application(
        [
            Route("/cotune/episodes", open_, methods=["POST"]),
            Route("/cotune/episodes/{id}/end", end, methods=["POST"]),
            Route("/cotune/rewards", reward, methods=["POST"]),
            Route("/health", health),
        ],
    )


async def _check_target(target: str, episodes: Episodes, store: Store | None) -> None:
    """Raise RequestError for a target that is not an id (400) or not recorded (404)."""
    if _TARGET.fullmatch(target) is None:
        text = "A target is an episode id, or CALL.INDEX for a candidate."
        raise RequestError(400, text, param="target", code="invalid_value")
    if store is None or target in episodes.open:
        return

    def recorded(store: Store) -> bool:
        store.flush()
        id, _, index = target.partition(".")
        if not index:
            return store.figures().has_episode(id)
        return int(index) < len(store.figures().call(id).candidates)

    try:
        is_recorded = await asyncio.to_thread(recorded, store)
    except RecordError:
        is_recorded = False
    except CotuneError as error:
        raise RequestError(503, f"The records cannot be read: {error}", code="store_failed") from None
    if not is_recorded:
        raise RequestError(404, f"Nothing is recorded under {target}.", param="target", code="unknown_target")
