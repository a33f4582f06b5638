"""Records and answers model clients of AutoGen at `create` and `create_stream`.

Clients of `autogen_ext.models.openai` are left out here: their calls are recorded at the OpenAI SDK.
"""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from autogen_core.models import ChatCompletionClient, CreateResult

from cotune.integrations.apps.autogen.messages import (
    answer_of_result,
    edited_message,
    edited_tools,
    part_of,
    request_of,
    result_of,
)
from cotune.integrations.apps.clients import Arguments, Client
from cotune.integrations.apps.patching import bypasses_cache, each_subclass, replace_method
from cotune.prompts.chat_texts import ReplaceText
from cotune.recording.context import current_episode
from cotune.recording.model_calls import answer
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer

_CACHE = "ChatCompletionCache"
_OPENAI = "BaseOpenAIChatCompletionClient"


def install() -> None:
    """Wrap all model client classes, present and future."""
    each_subclass(ChatCompletionClient, _wrap)


def _wrap(cls: type) -> None:
    """Wrap the methods of one class of model clients, so that its calls are recorded.

    Two classes are not recorded here: the client of OpenAI, whose calls the OpenAI SDK's integration records, and the
    cache of answers, which asks another client. Classes are compared by name, because importing `autogen_ext` would
    load optional packages of the application.
    """
    if _is_of_autogen_ext(cls, _CACHE):
        replace_method(cls, "create", _bypass_cache("create"))
        replace_method(cls, "create_stream", _bypass_cache("create_stream"))
    elif _is_of_autogen_ext(cls, _OPENAI):
        replace_method(cls, "create", _silence_model_names)
    for base in cls.__mro__:
        if _is_of_autogen_ext(base, _CACHE) or _is_of_autogen_ext(base, _OPENAI):
            return
    if cls is not ChatCompletionClient:
        _CLIENT.hook(cls, acall="create", astream="create_stream")


def _is_of_autogen_ext(cls: type, name: str) -> bool:
    """Whether a class is the class of this name in AutoGen's package of extensions."""
    return cls.__name__ == name and cls.__module__.startswith("autogen_ext.")


def _silence_model_names(original: Any) -> Any:
    """Wrap `create` of OpenAI clients: silence AutoGen's warning about model names while policies answer."""

    async def create(self: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is not None and episode.responder is not None:
            silence_mismatch()
        return await original(self, *args, **options)

    return create


@functools.cache
def silence_mismatch() -> None:
    """Silence a warning of AutoGen that is wrong for policies.

    A provider answers under a longer model name with a date, a policy under the requested name. AutoGen warns of the
    missing date, and advises the name that was requested anyway.
    """
    warnings.filterwarnings("ignore", message="Resolved model mismatch", category=UserWarning)


def _bypass_cache(name: str) -> Any:
    """Wrap a method of AutoGen's answer cache: it asks the client behind the cache while the cache must not be used."""

    def wrapper(original: Any) -> Any:
        def asked(self: Any, *args: Any, **options: Any) -> Any:
            if bypasses_cache():
                return getattr(self.client, name)(*args, **options)
            return original(self, *args, **options)

        return asked

    return wrapper


def _stream_parts(call: LiveCall, answer: Answer) -> Iterator[Any]:
    result = result_of(answer)
    if isinstance(result.content, str) and result.content:
        yield result.content
    yield result


def _future_answer(call: LiveCall, options: Mapping[str, Any]) -> asyncio.Future[Answer | None] | None:
    """A future of the responder's answer, linked to the application's cancellation token."""
    token = options.get("cancellation_token")
    return None if token is None else token.link_future(asyncio.ensure_future(answer(call)))


def _edit_arguments(replace_text: ReplaceText, client: Any, /, messages: Any, *args: Any, **options: Any) -> Arguments:
    if options.get("tools"):
        options["tools"] = edited_tools(options["tools"], replace_text)
    return (client, [edited_message(message, replace_text) for message in messages], *args), options


_CLIENT = Client(
    request=lambda client, /, messages, *args, **options: request_of(client, messages, options),
    edited=_edit_arguments,
    fixed_format=True,
    reply=lambda call, answer, /, *args, **options: result_of(answer),
    # From the result of `create`, or from the parts of `create_stream`, of which the last is the result.
    answer=lambda result: answer_of_result(result[-1] if isinstance(result, list) and result else result),
    parts=_stream_parts,
    begun=lambda parts: part_of([part for part in parts if isinstance(part, str)]),
    ends=lambda part: isinstance(part, CreateResult),
    asking=_future_answer,
)
