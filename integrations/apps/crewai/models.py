"""CrewAI's models: every one is called by `call` or `acall`, which say for which agent.

A model on the OpenAI SDK is recorded and answered there, and only its role is taken here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
from crewai.llms.base_llm import BaseLLM

from cotune.integrations.apps.clients import Arguments, Client
from cotune.integrations.apps.crewai.messages import answer_of, edited_arguments, request_of, returned
from cotune.integrations.apps.crewai.scopes import at_work, caller_of, calling_model, outside_call, part_scope
from cotune.integrations.apps.patching import each_subclass, inside, replace_method
from cotune.prompts.chat_texts import Said
from cotune.recording.context import current_caller, current_episode, identify, opened_call
from cotune.runtime.user_code import setting

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
    replace_method(cls, "call", lambda original: inside(_CLIENT.call(original), _named_call))
    replace_method(cls, "acall", lambda original: inside(_CLIENT.acall(original), _named_call))
    replace_method(cls, "get_input_tokens_count", _count)


def _named_call(model: Any, /, *args: Any, **options: Any) -> AbstractContextManager[None] | None:
    return None if calling_model() is not None else _named(model, _asked(args, options))


def _request(model: Any, /, *args: Any, **options: Any) -> dict[str, Any] | None:
    if calling_model() is not model or _uses_openai_sdk(type(model)):
        return None
    return request_of(model, _asked(args, options))


def _edited(said: Said, model: Any, /, *args: Any, **options: Any) -> Arguments:
    made = edited_arguments(_asked(args, options), said)
    # A class may have names of its own for what it is given by place.
    placed = [made.pop(name) for name in _ARGUMENTS[: len(args)]]
    return (model, *placed, *args[len(placed) :]), made


_CLIENT = Client(
    request=_request,
    edited=_edited,
    fixed_format=True,
    reply=lambda call, found, model, /, *args, **options: returned(model, found, _asked(args, options)),
    answer=answer_of,
)


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
    known = caller_of(asked.get("from_agent"), asked.get("from_task")) or identify()
    # A copy: callers are shared by what runs at once, each with a model of its own.
    caller = msgspec.structs.replace(known, model=model)
    try:
        with setting(current_caller, caller):
            yield
        episode = current_episode.get()
        if not caller.calls and episode is not None and opened_call.get() is None and _uses_openai_sdk(type(model)):
            episode.warn(
                "unseen_call",
                f"A model answered role {caller.role!r} without a request that can be recorded: by a client of its own "
                "or from a cache.",
            )
    finally:
        known.calls += caller.calls
        known.done = caller.done = True


def _uses_openai_sdk(cls: type) -> bool:
    return any(base.__name__ == _SDK and base.__module__.startswith("crewai.") for base in cls.__mro__)
