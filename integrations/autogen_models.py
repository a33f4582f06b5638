"""Model clients of AutoGen that do not use the OpenAI SDK: recorded and answered at `create` and `create_stream`.

A client of `autogen_ext.models.openai` passes the SDK's waist and is left alone. Another client that makes its wire
request with that SDK all the same is recorded once, as what went over the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from autogen_core.models import ChatCompletionClient

from cotune.answering import answer, failed, reason_of
from cotune.context import current_episode, identify, opened_call
from cotune.errors import RecordError
from cotune.integrations.autogen_hooks import each_subclass, replace_method
from cotune.integrations.autogen_messages import answer_of_result, part_of, request_of, result_of
from cotune.recorder import Answer, LiveCall

_PASSED = {"BaseOpenAIChatCompletionClient", "ChatCompletionCache"}
"""Classes of autogen_ext whose calls are recorded elsewhere: on the wire, and at the client that a cache asks."""


def install() -> None:
    """Wrap all model client classes, those there are and those to come."""
    each_subclass(ChatCompletionClient, _wrap)


def _wrap(cls: type) -> None:
    if cls is ChatCompletionClient or any(_is_passed(base) for base in cls.__mro__):
        return
    replace_method(cls, "create", _create)
    replace_method(cls, "create_stream", _create_stream)


def _is_passed(cls: type) -> bool:
    return cls.__name__ in _PASSED and cls.__module__.startswith("autogen_ext.")


def _open(client: Any, messages: Any, options: dict[str, Any]) -> LiveCall | None:
    """A call to record, or None: outside an episode, and within a call that another method has already opened."""
    episode = current_episode.get()
    if episode is None or opened_call.get() is not None:
        return None
    try:
        return episode.start(identify(), request_of(client, messages, options))
    except RecordError as error:
        if episode.responder is not None:
            raise
        episode.warn("late_call", f"A call was made after its episode had ended and is not recorded. {error}")
    except (TypeError, ValueError, AttributeError, KeyError) as error:
        if episode.responder is not None:
            raise
        episode.warn("unread_call", "A request could not be read and is not recorded.", error)
    return None


def _create(original: Any) -> Any:
    async def create(self: Any, messages: Any, *args: Any, **options: Any) -> Any:
        call = _open(self, messages, options)
        if call is None:
            return await original(self, messages, *args, **options)
        found = await _asked(call, options)
        if found is not None:
            return result_of(found)
        token = opened_call.set(call)
        try:
            result = await original(self, messages, *args, **options)
        except BaseException as error:
            call.fail(*reason_of(error))
            raise
        finally:
            opened_call.reset(token)
        _record(call, result)
        return result

    return create


def _create_stream(original: Any) -> Any:
    async def create_stream(self: Any, messages: Any, *args: Any, **options: Any) -> AsyncIterator[Any]:
        call = _open(self, messages, {**options, "stream": True})
        found = await _asked(call, options) if call is not None else None
        if found is not None:
            result = result_of(found)
            if isinstance(result.content, str) and result.content:
                yield result.content
            yield result
            return
        source = original(self, messages, *args, **options)
        texts: list[str] = []
        try:
            while (part := await _step(call, source)) is not None:
                if isinstance(part, str):
                    texts.append(part)
                elif call is not None:
                    _record(call, part)
                yield part
        except BaseException as error:
            if call is not None:
                call.fail(*reason_of(error), part_of(texts))
            raise
        finally:
            if hasattr(source, "aclose"):
                await source.aclose()
        if call is not None and not call.ended:
            call.fail("malformed", "the stream ended without a CreateResult", part_of(texts))

    return create_stream


async def _asked(call: LiveCall, options: dict[str, Any]) -> Answer | None:
    """The responder's answer, which the application's cancellation token can cancel."""
    asking = asyncio.ensure_future(answer(call))
    token = options.get("cancellation_token")
    if token is not None:
        token.link_future(asking)
    try:
        found = await asking
    except BaseException as error:
        asking.cancel()
        failed(call, error)
        raise
    if found is not None:
        call.finish(found)
    return found


async def _step(call: LiveCall | None, source: Any) -> Any:
    """The next part, with the call open; between steps the application's own code runs, without it."""
    if call is None:
        return await anext(source, None)
    token = opened_call.set(call)
    try:
        return await anext(source, None)
    finally:
        opened_call.reset(token)


def _record(call: LiveCall, result: Any) -> None:
    """End the call with what the client returned, unless its wire request has; a fault is not the application's."""
    if call.ended:
        return
    try:
        found = answer_of_result(result)
    except Exception as error:  # noqa: BLE001
        call.fail("malformed", reason_of(error)[1])
        return
    call.finish(found)
