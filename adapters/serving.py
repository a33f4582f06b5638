"""Serves trained role policies over the OpenAI API: one model name per role."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from cotune.adapters.bases import Moved
from cotune.adapters.conversations import LocalResponder
from cotune.adapters.open_policies import LocalPolicies, ServedModel, open_local, with_aliases
from cotune.adapters.prompts import prompts_for, told
from cotune.errors import PromptTooLong, RequestRefused, SamplerError, SampleTimeout
from cotune.integrations.apps.openai.chat_request import ChatRequest
from cotune.integrations.apps.openai.forms import CHAT
from cotune.integrations.web.http.bodies import read_json
from cotune.integrations.web.http.limits import BodyLimits
from cotune.integrations.web.http.requests import (
    Access,
    ClientGone,
    RequestError,
    application,
    json_response,
    refusal,
    unless_gone,
)
from cotune.integrations.web.http.server import RunningServer, running, stopped_by_signals
from cotune.prompts.edits import Prompts
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveCall, LiveEpisode, Nowhere
from cotune.records.answers import Answer
from cotune.records.structs import Task
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.request_params import template_options
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
    local: LocalPolicies, token: str | None = None, limits: BodyLimits | None = None, prompts: Prompts | None = None
) -> Starlette:
    """The ASGI application, which answers with edited `prompts`. With a `token`, all but /health needs
    `Authorization: Bearer TOKEN`."""
    access = Access(token)
    chat = ChatEndpoint(local, access, limits or BodyLimits(), prompts)

    async def models(request: Request) -> Response:
        access.check(request.scope)
        return json_response({"object": "list", "data": [_model(n, s, local) for n, s in local.served.items()]})

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
    _running: RunningServer[LocalPolicies]
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
    **options: Any,
) -> contextlib.AbstractContextManager[Endpoint]:
    """Serve an export, a model folder or a Hugging Face id from a background thread.

    `base` says where base models of an export are now, if elsewhere; `names` are further names of a plain model,
    `tool_format` is how it writes tool calls; `prompts` and `any_prompts` are as of `serve`, `options` those of
    `serving_local`. Raises ConfigError, AdapterError, SyncError when it cannot start.
    """
    chosen = prompts_for(source, prompts, any_prompts=any_prompts)
    opened = functools.partial(open_local, source, base=base, names=names, tool_format=tool_format)
    return serving_local(opened, prompts=chosen, **options)


@contextlib.contextmanager
def serving_local(
    opened: Callable[[], Coroutine[Any, Any, LocalPolicies]],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str | None = None,
    aliases: Mapping[str, str] | None = None,
    limits: BodyLimits | None = None,
    prompts: Prompts | None = None,
) -> Iterator[Endpoint]:
    """Serve the policies that `opened` opens, in the server's loop, and close them with it; port 0 takes a free one.

    Entered once requests are answered. `aliases` are names under which a role answers too.
    """

    @contextlib.asynccontextmanager
    async def opening() -> AsyncIterator[tuple[ASGIApp, LocalPolicies]]:
        local = await opened()
        try:
            named = with_aliases(local, aliases or {})
            yield build_app(named, token, limits, prompts), named
        finally:
            await local.aclose()

    with running(opening, host=host, port=port, token=token, name="cotune-serve") as found:
        yield Endpoint(f"{found.url}/v1", found.port, found.opened, found, prompts)


def serve(
    source: str | Path,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    model: Moved = None,
    names: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    tool_format: str | None = None,
    max_body: int = 16 << 20,
    max_values: int = 250_000,
    prompts: str | Path | None = None,
    any_prompts: bool = False,
    say: Callable[[str], None] = tell,
) -> None:
    """Serve an export, or a plain model, over an OpenAI-compatible API until Ctrl-C, SIGTERM or SIGHUP.

    The names of the models are the roles of an export; of a plain model its own and `names`. By `aliases` a role
    answers for further names. `model` is the base model of an export where it lies elsewhere than the export says (of
    several, a mapping from the old place to the new one), `tool_format` how the model writes tool calls. Requests need
    `token` (default: the environment's COTUNE_TOKEN), if there is one, and have at most `max_body` bytes and
    `max_values` JSON values. Requests are answered with the edited prompts that the export was trained with, if any, or
    with those of the file `prompts`; others than it was trained with need `any_prompts`. `say` receives the address and
    the policy of each name. Raises ConfigError, AdapterError, SyncError when it cannot start, EngineLost.

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
        limits=BodyLimits(max_body, max_values),
        prompts=prompts,
        any_prompts=any_prompts,
    )
    with opened as endpoint, stopped_by_signals():
        say(f"Serving {source} at {endpoint.url}")
        local = endpoint.local
        if endpoint.prompts is not None:
            say(f"  {told(endpoint.prompts)}")
        for name, entry in local.served.items():
            who = name if name == entry.name else f"{name}, as {entry.name}"
            say(f"  {who}: {entry.policy} ({entry.kind}), weights {entry.fingerprint[:12]}, {entry.base}")
        for role in local.left_to_provider:
            say(f"  {role}: not here, its provider answers")
        if local.others is not None:
            say(f"  any other name: {local.others.policy}, the untrained model ({local.others.base})")
            say("  where the application asks for another name, give it to a role: --as NAME=ROLE")
            say("  roles that ask for one name are told apart by cotune.deployed only, in the application's process")
        say("Ctrl-C stops it.")
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


class ChatEndpoint:
    """POST /v1/chat/completions over policies, as an ASGI application.

    `counts` tells requests by outcome, `not_enforced` the fields answered without.
    """

    def __init__(
        self, local: LocalPolicies, access: Access, limits: BodyLimits, prompts: Prompts | None = None
    ) -> None:
        self.local = local
        self.access = access
        self.limits = limits
        self.responder = _Responder(local)
        self.in_flight = 0
        self.counts: Counter[str] = Counter()
        self.not_enforced: Counter[str] = Counter()
        self.unedited: Counter[str] = Counter()
        """Requests that do not have the texts that the prompts edit, by reason."""
        self._episode = LiveEpisode(Nowhere(), Task(id="serve", input=None), workflow="serve", prompts=prompts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.in_flight += 1
        try:
            await self._serve(scope, receive, send)
        except RequestError as error:
            self.counts[f"refused_{error.status}"] += 1
            await refusal(error)(scope, receive, send)
        finally:
            self.in_flight -= 1

    def find(self, model: str) -> ServedModel:
        """The policy of a model name. Raises RequestError (404) with the known names."""
        found = self.local.served.get(model)
        if found is not None:
            return found
        if self.local.others is None or model in self.local.left_to_provider:
            text = f"There is no model {model!r} here; the models are: {', '.join(self.local.served)}."
            raise RequestError(404, text, param="model", code="model_not_found")
        return self.local.others

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = await read_json(scope, receive, self.access, ChatRequest, self.limits)
        try:
            content, kind = await unless_gone(receive, functools.partial(self._answer, request))
        except ClientGone:
            self.counts["disconnected"] += 1
            return
        self.counts["ok"] += 1
        headers = {"content-type": kind, **({"cache-control": "no-cache"} if request.stream else {})}
        await Response(content, headers=headers)(scope, receive, send)

    async def _answer(self, request: ChatRequest) -> tuple[bytes, str]:
        found = self.find(request.model)
        # A further name of a role is that role's: its prompts are edited too.
        role = found.name if request.model in self.local.served else request.model
        asked = msgspec.structs.asdict(request)
        chat = self.responder.chat_of(request.model)
        # The responder logs the options that it leaves out.
        self.not_enforced.update(name for name in template_options(asked) if not chat.reads(name))
        call = LiveCall(self._episode, CallerContext(role, "serve"), 0, 0, asked)
        self._episode.edit(call, asked)
        if call.unedited:
            self.unedited[call.unedited] += 1
        try:
            held = [await self.responder.respond(call)]
        except SampleTimeout as error:
            raise RequestError(504, str(error), code="timeout") from None
        except RequestRefused as error:
            raise RequestError(400, str(error), code="invalid_value") from None
        except SamplerError as error:
            logger.error("The sampler failed: %s", error)
            raise RequestError(500, str(error), code="sampler_error") from None
        except RecursionError:
            raise RequestError(400, "The body is nested too deeply.", code="invalid_value") from None
        return await asyncio.to_thread(_content, call, asked, held)


def _content(call: LiveCall, asked: Mapping[str, Any], held: list[Answer | None]) -> tuple[bytes, str]:
    """The answer that is `held`, as the request asks for it. A long answer takes a while to be freed: taken out of the
    list, it is freed in this thread."""
    answer = held.pop()
    assert answer is not None, "find leaves no model to a provider"
    return CHAT.content(call, answer, asked)


class _Responder(LocalResponder):
    """Refuses a request that cannot be rendered, and names the field."""

    async def prepare(self, call: LiveCall) -> tuple[list[int], SamplingParams]:
        try:
            return await super().prepare(call)
        except PromptTooLong as error:
            raise RequestError(400, error.cause, param="messages", code="context_length_exceeded") from None
        except RequestRefused:
            raise
        except SamplerError as error:
            raise RequestError(400, str(error), param="messages", code="invalid_value") from None
