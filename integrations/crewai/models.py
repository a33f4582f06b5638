"""CrewAI's models: every one is called by `call` or `acall`, which say for which agent.

A model on the OpenAI SDK is recorded and answered there, and only its role is taken here. Any other model
is recorded and answered here; what it sends over the OpenAI SDK all the same is recorded as it went over the wire.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from crewai.llms.base_llm import BaseLLM

from cotune.context import current_caller, current_episode, identify, opened_call
from cotune.integrations.crewai.messages import answer_of, request_of, returned
from cotune.integrations.crewai.scopes import at_work, caller_of, calling, outside_call, part_scope
from cotune.integrations.patching import each_subclass, replace_method
from cotune.recording.model_calls import ask, ask_async, end_call, observed, open_call
from cotune.recording.pending_call import CallerContext

_ARGUMENTS = ("messages", "tools", "callbacks", "available_functions", "from_task", "from_agent", "response_model")
_SDK = "OpenAICompletion"
"""CrewAI's class on the OpenAI SDK; its subclasses serve the providers that speak the same protocol."""


def install() -> None:
    """Wrap all model classes, those there are and those to come."""
    each_subclass(BaseLLM, _wrap)
    BaseLLM._handle_tool_execution = _tool(BaseLLM._handle_tool_execution)  # type: ignore[method-assign]
    BaseLLM.summarize_messages = _summary(BaseLLM.summarize_messages)  # type: ignore[method-assign]


def _wrap(cls: type) -> None:
    for name in ("call", "acall"):
        replace_method(cls, name, _call_or_acall)
    replace_method(cls, "get_input_tokens_count", _count)


def _call_or_acall(original: Callable[..., Any]) -> Callable[..., Any]:
    return _acall(original) if inspect.iscoroutinefunction(original) else _call(original)


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
        with at_work(part_scope("summarizer", inside=True)):
            return original(self, *args, **kwargs)

    return summarize_messages


def _call(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None or calling.get():
            return original(self, *args, **kwargs)
        asked = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        with _named(asked) as caller:
            live = None if _uses_openai_sdk(type(self)) else open_call(lambda: request_of(self, asked))
            if live is None:
                return _seen(caller, self, original(self, *args, **kwargs))
            found = ask(live)
            if found is not None:
                return returned(self, found, asked)
            with observed(live):
                value = original(self, *args, **kwargs)
            end_call(live, value, answer_of)
            return value

    return call


def _acall(original: Callable[..., Any]) -> Callable[..., Any]:
    async def acall(self: Any, *args: Any, **kwargs: Any) -> Any:
        if current_episode.get() is None or calling.get():
            return await original(self, *args, **kwargs)
        asked = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        with _named(asked) as caller:
            live = None if _uses_openai_sdk(type(self)) else open_call(lambda: request_of(self, asked))
            if live is None:
                return _seen(caller, self, await original(self, *args, **kwargs))
            found = await ask_async(live)
            if found is not None:
                return returned(self, found, asked)
            with observed(live):
                value = await original(self, *args, **kwargs)
            end_call(live, value, answer_of)
            return value

    return acall


@contextmanager
def _named(asked: Mapping[str, Any]) -> Iterator[CallerContext]:
    """The calls made inside are the agent's that is named, else the enclosing scope's."""
    caller = caller_of(asked.get("from_agent"), asked.get("from_task")) or identify()
    tokens = current_caller.set(caller), calling.set(True)
    try:
        yield caller
    finally:
        caller.done = True
        current_caller.reset(tokens[0])
        calling.reset(tokens[1])


def _uses_openai_sdk(cls: type) -> bool:
    return any(base.__name__ == _SDK and base.__module__.startswith("crewai.") for base in cls.__mro__)


def _seen(caller: CallerContext, model: Any, value: Any) -> Any:
    episode = current_episode.get()
    if not caller.calls and episode is not None and opened_call.get() is None and _uses_openai_sdk(type(model)):
        episode.warn(
            "unseen_call",
            f"A model answered role {caller.role!r} without a request that can be recorded: by a client of its own or "
            "from a cache.",
        )
    return value
