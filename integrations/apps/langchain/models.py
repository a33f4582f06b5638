"""Chat models of LangChain that do not use the OpenAI SDK: recorded and answered at the methods every model implements.

A model of `langchain_openai` is recorded at the OpenAI SDK and left alone here.
"""

from __future__ import annotations

from typing import Any

import msgspec
from langchain_core.language_models import BaseChatModel

from cotune.integrations.apps.clients import Arguments, Client
from cotune.integrations.apps.langchain.messages import (
    answer_of_result,
    chunk_of,
    edited_message,
    edited_options,
    request_of,
    result_of,
)
from cotune.integrations.apps.patching import each_subclass
from cotune.prompts.chat_texts import Said
from cotune.records.answers import Answer


def install() -> None:
    """Wrap all chat model classes, those there are and those to come."""
    each_subclass(BaseChatModel, _wrap)


def _wrap(cls: type) -> None:
    if cls is not BaseChatModel and all(base.__name__ != "BaseChatOpenAI" for base in cls.__mro__):
        _CLIENT.hook(cls, call="_generate", acall="_agenerate", stream="_stream", astream="_astream")


def _begun(chunks: list[Any]) -> Answer | None:
    """What a stream that was not read to its end says so far."""
    try:
        found = answer_of_result(chunks)
    except Exception:  # noqa: BLE001
        return None
    cut = (msgspec.structs.replace(candidate, finish_reason="interrupted") for candidate in found.candidates)
    return msgspec.structs.replace(found, candidates=tuple(cut))


def _edited(said: Said, model: Any, /, messages: Any, *args: Any, **options: Any) -> Arguments:
    return (model, [edited_message(message, said) for message in messages], *args), edited_options(options, said)


_CLIENT = Client(
    request=lambda model, /, messages, *args, stop=None, run_manager=None, **options: request_of(
        model, messages, args[0] if args else stop, options
    ),
    edited=_edited,
    reply=lambda call, answer, /, *args, **options: result_of(call, answer),
    answer=answer_of_result,
    parts=lambda call, answer: [chunk_of(call, answer)],
    begun=_begun,
)
