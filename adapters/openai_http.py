"""Requests and responses of the OpenAI chat completions API: decoded strictly, built as plain dicts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from cotune.ids import new_id
from cotune.integrations.http.requests import RequestError
from cotune.integrations.openai.sse import to_stream
from cotune.recording.records import Candidate, Usage
from cotune.sampling.protocol import SamplingParams
from cotune.sampling.request_params import request_params

TokenText = Callable[[int], str]
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a streamed response."""

    include_usage: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Body of POST /v1/chat/completions. Fields that are not listed here are ignored."""

    model: str
    messages: Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1)]
    n: Annotated[int, msgspec.Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=-1, le=_INT32)] | None = None
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=_INT32)] | None = None
    max_completion_tokens: Annotated[int, msgspec.Meta(ge=1, le=_INT32)] | None = None
    stop: str | Annotated[list[str], msgspec.Meta(max_length=16)] | None = None
    seed: Annotated[int, msgspec.Meta(ge=-_INT64 - 1, le=_INT64)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, msgspec.Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, msgspec.Meta(ge=-100, le=100)]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None

    def asked(self) -> dict[str, Any]:
        """The body again, as the readers of `cotune.asked` take it."""
        return msgspec.structs.asdict(self)

    def sampling(self, room: int) -> SamplingParams:
        """Sampling parameters, with at most `room` new tokens (which is also the default). Raises RequestRefused."""
        params = request_params(self.asked(), SamplingParams(max_tokens=room))
        return msgspec.structs.replace(params, max_tokens=min(params.max_tokens, room))


_decoder = msgspec.json.Decoder(ChatRequest)
_PATH = re.compile(r" - at `\$\.?([^`]*)`$")


def decode_request(body: bytes) -> ChatRequest:
    """Decode a request body. Raises RequestError (400) that names the field."""
    try:
        return _decoder.decode(body)
    except msgspec.ValidationError as error:
        text = str(error)
        found = _PATH.search(text)
        missing = re.search(r"missing required field `(\w+)`", text)
        param = missing.group(1) if missing else found.group(1) if found else None
        message = f"{param}: {_PATH.sub('', text)}." if param else f"{text}."
        raise RequestError(400, message, param=param, code="invalid_value") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestError(400, f"The body is not JSON: {error}.", code="invalid_json") from None
    except RecursionError:
        raise RequestError(400, "The body is nested too deeply.", code="invalid_json") from None


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to be sent: all candidates, and what the request asked to see of them."""

    prompt_ids: Sequence[int]
    candidates: Sequence[Candidate]
    usage: Usage
    request: ChatRequest


def completion(reply: Reply, token_text: TokenText) -> dict[str, Any]:
    """A `chat.completion` object with every candidate as a choice."""
    body = {
        "id": f"chatcmpl-{new_id()}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": reply.request.model,
        "choices": [_choice(candidate, reply.request, token_text) for candidate in reply.candidates],
        "usage": _usage(reply.usage),
    }
    if reply.request.return_token_ids:
        body["prompt_token_ids"] = reply.prompt_ids
    return body


def events(reply: Reply, token_text: TokenText) -> bytes:
    """The same answer as server-sent events."""
    options = reply.request.stream_options
    return to_stream(completion(reply, token_text), usage=bool(options and options.include_usage))


def _choice(candidate: Candidate, request: ChatRequest, token_text: TokenText) -> dict[str, Any]:
    choice = {
        "index": candidate.index,
        "message": {"role": "assistant", "content": None, **candidate.message},
        "finish_reason": candidate.finish_reason,
        "logprobs": None,
    }
    if request.logprobs:
        pairs = zip(candidate.token_ids, candidate.logprobs, strict=True)
        choice["logprobs"] = {"content": [_token(token_text(i), p) for i, p in pairs], "refusal": None}
    if request.return_token_ids:
        choice["token_ids"] = candidate.token_ids
    return choice


def _token(text: str, logprob: float) -> Mapping[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []}


def _usage(usage: Usage) -> dict[str, int]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
