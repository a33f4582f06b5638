"""The body of a chat completion, read strictly where a policy answers: a provider would check it itself."""

from __future__ import annotations

from typing import Annotated, Any, TypedDict

import msgspec

from cotune.integrations.web.http.limits import MOST_MESSAGES
from cotune.integrations.web.http.requests import invalid_value
from cotune.sampling.protocol import MOST_TOP_LOGPROBS

_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1
_Limit = Annotated[int, msgspec.Meta(ge=1, le=_INT32)]
_Penalty = Annotated[float, msgspec.Meta(ge=-2, le=2)]


class StreamOptions(TypedDict, total=False):
    """Options of a streamed response."""

    include_usage: bool | None


class SamplingFields(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that requests of every interface have in common, with their ranges."""

    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | None = None
    max_tokens: _Limit | None = None
    max_completion_tokens: _Limit | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    stream_options: StreamOptions | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions. Other fields are read by `cotune.sampling.request_params`."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MOST_MESSAGES)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, msgspec.Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: (
        Annotated[dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]], msgspec.Meta(max_length=1024)] | None
    ) = None
    chat_template_kwargs: Annotated[dict[str, Any], msgspec.Meta(max_length=64)] | None = None
    reasoning_effort: str | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None


def check_sampling(body: dict[str, Any]) -> None:
    """Raises RequestError (400) that names the parameter which is out of range."""
    try:
        msgspec.convert(body, SamplingFields)
    except msgspec.ValidationError as error:
        raise invalid_value(error) from None
