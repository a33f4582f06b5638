"""Serves trained role policies over the OpenAI API: one model name per role."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from cotune.adapters.bases import Moved
from cotune.adapters.chat_endpoint import ChatEndpoint, Recording
from cotune.adapters.model_names import ModelNames, name_models
from cotune.adapters.open_policies import LocalPolicies, ServedModel, open_local
from cotune.adapters.prompts import prompts_for, prompts_text
from cotune.collect.open_sink import open_sink
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import (
    Access,
    RequestError,
    application,
    json_response,
)
from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.near_names import check_arguments
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
_ENGINE_CHECK_SECONDS = 0.5
"""Seconds between two checks that the engine still runs."""


def build_app(
    local: LocalPolicies,
    token: str | None = None,
    limits: BodyLimits | None = None,
    prompts: Prompts | None = None,
    recording: Recording | None = None,
    names: ModelNames | None = None,
) -> Starlette:
    """The ASGI application of a server.

    `names` choose the policy for each model name; `prompts` are the edited prompts to answer with. With a `token`, all
    paths except /health need `Authorization: Bearer TOKEN`.
    """
    access = Access(token)
    chat = ChatEndpoint(local, access, limits or BodyLimits(), prompts, recording, names)

    async def models(request: Request) -> Response:
        access.check(request.scope)
        entries = [_model_entry(name, served, local) for name, served in chat.names.served.items()]
        return json_response({"object": "list", "data": entries})

    async def model(request: Request) -> Response:
        access.check(request.scope)
        name = request.path_params["name"]
        return json_response(_model_entry(name, chat.find(name), local))

    async def responses(request: Request) -> Response:
        access.check(request.scope)
        raise RequestError(404, _NO_RESPONSES, code="not_found")

    async def health(request: Request) -> Response:
        """GET /health: the state of the server and its counts, for monitors. It needs no token. A server that has no
        token refuses it to pages of other sites.
        """
        access.check_local(request.scope)
        info = await local.sampler.info()
        counts = {"requests": chat.counts, "not_enforced": chat.not_enforced, "unlisted": chat.responder.unlisted}
        state = {
            "conversations": chat.responder.conversations.kept(),
            "engine_restarts": sum(engine.restarts for engine in local.engines),
        }
        if prompts is not None:
            state |= {"prompts": prompts.id, "unedited": chat.unedited}
        if local.manifest is not None:
            state["export_version"] = local.manifest.export_version
        return json_response({"status": "ok", "sampler": info.name, "in_flight": chat.in_flight, **state, **counts})

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
    """A running server of `local`."""

    url: str
    """The base URL for OpenAI clients."""
    port: int
    local: LocalPolicies
    names: ModelNames
    """The policy for each model name."""
    _running: RunningServer[tuple[LocalPolicies, ModelNames]]
    prompts: Prompts | None = None
    """The edited prompts that it answers with."""

    def wait(self) -> None:
        """Block until the server stops. Raises EngineLost if an engine ends too often."""
        while not self._running.wait(_ENGINE_CHECK_SECONDS):
            # `engine()` restarts an engine that has ended, so that the next request need not wait for it.
            for engine in self.local.engines:
                engine.engine()


class ServeOptions(TypedDict, total=False):
    """Keyword arguments of `serve` and `serving`: the policies, their names, and the recording of requests."""

    model: Moved
    names: Sequence[str]
    tool_format: str | None
    aliases: Mapping[str, str] | None
    default: str
    prompts: Prompts | str | Path | None
    any_prompts: bool
    records: str | Path | None
    app: str
    redactor: Redactor | None


@dataclass(frozen=True, kw_only=True)
class Answers:
    """How an endpoint answers requests and records them."""

    aliases: Mapping[str, str] | None = None
    """Further names for roles."""
    default: str = ""
    """The policy that answers all other names; empty to refuse them."""
    prompts: Prompts | None = None
    """The edited prompts that it answers with."""
    records: str | Path | None = None
    """Address of a store or a collector; None to record nothing."""
    app: str = ""
    """The application that the records belong to."""
    redactors: Sequence[Redactor] = ()


def serving(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limits: BodyLimits | None = None,
    **options: Unpack[ServeOptions],
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve an export, a model folder or a Hugging Face id from a background thread; `options` as in `serve`.

    Raises ConfigError, AdapterError, SyncError if it cannot start.
    """
    check_arguments(options, ServeOptions.__annotations__)
    default = options.get("default", "")
    redactor = options.get("redactor")
    answers = Answers(
        aliases=options.get("aliases"),
        default=default,
        prompts=prompts_for(source, options.get("prompts"), any_prompts=options.get("any_prompts", False)),
        records=options.get("records"),
        app=options.get("app", ""),
        redactors=() if redactor is None else (check_redactor(redactor),),
    )
    open_policies = functools.partial(
        open_local,
        source,
        base=options.get("model"),
        names=options.get("names", ()),
        tool_format=options.get("tool_format"),
        untrained=default == UNTRAINED.name,
    )
    return serving_local(open_policies, answers, host=host, port=port, token=token, limits=limits)


@contextlib.contextmanager
def serving_local(
    open_policies: Callable[[], Coroutine[Any, Any, LocalPolicies]],
    answers: Answers | None = None,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    limits: BodyLimits | None = None,
) -> Iterator[Endpoint]:
    """Serve policies in a background thread. The block starts once requests are answered.

    `open_policies` is awaited in the server's event loop; the server closes the policies when it stops. Port 0 takes a
    free port.
    """
    answers = answers or Answers()

    @contextlib.asynccontextmanager
    async def open_app() -> AsyncIterator[tuple[ASGIApp, tuple[LocalPolicies, ModelNames]]]:
        """Open the policies and build the application that serves them. Yields the application, and what the `Endpoint`
        gets. At the end, close the policies, so that their memory and processes are freed even if building fails.
        """
        local = await open_policies()
        try:
            names = name_models(local, answers.aliases, answers.default, prompts=answers.prompts is not None)
            with contextlib.ExitStack() as stack:
                recording = None
                if answers.records is not None:
                    sink = stack.enter_context(open_sink(answers.records, answers.app))
                    recording = Recording(sink, answers.app, answers.redactors)
                yield build_app(local, token, limits, answers.prompts, recording, names), (local, names)
        finally:
            await local.aclose()

    with running(open_app, host=host, port=port, token=token, name="cotune-serve") as server:
        local, names = server.opened
        yield Endpoint(
            url=f"{server.url}/v1",
            port=server.port,
            local=local,
            names=names,
            _running=server,
            prompts=answers.prompts,
        )


def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    max_body: int = 16 << 20,
    say: Callable[[str], None] = tell,
    **options: Unpack[ServeOptions],
) -> None:
    """Serve an export, or a plain model, over an OpenAI-compatible API until Ctrl-C, SIGTERM or SIGHUP.

    An export is served under the names of its roles. A model name that only one role asked for in training, such as
    `gpt-4o-mini`, leads to that role too. A plain model has its own name and `names`. `aliases` are further names for
    roles. `default` names the policy that answers all other names, or is "base" for the untrained model. Without it
    they are refused, unless the only policy of the export played every recorded role. `model` is the present place of
    an export's base model if it was moved (for several, a mapping from the old place to the new one). `tool_format` is
    the format of the model's tool calls. Requests need `token` (default: COTUNE_TOKEN of the environment), if there is
    one, and have at most `max_body` bytes.

    Requests are answered with the edited prompts that the export was trained with, if any, or with the prompts of the
    file `prompts`. Prompts that it was not trained with need `any_prompts=True`. With `records`, the address of a store
    or of a collector (for the application `app`), requests are recorded, after `redactor`. `say` receives the address
    and the policy of each name. Raises ConfigError, AdapterError, SyncError if it cannot start, and EngineLost if an
    engine ends too often.

    ```python
    cotune.serve("adapters/", port=8000, aliases={"gpt-4o-mini": "writer"})
    ```
    """
    token = token or os.environ.get("COTUNE_TOKEN")
    server = serving(source, host=host, port=port, token=token, limits=BodyLimits(max_body), **options)
    with server as endpoint, stopped_by_signals():
        say(f"Serving {source} at {endpoint.url}")
        local = endpoint.local
        if local.manifest is not None:
            say(f"  {local.manifest.title}")
        if endpoint.prompts is not None:
            say(f"  {prompts_text(endpoint.prompts)}")
        if options.get("records") is not None:
            say(f"  records: {options['records']}")
        for name, entry in endpoint.names.served.items():
            name_and_role = name if entry.name in ("", name) else f"{name}, as {entry.name}"
            say(f"  {name_and_role}: {entry.policy} ({entry.kind}), weights {entry.fingerprint[:12]}, {entry.base}")
        for role in local.left_to_provider:
            say(f"  {role}: not here, its provider answers")
        for note in endpoint.names.notes():
            say(f"  {note}")
        say("Ctrl-C stops it.")
        # Names that several roles ask for are refused, so an application with these names does not run unchanged.
        if not endpoint.names.ambiguous:
            suggest(f"OPENAI_BASE_URL={endpoint.url} python my_app.py")
        endpoint.wait()


def _model_entry(name: str, served: ServedModel, local: LocalPolicies) -> dict[str, Any]:
    """The object of /v1/models for one model name."""
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
