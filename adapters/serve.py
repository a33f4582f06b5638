"""Serves trained role policies over the OpenAI API: one model name per role."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cotune.adapters.chat_endpoint import Access, ChatEndpoint, json_bytes
from cotune.adapters.local import Local, Served, open_local
from cotune.adapters.openai_http import RequestError
from cotune.errors import ConfigError

MAX_BODY = 16 << 20
logger = logging.getLogger("cotune.serve")


def build_app(local: Local, *, token: str | None = None, max_body: int = MAX_BODY) -> Starlette:
    """The ASGI application. With a `token`, all but /health needs `Authorization: Bearer TOKEN`."""
    access = Access(token)
    chat = ChatEndpoint(local, access, max_body=max_body)

    async def models(request: Request) -> Response:
        access.check(request.scope)
        return _json({"object": "list", "data": [_model(s, local) for s in local.served.values()]})

    async def model(request: Request) -> Response:
        access.check(request.scope)
        return _json(_model(chat.find(request.path_params["name"]), local))

    async def health(request: Request) -> Response:
        info = await local.sampler.info()
        counts = {"requests": chat.counts, "not_enforced": chat.not_enforced}
        return _json({"status": "ok", "sampler": info.name, "in_flight": chat.in_flight, **counts})

    return Starlette(
        routes=[
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
        exception_handlers={RequestError: _refuse, HTTPException: _http_error, Exception: _server_error},
    )


@dataclass(frozen=True)
class Endpoint:
    """A running server. `url` is the base URL for OpenAI clients; `models` what answers for each model name."""

    url: str
    port: int
    models: Mapping[str, Served]
    left_to_provider: Sequence[str]
    _thread: threading.Thread

    def wait(self) -> None:
        """Block until the server stops."""
        self._thread.join()


def serving(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    base: str | Path | None = None,
    names: Sequence[str] = (),
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve an export, a model folder or a Hugging Face id from a background thread; port 0 takes a free one.

    A context manager that is entered once requests are answered. `base` names the base model of an export where
    its recorded path does not hold; `names` are further names of a plain model. Raises ConfigError,
    AdapterError, SyncError when it cannot start.
    """
    return serving_local(lambda: open_local(source, base=base, names=names), host=host, port=port, token=token)


@contextlib.contextmanager
def serving_local(
    opened: Callable[[], Coroutine[Any, Any, Local]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    max_body: int = MAX_BODY,
) -> Iterator[Endpoint]:
    """Serve what `opened` opens in the server's loop; it is closed with the server."""
    check_access(host, token)
    listener = _bind(host, port)
    ready: Future[_Running] = Future()
    work = _serve(opened, listener, ready, lambda local: build_app(local, token=token, max_body=max_body))
    thread = threading.Thread(target=_run, args=(work, ready), name="cotune-serve", daemon=True)
    thread.start()
    try:
        local = ready.result().local
        bound = listener.getsockname()[1]
        shown = f"[{host}]" if ":" in host else host
        yield Endpoint(f"http://{shown}:{bound}/v1", bound, local.served, local.left_to_provider, thread)
    finally:
        ready.add_done_callback(_stop)
        thread.join()
        listener.close()


def serve(source: str | Path, say: Callable[[str], None], **options: Any) -> None:
    """Serve until Ctrl-C or SIGTERM; `options` are those of `serving`, `say` receives what to show."""
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        with contextlib.suppress(KeyboardInterrupt), serving(source, **options) as endpoint:
            say(f"Serving {source} at {endpoint.url}")
            for entry in endpoint.models.values():
                say(f"  {entry.name}: {entry.policy} ({entry.kind}), weights {entry.fingerprint[:12]}, {entry.base}")
            for role in endpoint.left_to_provider:
                say(f"  {role}: not here, its provider answers")
            say("Ctrl-C stops it.")
            endpoint.wait()
    finally:
        signal.signal(signal.SIGTERM, previous)


def check_access(host: str, token: str | None) -> None:
    """Raises ConfigError when the server could be reached from outside without a token."""
    if token is not None and not token.strip():
        raise ConfigError("token", token, "a non-empty text", "Leave --token out to serve on loopback without one.")
    if token is None and not _loopback(host):
        raise ConfigError("host", host, "a loopback address, unless there is a token", "Add --token TOKEN.")


@dataclass(frozen=True)
class _Running:
    server: uvicorn.Server
    local: Local


class _Server(uvicorn.Server):
    """Says when it accepts requests."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._said = started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._said()


def _run(work: Coroutine[Any, Any, None], ready: Future[_Running]) -> None:
    try:
        asyncio.run(work)
    except BaseException as error:
        if ready.done():
            logger.exception("The server stopped.")
            raise
        ready.set_exception(error)


async def _serve(
    opened: Callable[[], Coroutine[Any, Any, Local]],
    listener: socket.socket,
    ready: Future[_Running],
    app: Callable[[Local], Starlette],
) -> None:
    local = await opened()
    try:
        config = uvicorn.Config(
            app(local),
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            backlog=2048,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=3,
        )
        server = _Server(config, lambda: ready.set_result(_Running(server, local)))
        await server.serve(sockets=[listener])
    finally:
        await local.aclose()


def _stop(ready: Future[_Running]) -> None:
    if ready.exception() is None:
        ready.result().server.should_exit = True


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise ConfigError(
            "port", f"{host}:{port}", f"an address that can be bound ({reason})", "Choose another."
        ) from None
    return listener


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _model(served: Served, local: Local) -> dict[str, Any]:
    return {
        "id": served.name,
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


def _json(body: Any, status: int = 200) -> Response:
    return Response(json_bytes(body), status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return _json(error.body(), error.status)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    refused = RequestError(error.status_code, f"{error.detail}: {request.method} {request.url.path}.")
    return _json(refused.body(), error.status_code)


async def _server_error(request: Request, error: Exception) -> Response:
    refused = RequestError(500, f"The server failed: {type(error).__name__}.", code="internal_error")
    return _json(refused.body(), 500)


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt
