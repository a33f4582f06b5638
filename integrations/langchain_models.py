"""Chat models of LangChain that do not use the OpenAI SDK: recorded and answered at the methods every model implements.

A model of `langchain_openai` passes the SDK's waist and is left alone. Another model that makes its wire request with
that SDK all the same is recorded once, as what went over the wire.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
from langchain_core.language_models import BaseChatModel

from cotune.answering import answer, answer_blocking, failed, reason_of
from cotune.context import current_episode, identify, opened_call
from cotune.errors import RecordError
from cotune.integrations.langchain_messages import answer_of_result, chunk_of, request_of, result_of
from cotune.recorder import Answer, LiveCall

_MARK = "__cotune__"


def install() -> None:
    """Wrap all chat model classes, those there are and those to come."""
    for cls in _subclasses(BaseChatModel):
        _wrap(cls)
    own = BaseChatModel.__dict__.get("__init_subclass__")

    def init_subclass(cls: type[BaseChatModel], **kwargs: Any) -> None:
        if own is None:
            super(BaseChatModel, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        _wrap(cls)

    BaseChatModel.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _wrap(cls: type) -> None:
    if any(base.__name__ == "BaseChatOpenAI" for base in cls.__mro__):
        return
    for name, wrapper in (
        ("_generate", _generate),
        ("_agenerate", _agenerate),
        ("_stream", _stream),
        ("_astream", _astream),
    ):
        original = cls.__dict__.get(name)
        if callable(original) and not hasattr(original, _MARK):
            wrapped = functools.wraps(original)(wrapper(original))
            setattr(wrapped, _MARK, True)
            setattr(cls, name, wrapped)


def _open(model: Any, messages: list[Any], args: tuple[Any, ...], options: dict[str, Any]) -> LiveCall | None:
    """A call to record, or None: outside an episode, and within a call that another method has already opened."""
    episode = current_episode.get()
    if episode is None or opened_call.get() is not None:
        return None
    try:
        asked = {k: v for k, v in options.items() if k not in ("stop", "run_manager")}
        stop = args[0] if args else options.get("stop")
        return episode.start(identify(), request_of(model, messages, stop, asked))
    except RecordError as error:
        if episode.responder is not None:
            raise
        episode.warn("late_call", f"A call was made after its episode had ended and is not recorded. {error}")
        return None


def _generate(original: Callable[..., Any]) -> Callable[..., Any]:
    def generate(self: Any, messages: list[Any], *args: Any, **options: Any) -> Any:
        call = _open(self, messages, args, options)
        if call is None:
            return original(self, messages, *args, **options)
        found = _asked(call)
        if found is not None:
            return result_of(call, found)
        token = opened_call.set(call)
        try:
            result = original(self, messages, *args, **options)
        except BaseException as error:
            call.fail(*reason_of(error))
            raise
        finally:
            opened_call.reset(token)
        _record(call, result)
        return result

    return generate


def _agenerate(original: Callable[..., Any]) -> Callable[..., Any]:
    async def agenerate(self: Any, messages: list[Any], *args: Any, **options: Any) -> Any:
        call = _open(self, messages, args, options)
        if call is None:
            return await original(self, messages, *args, **options)
        found = await _asked_async(call)
        if found is not None:
            return result_of(call, found)
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

    return agenerate


def _stream(original: Callable[..., Any]) -> Callable[..., Any]:
    def stream(self: Any, messages: list[Any], *args: Any, **options: Any) -> Iterator[Any]:
        call = _open(self, messages, args, {**options, "stream": True})
        if call is None:
            yield from original(self, messages, *args, **options)
            return
        found = _asked(call)
        if found is not None:
            yield chunk_of(call, found)
            return
        chunks = []
        source = iter(original(self, messages, *args, **options))
        try:
            while (chunk := _step(call, source)) is not None:
                chunks.append(chunk)
                yield chunk
        except BaseException as error:
            call.fail(*reason_of(error), _part(chunks))
            raise
        _record(call, chunks)

    return stream


def _astream(original: Callable[..., Any]) -> Callable[..., Any]:
    async def astream(self: Any, messages: list[Any], *args: Any, **options: Any) -> AsyncIterator[Any]:
        call = _open(self, messages, args, {**options, "stream": True})
        if call is None:
            async for chunk in original(self, messages, *args, **options):
                yield chunk
            return
        found = await _asked_async(call)
        if found is not None:
            yield chunk_of(call, found)
            return
        chunks = []
        source = aiter(original(self, messages, *args, **options))
        try:
            while (chunk := await _step_async(call, source)) is not None:
                chunks.append(chunk)
                yield chunk
        except BaseException as error:
            call.fail(*reason_of(error), _part(chunks))
            raise
        finally:
            if hasattr(source, "aclose"):
                await source.aclose()
        _record(call, chunks)

    return astream


def _asked(call: LiveCall) -> Answer | None:
    try:
        found = answer_blocking(call)
    except BaseException as error:
        failed(call, error)
        raise
    if found is not None:
        call.finish(found)
    return found


async def _asked_async(call: LiveCall) -> Answer | None:
    try:
        found = await answer(call)
    except BaseException as error:
        failed(call, error)
        raise
    if found is not None:
        call.finish(found)
    return found


def _step(call: LiveCall, source: Iterator[Any]) -> Any:
    """The next chunk, with the call open; between steps the application's own code runs, without it."""
    token = opened_call.set(call)
    try:
        return next(source, None)
    finally:
        opened_call.reset(token)


async def _step_async(call: LiveCall, source: AsyncIterator[Any]) -> Any:
    token = opened_call.set(call)
    try:
        return await anext(source, None)
    finally:
        opened_call.reset(token)


def _record(call: LiveCall, result: Any) -> None:
    """End the call with what the model returned, unless its wire request has; a fault here is not the application's."""
    if call.ended:
        return
    try:
        found = answer_of_result(result)
    except Exception as error:  # noqa: BLE001
        call.fail("malformed", reason_of(error)[1])
        return
    call.finish(found)


def _part(chunks: list[Any]) -> Answer | None:
    """What a stream that was not read to its end says so far."""
    try:
        found = answer_of_result(chunks)
    except Exception:  # noqa: BLE001
        return None
    cut = (msgspec.structs.replace(candidate, finish_reason="interrupted") for candidate in found.candidates)
    return msgspec.structs.replace(found, candidates=tuple(cut))
