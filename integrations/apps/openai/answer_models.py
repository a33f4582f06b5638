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
    """Complete all models in these types, and in the fields of their models."""
    from openai import BaseModel

    seen: set[Any] = set()
    waiting = list(types)
    while waiting:
        type_ = waiting.pop()
        if isinstance(type_, type) and issubclass(type_, BaseModel):
            if type_ in seen:
                continue
            seen.add(type_)
            type_.model_rebuild()
            waiting += [field.annotation for field in type_.model_fields.values()]
        waiting += get_args(type_)
