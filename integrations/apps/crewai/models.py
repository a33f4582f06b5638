"""CrewAI's models: every one is called by `call` or `acall`, which say for which agent.

A model on the OpenAI SDK is recorded and answered there, and only its role is taken here. Any other model
is recorded and answered here; what it sends over the OpenAI SDK all the same is recorded as it went over the wire.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from crewai.llms.base_llm import BaseLLM

from cotune.integrations.apps.crewai.messages import answer_of, request_of, returned
from cotune.integrations.apps.crewai.scopes import at_work, caller_of, calling, outside_call, part_scope
from cotune.integrations.apps.patching import each_subclass, inside, recorded, replace_method
from cotune.recording.context import current_caller, current_episode, identify, opened_call
from cotune.recording.model_calls import open_call
from cotune.recording.recorder import LiveCall
from cotune.records.answers import Answer
from cotune.runtime.context_vars import setting

_ARGUMENTS = ("messages", "tools", "callbacks", "available_functions", "from_task", "from_agent", "response_model")
_SDK = "OpenAICompletion"
"""CrewAI's class on the OpenAI SDK; its subclasses serve the providers that speak the same protocol."""


def install() -> None:
    """Wrap all model classes, those there are and those to come."""
    each_subclass(BaseLLM, _wrap)
    for name, context in (
        ("_handle_tool_execution", lambda *args, **kwargs: outside_call()),
        ("summarize_messages", lambda *args, **kwargs: at_work(part_scope("summarizer", inside=True))),
    ):
        setattr(BaseLLM, name, inside(getattr(BaseLLM, name), context))


def _wrap(cls: type) -> None:
    for name in ("call", "acall"):
        replace_method(cls, name, functools.partial(_model_call, awaited=name == "acall"))
    replace_method(cls, "get_input_tokens_count", _count)


def _model_call(original: Callable[..., Any], awaited: bool) -> Callable[..., Any]:
    def context(self: Any, *args: Any, **kwargs: Any) -> AbstractContextManager[None] | None:
        return None if calling.get() else _named(self, _asked(args, kwargs))

    def opened(self: Any, *args: Any, **kwargs: Any) -> LiveCall | None:
        if calling.get() is not self or _uses_openai_sdk(type(self)):
            return None
        return open_call(lambda: request_of(self, _asked(args, kwargs)))

    def result_of(call: LiveCall, answer: Answer, self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return returned(self, answer, _asked(args, kwargs))

    return inside(recorded(original, awaited, opened, result_of, answer_of), context)


def _asked(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


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


@contextmanager
def _named(model: Any, asked: Mapping[str, Any]) -> Iterator[None]:
    """The calls made inside are the agent's that is named, else the enclosing scope's."""
    caller = caller_of(asked.get("from_agent"), asked.get("from_task")) or identify()
    try:
        with setting(current_caller, caller), setting(calling, model):
            yield
        episode = current_episode.get()
        if not caller.calls and episode is not None and opened_call.get() is None and _uses_openai_sdk(type(model)):
            episode.warn(
                "unseen_call",
                f"A model answered role {caller.role!r} without a request that can be recorded: by a client of its own "
                "or from a cache.",
            )
    finally:
        caller.done = True


def _uses_openai_sdk(cls: type) -> bool:
    return any(base.__name__ == _SDK and base.__module__.startswith("crewai.") for base in cls.__mro__)
