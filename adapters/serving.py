"""Serves trained role policies over the OpenAI API: one model name per role."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cotune.adapters.bases import Moved
from cotune.adapters.chat_endpoint import ChatEndpoint, Recording
from cotune.adapters.model_names import ModelNames, name_models
from cotune.adapters.open_policies import LocalPolicies, ServedModel, open_local
from cotune.adapters.prompts import prompts_for, told
from cotune.collecting.open_sink import open_sink
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import (
    Access,
    RequestError,
    application,
    json_response,
)
from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.prompts.edits import Prompts
from cotune.recording.redaction import Redactor, check_redactor
from cotune.records.policies import UNTRAINED
from cotune.terminal import suggest, tell

logger = logging.getLogger("cotune.serve")
_NO_RESPONSES = (
    "Not Found: POST /v1/responses. Chat completions are served here: have the client use that interface (the OpenAI "
    "Agents SDK: set_default_openai_api('chat_completions')), or run the policies in the application by "
    "cotune.deployed, which answers both."
)
_LOOK = 0.5
"""Seconds between two looks at whether the engine is there."""


def build_app(
    local: LocalPolicies,
    token: str | None = None,
    limits: BodyLimits | None = None,
    prompts: Prompts | None = None,
    recording: Recording | None = None,
    names: ModelNames | None = None,
) -> Starlette:
    """The ASGI application, which answers with edited `prompts`. `names` say which policy answers a model name. With a
    `token`, all but /health needs `Authorization: Bearer TOKEN`."""
    access = Access(token)
    chat = ChatEndpoint(local, access, limits or BodyLimits(), prompts, recording, names)

    async def models(request: Request) -> Response:
        access.check(request.scope)
        listed = [_model(name, served, local) for name, served in chat.names.served.items()]
        return json_response({"object": "list", "data": listed})

    async def model(request: Request) -> Response:
        access.check(request.scope)
        name = request.path_params["name"]
        return json_response(_model(name, chat.find(name), local))

    async def responses(request: Request) -> Response:
        access.check(request.scope)
        raise RequestError(404, _NO_RESPONSES, code="not_found")

    async def health(request: Request) -> Response:
        access.check_local(request.scope)
        info = await local.sampler.info()
        counts = {"requests": chat.counts, "not_enforced": chat.not_enforced, "unlisted": chat.responder.unlisted}
        more = {
            "conversations": chat.responder.conversations.kept(),
            "engine_restarts": sum(engine.restarts for engine in local.engines),
            **({} if prompts is None else {"prompts": prompts.id, "unedited": chat.unedited}),
        }
        if local.manifest is not None:
            more["export_version"] = local.manifest.export_version
        return json_response({"status": "ok", "sampler": info.name, "in_flight": chat.in_flight, **more, **counts})

    return application(
        [
            Route("/v1/chat/completions", chat, methods=["POST"]),
            Route("/v1/responses", responses, methods=["POST"]),
            Route("/v1/models", models),
            Route("/v1/models/{name:path}", model),
            Route("/health", health),
        ],
    )


@dataclass(frozen=True)
class Endpoint:
    """A running server of `local`. `url` is the base URL for OpenAI clients."""

    url: str
    port: int
    local: LocalPolicies
    names: ModelNames
    """Which policy answers a model name."""
    _running: RunningServer[tuple[LocalPolicies, ModelNames]]
    prompts: Prompts | None = None
    """The edited prompts that it answers with."""

    def wait(self) -> None:
        """Block until the server stops. Raises EngineLost when its engine has ended too often."""
        while not self._running.wait(_LOOK):
            for engine in self.local.engines:
                engine.engine()


def serving(
    source: str | Path,
    *,
    base: Moved = None,
    names: Sequence[str] = (),
    tool_format: str | None = None,
    prompts: Prompts | str | Path | None = None,
    any_prompts: bool = False,
    default: str = "",
    **options: Any,
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve an export, a model folder or a Hugging Face id from a background thread.

    `base` says where base models of an export are now, if elsewhere; `names` are further names of a plain model,
    `tool_format` is how it writes tool calls; `prompts`, `any_prompts` and `default` are as of `serve`, `options` those
    of `serving_local`. Raises ConfigError, AdapterError, SyncError when it cannot start.
    """
    chosen = prompts_for(source, prompts, any_prompts=any_prompts)
    untrained = default == UNTRAINED.name
    opened = functools.partial(open_local, source, base=base, names=names, tool_format=tool_format, untrained=untrained)
    return serving_local(opened, prompts=chosen, default=default, **options)


@contextlib.contextmanager
def serving_local(
    opened: Callable[[], Coroutine[Any, Any, LocalPolicies]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    aliases: Mapping[str, str] | None = None,
    default: str = "",
    limits: BodyLimits | None = None,
    prompts: Prompts | None = None,
    records: str | Path | None = None,
    app: str = "",
    redactors: Sequence[Redactor] = (),
) -> Iterator[Endpoint]:
    """Serve the policies that `opened` opens, in the server's loop, and close them with it; port 0 takes a free one.

    Entered once requests are answered. `aliases` are names under which a role answers too, and `default` is the policy
    of all other names. Requests are recorded at `records`, the address of a store or, for the application `app`, of a
    collector.
    """

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, tuple[LocalPolicies, ModelNames]]]:
        local = await opened()
        try:
            names = name_models(local, aliases, default, prompts=prompts is not None)
            with contextlib.nullcontext() if records is None else open_sink(records, app) as sink:
                recording = None if sink is None else Recording(sink, app, redactors)
                yield build_app(local, token, limits, prompts, recording, names), (local, names)
        finally:
            await local.aclose()

    with running(opening, host=host, port=port, token=token, name="cotune-serve") as server:
        yield Endpoint(f"{server.url}/v1", server.port, *server.opened, server, prompts)


def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    model: Moved = None,
    names: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    default: str = "",
    tool_format: str | None = None,
    max_body: int = 16 << 20,
    prompts: str | Path | None = None,
    any_prompts: bool = False,
    records: str | Path | None = None,
    app: str = "",
    redactor: Redactor | None = None,
    say: Callable[[str], None] = tell,
) -> None:
    """Serve an export, or a plain model, over an OpenAI-compatible API until Ctrl-C, SIGTERM or SIGHUP.

    The model names of an export are its roles, and the names that one role asked for in training; of a plain model its
    own and `names`. By `aliases` a role answers for further names. `default` names the policy that answers all other
    names, or is "base" for the untrained model; without it they are refused, unless the only policy of the export
    played every recorded role. `model` is the base model of an export where it lies elsewhere than the export says (of
    several, a mapping from the old place to the new one), `tool_format` how the model writes tool calls. Requests need
    `token` (default: the environment's COTUNE_TOKEN), if there is one, and have at most `max_body` bytes.
    Requests are answered with the edited prompts that the export was trained with, if any, or with those of the file
    `prompts`; others than it was trained with need `any_prompts`. With `records`, the address of a store or of a
    collector (for the application `app`), requests are recorded, after `redactor`. `say` receives the address and the
    policy of each name. Raises ConfigError, AdapterError, SyncError when it cannot start, EngineLost.

    ```python
    cotune.serve("adapters/", port=8000, aliases={"gpt-4o-mini": "writer"})
    ```
    """
    opened = serving(
        source,
        base=model,
        names=names,
        tool_format=tool_format,
        host=host,
        port=port,
        token=token or os.environ.get("COTUNE_TOKEN"),
        aliases=aliases,
        default=default,
        limits=BodyLimits(max_body),
        prompts=prompts,
        any_prompts=any_prompts,
        records=records,
        app=app,
        redactors=() if redactor is None else (check_redactor(redactor),),
    )
    with opened as endpoint, stopped_by_signals():
        say(f"Serving {source} at {endpoint.url}")
        local = endpoint.local
        if local.manifest is not None:
            say(f"  {local.manifest.title}")
        if endpoint.prompts is not None:
            say(f"  {told(endpoint.prompts)}")
        if records is not None:
            say(f"  records: {records}")
        for name, entry in endpoint.names.served.items():
            who = name if entry.name in ("", name) else f"{name}, as {entry.name}"
            say(f"  {who}: {entry.policy} ({entry.kind}), weights {entry.fingerprint[:12]}, {entry.base}")
        for role in local.left_to_provider:
            say(f"  {role}: not here, its provider answers")
        for note in endpoint.names.notes():
            say(f"  {note}")
        say("Ctrl-C stops it.")
        if not endpoint.names.shared:
            suggest(f"OPENAI_BASE_URL={endpoint.url} python my_app.py")
        endpoint.wait()


def _model(name: str, served: ServedModel, local: LocalPolicies) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "cotune",
        "root": served.base,
        "max_model_len": local.length(served.policy),
        "policy": served.policy.name,
        "version": served.policy.version,
        "kind": served.kind,
        "fingerprint": served.fingerprint,
        "base": {"model": served.base, "weights_sha256": served.base_sha256},
    }
