"""Records and answers CrewAI's models at `call` and `acall`, whose arguments name the agent.

For a model on the OpenAI SDK, only the role is set here: its calls are recorded and answered at the SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import msgspec
from crewai.llms.base_llm import BaseLLM

from cotune.integrations.apps.clients import Arguments, Client
from cotune.integrations.apps.crewai.messages import answer_of, edited_arguments, request_of, result_of_call
from cotune.integrations.apps.crewai.scopes import caller_of, calling_model, enter_scope, outside_call, part_scope
from cotune.integrations.apps.patching import each_subclass, replace_method, run_inside
from cotune.prompts.chat_texts import ReplaceText
from cotune.recording.context import current_caller, current_episode, identify, opened_call
from cotune.runtime.user_code import context_value

_ARGUMENTS = ("messages", "tools", "callbacks", "available_functions", "from_task", "from_agent", "response_model")
_SDK = "OpenAICompletion"
"""CrewAI's class on the OpenAI SDK. Its subclasses are for other providers with the same protocol."""


def install() -> None:
    """Wrap all model classes, present and future."""
    each_subclass(BaseLLM, _wrap)

    # A tool that a model class runs inside its own `call` may call a model too, which is another call.
    def leave_call(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return outside_call()

    def enter_summarizer(*args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        return enter_scope(part_scope("summarizer", inside=True))

    for name, context in (("_handle_tool_execution", leave_call), ("summarize_messages", enter_summarizer)):
        setattr(BaseLLM, name, run_inside(getattr(BaseLLM, name), context))


def _wrap(cls: type) -> None:
    replace_method(cls, "call", lambda original: run_inside(_CLIENT.call(original), _named_call))
    replace_method(cls, "acall", lambda original: run_inside(_CLIENT.acall(original), _named_call))
    replace_method(cls, "get_input_tokens_count", _wrap_token_count)


def _named_call(model: Any, /, *args: Any, **options: Any) -> AbstractContextManager[None] | None:
    return None if calling_model() is not None else _as_named_agent(model, _call_arguments(args, options))


def _request(model: Any, /, *args: Any, **options: Any) -> dict[str, Any] | None:
    if calling_model() is not model or _uses_openai_sdk(type(model)):
        return None
    return request_of(model, _call_arguments(args, options))


def _edited(replace_text: ReplaceText, model: Any, /, *args: Any, **options: Any) -> Arguments:
    edited = edited_arguments(_call_arguments(args, options), replace_text)
    # Positional arguments stay positional: a class may name its parameters differently.
    positional = [edited.pop(name) for name in _ARGUMENTS[: len(args)]]
    return (model, *positional, *args[len(positional) :]), edited


_CLIENT = Client(
    request=_request,
    edited=_edited,
    fixed_format=True,
    reply=lambda call, answer, model, /, *args, **options: result_of_call(
        model, answer, _call_arguments(args, options)
    ),
    answer=answer_of,
)


def _call_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    return {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}


def _wrap_token_count(original: Callable[..., int]) -> Callable[..., int]:
    """Wrap the method that asks the provider for the number of the prompt's tokens. CrewAI uses it before each call.

    If policies answer, the prompt must not be sent to the provider. Four characters then count as a token, as in CrewAI
    for providers that cannot count.
    """

    def get_input_tokens_count(self: Any, messages: Any, *args: Any, **kwargs: Any) -> int:
        episode = current_episode.get()
        if episode is None or episode.responder is None:
            return original(self, messages, *args, **kwargs)
        texts = [messages] if isinstance(messages, str) else [str(m.get("content") or "") for m in messages]
        return (sum(len(text) for text in texts) + 3) // 4

    return get_input_tokens_count


@contextmanager
def _as_named_agent(model: Any, call_arguments: Mapping[str, Any]) -> Iterator[None]:
    """Give the calls made in the block the role of the agent that the arguments of `model.call` name, or else the role
    of the enclosing scope.
    """
    shared = caller_of(call_arguments.get("from_agent"), call_arguments.get("from_task")) or identify()
    # A copy, as concurrent calls with different models may share the caller.
    caller = msgspec.structs.replace(shared, model=model)
    try:
        with context_value(current_caller, caller):
            yield
        episode = current_episode.get()
        # Calls of a model on the OpenAI SDK are recorded by the hook of the SDK. It counts them in `caller.calls`.
        sdk_records_call = opened_call.get() is None and _uses_openai_sdk(type(model))
        if episode is not None and sdk_records_call and not caller.calls:
            episode.warn(
                "unseen_call",
                f"A model answered role {caller.role!r} without a request that can be recorded: by a client of its own "
                "or from a cache.",
            )
    finally:
        shared.calls += caller.calls
        shared.done = caller.done = True


def _uses_openai_sdk(cls: type) -> bool:
    return any(base.__name__ == _SDK and base.__module__.startswith("crewai.") for base in cls.__mro__)
