"""Chat models of LangChain that do not use the OpenAI SDK: recorded and answered at the methods every model implements.

A model of `langchain_openai` is recorded at the OpenAI SDK and left alone here. Another model that makes its wire
request with that SDK all the same is recorded once, as what went over the wire.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from langchain_core.language_models import BaseChatModel

from cotune.integrations.apps.langchain.messages import answer_of_result, chunk_of, request_of, result_of
from cotune.integrations.apps.patching import each_subclass, recorded, replace_method
from cotune.recording.model_calls import ask, ask_async, end_call, open_call, raised, step, step_async
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer


def install() -> None:
    """Wrap all chat model classes, those there are and those to come."""
    each_subclass(BaseChatModel, _wrap)


def _wrap(cls: type) -> None:
    if cls is BaseChatModel or any(base.__name__ == "BaseChatOpenAI" for base in cls.__mro__):
        return
    replace_method(cls, "_generate", functools.partial(_generate, awaited=False))
    replace_method(cls, "_agenerate", functools.partial(_generate, awaited=True))
    replace_method(cls, "_stream", _stream)
    replace_method(cls, "_astream", _astream)


def _open(model: Any, /, messages: list[Any], *args: Any, **options: Any) -> LiveCall | None:
    def request() -> dict[str, Any]:
        asked = {k: v for k, v in options.items() if k not in ("stop", "run_manager")}
        return request_of(model, messages, args[0] if args else options.get("stop"), asked)

    return open_call(request)


def _generate(original: Callable[..., Any], awaited: bool) -> Any:
    def returned(call: LiveCall, answer: Answer, /, *args: Any, **options: Any) -> Any:
        return result_of(call, answer)

    return recorded(original, awaited, _open, returned, answer_of_result)


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(self: Any, messages: list[Any], *args: Any, **options: Any) -> Iterator[Any]:
        call = _open(self, messages, *args, **{**options, "stream": True})
        if call is None:
            yield from original(self, messages, *args, **options)
            return
        found = ask(call)
        if found is not None:
            yield chunk_of(call, found)
            return
        chunks = []
        source = iter(original(self, messages, *args, **options))
        try:
            while (chunk := step(call, source)) is not None:
                chunks.append(chunk)
                yield chunk
        except BaseException as error:
            raised(call, error, _part(chunks))
            raise
        end_call(call, chunks, answer_of_result)

    return stream


def _astream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def astream(self: Any, messages: list[Any], *args: Any, **options: Any) -> AsyncIterator[Any]:
        call = _open(self, messages, *args, **{**options, "stream": True})
        if call is None:
            async for chunk in original(self, messages, *args, **options):
                yield chunk
            return
        found = await ask_async(call)
        if found is not None:
            yield chunk_of(call, found)
            return
        chunks = []
        source = aiter(original(self, messages, *args, **options))
        try:
            while (chunk := await step_async(call, source)) is not None:
                chunks.append(chunk)
                yield chunk
        except BaseException as error:
            raised(call, error, _part(chunks))
            raise
        finally:
            if hasattr(source, "aclose"):
                await source.aclose()
        end_call(call, chunks, answer_of_result)

    return astream


def _part(chunks: list[Any]) -> Answer | None:
    """What a stream that was not read to its end says so far."""
    try:
        found = answer_of_result(chunks)
    except Exception:  # noqa: BLE001
        return None
    cut = (msgspec.structs.replace(candidate, finish_reason="interrupted") for candidate in found.candidates)
    return msgspec.structs.replace(found, candidates=tuple(cut))
