"""Serves trained role policies over the OpenAI API: one model name per role."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cotune.adapters.chat_endpoint import ChatEndpoint
from cotune.adapters.open_policies import Local, Served, open_local, with_aliases
from cotune.adapters.restarting import Restarting
from cotune.integrations.http.requests import Access
from cotune.integrations.http.responses import application, json_response
from cotune.integrations.http.server import Running, check_access, running, stopped_by_signals

__all__ = ["Endpoint", "build_app", "check_access", "serve", "serving", "serving_local"]

MAX_BODY = 16 << 20
_LOOK = 0.5
"""Seconds between two looks at whether the engine is there."""


def build_app(local: Local, *, token: str | None = None, max_body: int = MAX_BODY) -> Starlette:
    """The ASGI application. With a `token`, all but /health needs `Authorization: Bearer TOKEN`."""
    access = Access(token)
    chat = ChatEndpoint(local, access, max_body=max_body)

    async def models(request: Request) -> Response:
        access.check(request.scope)
        return json_response({"object": "list", "data": [_model(n, s, local) for n, s in local.served.items()]})

    async def model(request: Request) -> Response:
        access.check(request.scope)
        name = request.path_params["name"]
        return json_response(_model(name, chat.find(name), local))

    async def health(request: Request) -> Response:
        access.check_local(request.scope)
        info = await local.sampler.info()
        counts = {"requests": chat.counts, "not_enforced": chat.not_enforced, "unlisted": chat.unlisted}
        more = {"conversations": chat.conversations.kept(), "engine_restarts": getattr(local.sampler, "restarts", 0)}
        return json_response({"status": "ok", "sampler": info.name, "in_flight": chat.in_flight, **more, **counts})

    return application(
        [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
    )


@dataclass(frozen=True)
class Endpoint:
    """A running server. `url` is the base URL for OpenAI clients; `models` what answers for each model name, `others`
    for any other."""

    url: str
    port: int
    models: Mapping[str, Served]
    left_to_provider: Sequence[str]
    others: Served | None
    _running: Running[Local]

    def wait(self) -> None:
        """Block until the server stops. Raises EngineLost when its engine has ended too often."""
        sampler = self._running.opened.sampler
        while not self._running.wait(_LOOK):
            if isinstance(sampler, Restarting):
                sampler.look()
                if sampler.lost is not None:
                    raise sampler.lost


def serving(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    base: str | Path | None = None,
    names: Sequence[str] = (),
    tool_format: str | None = None,
    aliases: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve an export, a model folder or a Hugging Face id from a background thread; port 0 takes a free one.

    A context manager that is entered once requests are answered. `base` names the base model of an export where
    its recorded path does not hold; `names` are further names of a plain model, `tool_format` how it writes tool
    calls. `aliases` are names under which a role answers too. Raises ConfigError, AdapterError, SyncError when it
    cannot start.
    """
    settings = {"base": base, "names": names, "tool_format": tool_format}
    return serving_local(lambda: open_local(source, **settings), host=host, port=port, token=token, aliases=aliases)


def serving_local(
    opened: Callable[[], Coroutine[Any, Any, Local]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    max_body: int = MAX_BODY,
    aliases: Mapping[str, str] | None = None,
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve what `opened` opens in the server's loop; it is closed with the server."""

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, Local]]:
        local = await opened()
        try:
            named = with_aliases(local, aliases or {})
            yield build_app(named, token=token, max_body=max_body), named
        finally:
            await local.aclose()

    return _endpoint(running(opening, host=host, port=port, token=token, name="cotune-serve"))


def serve(source: str | Path, say: Callable[[str], None], **options: Any) -> None:
    """Serve until Ctrl-C or SIGTERM; `options` are those of `serving`, `say` receives what to show."""
    with stopped_by_signals(), serving(source, **options) as endpoint:
        say(f"Serving {source} at {endpoint.url}")
        for name, entry in endpoint.models.items():
            who = name if name == entry.name else f"{name}, as {entry.name}"
            say(f"  {who}: {entry.policy} ({entry.kind}), weights {entry.fingerprint[:12]}, {entry.base}")
        for role in endpoint.left_to_provider:
            say(f"  {role}: not here, its provider answers")
        if (others := endpoint.others) is not None:
            say(f"  any other name: {others.policy}, the untrained model ({others.base})")
        say("Ctrl-C stops it.")
        endpoint.wait()


@contextlib.contextmanager
def _endpoint(server: contextlib.AbstractContextManager[Running[Local]]) -> Iterator[Endpoint]:
    with server as found:
        local = found.opened
        yield Endpoint(f"{found.url}/v1", found.port, local.served, local.left_to_provider, local.others, found)


def _model(name: str, served: Served, local: Local) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "cotune",
        "root": served.base,
        "max_model_len": local.max_model_len,
        "policy": served.policy.name,
        "version": served.policy.version,
        "kind": served.kind,
        "fingerprint": served.fingerprint,
        "base": {"model": served.base, "weights_sha256": served.base_sha256},
    }
