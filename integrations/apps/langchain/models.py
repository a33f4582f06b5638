"""Records and answers chat models of LangChain at the methods that every model implements.

Models of `langchain_openai` are left out here: their calls are recorded at the OpenAI SDK.
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
from cotune.prompts.chat_texts import ReplaceText
from cotune.records.answers import Answer


def install() -> None:
    """Wrap all chat model classes, present and future."""
    each_subclass(BaseChatModel, _wrap)


def _wrap(cls: type) -> None:
    if cls is not BaseChatModel and all(base.__name__ != "BaseChatOpenAI" for base in cls.__mro__):
        _CLIENT.hook(cls, call="_generate", acall="_agenerate", stream="_stream", astream="_astream")


def _partial_answer(chunks: list[Any]) -> Answer | None:
    """The partial answer of a stream that was not read to its end."""
    try:
        answer = answer_of_result(chunks)
    except Exception:  # noqa: BLE001
        return None
    cut = (msgspec.structs.replace(candidate, finish_reason="interrupted") for candidate in answer.candidates)
    return msgspec.structs.replace(answer, candidates=tuple(cut))


def _edit_messages(replace_text: ReplaceText, model: Any, /, messages: Any, *args: Any, **options: Any) -> Arguments:
    return (model, [edited_message(message, replace_text) for message in messages], *args), edited_options(
        options, replace_text
    )


_CLIENT = Client(
    request=lambda model, /, messages, *args, stop=None, run_manager=None, **options: request_of(
        model, messages, args[0] if args else stop, options
    ),
    edited=_edit_messages,
    reply=lambda call, answer, /, *args, **options: result_of(call, answer),
    answer=answer_of_result,
    parts=lambda call, answer: [chunk_of(call, answer)],
    begun=_partial_answer,
)
