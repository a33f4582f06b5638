"""Model clients of AutoGen that do not use the OpenAI SDK: recorded and answered at `create` and `create_stream`.

A client of `autogen_ext.models.openai` is recorded at the OpenAI SDK and left alone here. Another client that makes
its wire request with that SDK all the same is recorded once, as what went over the wire.
"""

from __future__ import annotations

import asyncio
import functools
import warnings
from collections.abc import AsyncIterator
from typing import Any

from autogen_core.models import ChatCompletionClient

from cotune.integrations.apps.autogen.messages import answer_of_result, part_of, request_of, result_of
from cotune.integrations.apps.patching import cache_left_aside, each_subclass, replace_method
from cotune.recording.context import current_episode
from cotune.recording.model_calls import answer, ask_async, end_call, observed, open_call, raised, step_async
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer

_CACHE = "ChatCompletionCache"
_OPENAI = "BaseOpenAIChatCompletionClient"
_PASSED = {_OPENAI, _CACHE}
"""Classes of autogen_ext whose calls are recorded elsewhere: on the wire, and at the client that a cache asks."""


def install() -> None:
    """Wrap all model client classes, those there are and those to come."""
    each_subclass(ChatCompletionClient, _wrap)


def _wrap(cls: type) -> None:
    if cls.__name__ == _CACHE and cls.__module__.startswith("autogen_ext."):
        replace_method(cls, "create", _past_cache("create"))
        replace_method(cls, "create_stream", _past_cache("create_stream"))
    if cls.__name__ == _OPENAI and cls.__module__.startswith("autogen_ext."):
        replace_method(cls, "create", _under_any_name)
    passed = any(base.__name__ in _PASSED and base.__module__.startswith("autogen_ext.") for base in cls.__mro__)
    if passed or cls is ChatCompletionClient:
        return
    replace_method(cls, "create", _create)
    replace_method(cls, "create_stream", _create_stream)


def _under_any_name(original: Any) -> Any:
    async def create(self: Any, *args: Any, **options: Any) -> Any:
        episode = current_episode.get()
        if episode is not None and episode.responder is not None:
            silence_mismatch()
        return await original(self, *args, **options)

    return create


@functools.cache
def silence_mismatch() -> None:
    """A policy answers under the very name that was asked for, a provider under a longer one with a date: AutoGen warns
    where that is missing, and advises the name that was asked for."""
    warnings.filterwarnings("ignore", message="Resolved model mismatch", category=UserWarning)


def _past_cache(name: str) -> Any:
    def wrapper(original: Any) -> Any:
        def asked(self: Any, *args: Any, **options: Any) -> Any:
            if cache_left_aside():
                return getattr(self.client, name)(*args, **options)
            return original(self, *args, **options)

        return asked

    return wrapper


def _create(original: Any) -> Any:
    async def create(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        call = open_call(lambda: request_of(self, messages, options))
        if call is None:
            return await original(self, messages, *args, **options)
        found = await _ask(call, options)
        if found is not None:
            return result_of(found)
        with observed(call):
            result = await original(self, messages, *args, **options)
        end_call(call, result, answer_of_result)
        return result

    return create


def _create_stream(original: Any) -> Any:
    async def create_stream(self: Any, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        call = open_call(lambda: request_of(self, messages, {**options, "stream": True}))
        found = await _ask(call, options) if call is not None else None
        if found is not None:
            result = result_of(found)
            if isinstance(result.content, str) and result.content:
                yield result.content
            yield result
            return
        source = original(self, messages, *args, **options)
        texts: list[str] = []
        try:
            while (part := await (anext(source, None) if call is None else step_async(call, source))) is not None:
                if isinstance(part, str):
                    texts.append(part)
                elif call is not None:
                    end_call(call, part, answer_of_result)
                yield part
        except BaseException as error:
            if call is not None:
                raised(call, error, part_of(texts))
            raise
        finally:
            if hasattr(source, "aclose"):
                await source.aclose()
        if call is not None and not call.ended:
            call.fail("malformed", "the stream ended without a CreateResult", part_of(texts))

    return create_stream


async def _ask(call: LiveCall, options: dict[str, Any]) -> Answer | None:
    """The responder's answer, which the application's cancellation token can cancel."""
    asking = asyncio.ensure_future(answer(call))
    token = options.get("cancellation_token")
    if token is not None:
        token.link_future(asking)
    try:
        return await ask_async(call, asking)
    finally:
        asking.cancel()
