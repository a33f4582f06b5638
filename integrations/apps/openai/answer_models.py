"""Completes the SDK's pydantic models of answers before several threads use them.

The SDK leaves each model incomplete until its first use. pydantic 2.12 does not lock the completion: of two threads
that parse the first answers at once, one gets an error. Where episodes run side by side, first answers come at once.
"""

from __future__ import annotations

from typing import Any, get_args


def install_chat() -> None:
    """Complete the models of chat completions. It takes about 20 ms."""
    from openai.types.chat import ChatCompletion, ChatCompletionChunk, ParsedChatCompletion

    _complete(ChatCompletion, ChatCompletionChunk, ParsedChatCompletion)


def install_responses() -> None:
    """Complete the models of the Responses API. It takes about 200 ms."""
    from openai.types.responses import ParsedResponse, Response, ResponseStreamEvent

    _complete(Response, ResponseStreamEvent, ParsedResponse)


def install_beta_responses() -> None:
    """Complete the models of the Responses API under `client.beta`."""
    from openai.types.beta import BetaResponse, BetaResponseStreamEvent

    _complete(BetaResponse, BetaResponseStreamEvent)


def _complete(*types: Any) -> None:
    """Complete the models of these types now, with the models of their fields: pydantic builds their validators."""
    from openai import BaseModel

    completed: set[Any] = set()
    types_to_search = list(types)
    while types_to_search:
        type_ = types_to_search.pop()
        if isinstance(type_, type) and issubclass(type_, BaseModel):
            if type_ in completed:
                continue
            completed.add(type_)
            type_.model_rebuild()
            types_to_search += [field.annotation for field in type_.model_fields.values()]
        # The arguments of a type such as `list[Choice]` or `Text | Image` may be models.
        types_to_search += get_args(type_)
