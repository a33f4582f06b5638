"""CrewAI's models: every one is called by `call` or `acall`, which say for which agent.

A model on the OpenAI SDK is recorded and answered at the SDK's waist, and only its role is taken here. Any other model
is recorded and answered here; what it sends over the OpenAI SDK all the same is recorded as it went over the wire.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from crewai.llms.base_llm import BaseLLM

from cotune.answering import answer, answer_blocking, failed, reason_of
from cotune.context import Mark, current_episode, current_mark, identify, opened_call
from cotune.errors import RecordError
from cotune.integrations.crewai_scopes import calling, entered, mark_of, outside_call, part_scope
from cotune.integrations.crewai_values import answer_of, request_of, returned
from cotune.recorder import Answer, LiveCall

_MARK = "__cotune__"
_ARGUMENTS = ("messages", "tools", "callbacks", "available_functions", "from_task", "from_agent", "response_model")
_SDK = "OpenAICompletion"
"""CrewAI's class on the OpenAI SDK; its subclasses serve the providers that speak the same protocol."""


def install() -> None:
    """Wrap all model classes, those there are and those to come."""
    for cls in (BaseLLM, *_subclasses(BaseLLM)):
        _wrap(cls)
    own = BaseLLM.__dict__.get("__init_subclass__")

    def init_subclass(cls: type[BaseLLM], **kwargs: Any) -> None:
        if own is None:
            super(BaseLLM, cls).__init_subclass__(**kwargs)
        else:
            own.__get__(None, cls)(**kwargs)
        _wrap(cls)

    BaseLLM.__init_subclass__ = classmethod(init_subclass)  # type: ignore[assignment]
    BaseLLM._handle_tool_execution = _tool(BaseLLM._handle_tool_execution)
    BaseLLM.summarize_messages = _summary(BaseLLM.summarize_messages)


def _subclasses(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _subclasses(sub)


def _wrap(cls: type) -> None:
    for name in ("call", "acall"):
        original = cls.__dict__.get(name)
        if original is None or hasattr(original, _MARK) or getattr(original, "__isabstractmethod__", False):
            continue
        make = _acall if inspect.iscoroutinefunction(original) else _call
        wrapped = functools.wraps(original)(make(original))
        setattr(wrapped, _MARK, True)
        type.__setattr__(cls, name, wrapped)

    counted = cls.__dict__.get("get_input_tokens_count")
    if counted is not None and not hasattr(counted, _MARK):
        wrapped = functools.wraps(counted)(_count(counted))
        setattr(wrapped, _MARK, True)
        type.__setattr__(cls, "get_input_tokens_count", wrapped)


def _count(original: Callable[..., int]) -> Callable[..., int]:
    """Before each call CrewAI has the provider count the prompt's tokens. Where policies answer, the prompt is not sent
    there: four characters are taken for a token, as CrewAI does for providers that cannot count."""

    def get_input_tokens_count(self: Any, messages: Any, *args: Any, **kwargs: Any) -> int:
        episode = current_episode.get()
        if episode is None or episode.responder is None:
            return original(self, messages, *args, **kwargs)
        texts = [messages] if isinstance(messages, str) else [str(m.get("content") or "") for m in messages]
        return (sum(len(text) for text in texts) + 3) // 4

    return get_input_tokens_count


def _tool(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def handle_tool_execution(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, *args, **kwargs)
        with outside_call():
            return original(self, *args, **kwargs)

    return handle_tool_execution


def _summary(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def summarize_messages(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None:
            return original(self, *args, **kwargs)
        with entered(part_scope("summarizer", inside=True)):
            return original(self, *args, **kwargs)

    return summarize_messages


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None or calling.get():
            return original(self, *args, **kwargs)
        asked = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        with _named(asked) as mark:
            live = _open(self, asked, mark)
            if live is None:
                return _seen(mark, self, original(self, *args, **kwargs))
            try:
                found = answer_blocking(live)
            except BaseException as error:
                failed(live, error)
                raise
            if found is not None:
                return _answered(self, live, found, asked)
            with _recording(live):
                return _record(live, original(self, *args, **kwargs))

    return call


def _acall(original: Callable[..., Any]) -> Callable[..., Any]:
    async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None or calling.get():
            return await original(self, *args, **kwargs)
        asked = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        with _named(asked) as mark:
            live = _open(self, asked, mark)
            if live is None:
                return _seen(mark, self, await original(self, *args, **kwargs))
            try:
                found = await answer(live)
            except BaseException as error:
                failed(live, error)
                raise
            if found is not None:
                return _answered(self, live, found, asked)
            with _recording(live):
                return _record(live, await original(self, *args, **kwargs))

    return acall


@contextmanager
def _named(asked: Mapping[str, Any]) -> Iterator[Mark]:
    """Mark the calls made inside with who makes them, which is the enclosing scope where no agent is named."""
    mark = mark_of(asked.get("from_agent"), asked.get("from_task")) or identify()
    tokens = current_mark.set(mark), calling.set(True)
    try:
        yield mark
    finally:
        mark.done = True
        current_mark.reset(tokens[0])
        calling.reset(tokens[1])


def _open(model: Any, asked: Mapping[str, Any], mark: Mark) -> LiveCall | None:
    """A call to record, or None: for a model on the SDK's waist, and within a call that is open already."""
    episode = current_episode.get()
    if episode is None or opened_call.get() is not None or _on_waist(type(model)):
        return None
    try:
        return episode.start(identify(), request_of(model, asked))
    except RecordError as error:
        if episode.responder is not None:
            raise
        episode.warn("late_call", f"A call was made after its episode had ended and is not recorded. {error}")
        return None


@functools.cache
def _on_waist(cls: type) -> bool:
    return any(base.__name__ == _SDK and base.__module__.startswith("crewai.") for base in cls.__mro__)


def _seen(mark: Mark, model: Any, value: Any) -> Any:
    episode = current_episode.get()
    if not mark.calls and episode is not None and opened_call.get() is None and _on_waist(type(model)):
        episode.warn(
            "unseen_call",
            f"A model answered role {mark.role!r} without a request that can be recorded: by a client of its own or "
            "from a cache.",
        )
    return value


def _answered(model: Any, call: LiveCall, found: Answer, asked: Mapping[str, Any]) -> Any:
    call.finish(found)
    return returned(model, found, asked)


@contextmanager
def _recording(call: LiveCall) -> Iterator[None]:
    token = opened_call.set(call)
    try:
        yield
    except BaseException as error:
        call.fail(*reason_of(error))
        raise
    finally:
        opened_call.reset(token)


def _record(call: LiveCall, value: Any) -> Any:
    """End the call with what the model returned, unless its wire request has; a fault here is not the application's."""
    if not call.ended:
        try:
            call.finish(answer_of(value))
        except Exception as error:  # noqa: BLE001
            call.fail("malformed", reason_of(error)[1])
    return value
