"""Translates answers to chat completions of OpenAI, and back. A completion is one body, or server-sent events."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from itertools import starmap
from typing import Any

import msgspec

from cotune.errors import SamplerError
from cotune.integrations.apps.openai.token_logprobs import shown_of, token_logprobs
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import MALFORMED, Answer, counts
from cotune.records.structs import Candidate


def answer_body(call: LiveCall, body: Mapping[str, Any], stream: Callable[[], bytes]) -> tuple[bytes, str]:
    """The body as JSON, or its `stream` if the application asked for one, and the content type."""
    if call.streamed:
        return stream(), "text/event-stream; charset=utf-8"
    return msgspec.json.encode(body), "application/json"


def read(request_body: Mapping[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """The request, and a text with its features that only a provider can serve. The text is empty if a policy can serve
    the request.
    """
    reasons = []
    tools = request_body.get("tools") or ()
    hosted_kinds = [str(tool.get("type")) for tool in tools if tool.get("type", "function") != "function"]
    if hosted_kinds:
        reasons.append(f"tools of type {', '.join(dict.fromkeys(hosted_kinds))}")
    if "audio" in (request_body.get("modalities") or ()):
        reasons.append("spoken output")
    if request_body.get("web_search_options"):
        reasons.append("web search")
    if request_body.get("functions"):
        reasons.append("functions in their old form (use tools)")
    return dict(request_body), " and ".join(reasons)


def content_of(call: LiveCall, answer: Answer, request_body: Mapping[str, Any]) -> tuple[bytes, str]:
    """A body or a stream with the chosen candidate first, then others up to the `n` that the application asked for.

    It has the model name of the request. Raises SamplerError if there are fewer candidates than `n`.
    """
    params = call.params
    count = int(params.get("n") or 1)
    if len(answer.candidates) < count:
        raise SamplerError(
            f"The application asked for n = {count} choices and {len(answer.candidates)} were sampled.",
            "Ask for fewer choices.",
        )
    chosen = answer.candidates[answer.chosen]
    others = [candidate for i, candidate in enumerate(answer.candidates) if i != answer.chosen]
    candidates = [chosen, *others][:count]
    # The application pays for the choices that it gets. A provider's answer may have no token ids.
    prompt_tokens = answer.usage.prompt_tokens
    written_tokens = sum(len(candidate.token_ids) for candidate in candidates) or answer.usage.completion_tokens
    completion = {
        "id": f"chatcmpl-{call.id}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": call.model,
        "choices": [_choice(index, candidate, params) for index, candidate in enumerate(candidates)],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": written_tokens,
            "total_tokens": prompt_tokens + written_tokens,
        },
    }
    if params.get("return_token_ids"):
        completion["prompt_token_ids"] = list(answer.prompt_ids)
    return answer_body(call, completion, lambda: to_stream(completion, request_body))


def _choice(index: int, candidate: Candidate, params: Mapping[str, Any]) -> dict[str, Any]:
    """The choice of a completion for a candidate, with log-probabilities and token ids if `params` ask for them."""
    choice = {
        "index": index,
        "message": {"role": "assistant", "content": None, **candidate.message},
        "finish_reason": candidate.finish_reason,
        "logprobs": None,
    }
    if params.get("logprobs"):
        choice["logprobs"] = {"content": token_logprobs(candidate), "refusal": None}
    if params.get("return_token_ids"):
        choice["token_ids"] = list(candidate.token_ids)
    return choice


def answer_of(completion: Any) -> Answer:
    """The answer in a provider's body, with token ids and log-probabilities if it has them (as vLLM does).

    Mistyped values are passed on; the recorder reports them. Raises ValueError if the body has no list of choices.
    """
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not choices or not isinstance(choices, list):
        raise ValueError("no choices")
    return Answer(
        candidates=tuple(starmap(_candidate_of_choice, enumerate(choices))),
        prompt_ids=as_list(completion.get("prompt_token_ids")),
        usage=counts(completion.get("usage"), "prompt_tokens", "completion_tokens"),
    )


def as_list(value: Any) -> tuple[Any, ...]:
    """The items of a list; no items for None. Any other value becomes one item, which the recorder then refuses."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list) else (value,)


def _candidate_of_choice(index: int, choice: Any) -> Candidate:
    """One choice of a provider's body as a candidate. A choice without a message is marked as malformed."""
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        return Candidate(index=index, text="", message={MALFORMED: {"choice": choice}})
    content = message.get("content")
    token_ids = as_list(choice.get("token_ids"))
    listed = choice.get("logprobs") or {}
    # An item for each token. A mistyped list becomes the only item, which the recorder refuses.
    token_items = as_list(listed.get("content")) if isinstance(listed, dict) else (listed,)
    logprobs: list[Any] = []
    for item in token_items:
        logprobs.append(item.get("logprob") if isinstance(item, dict) else None)
    # Log-probabilities that do not match the tokens one to one cannot be used for training.
    if token_ids and len(token_ids) != len(logprobs):
        logprobs = []
    return Candidate(
        index=index,
        text=content if isinstance(content, str) else "",
        message={key: value for key, value in message.items() if value is not None or key == "content"},
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        finish_reason=choice.get("finish_reason") or "stop",
        shown=shown_of(token_items, token_ids),
    )


DONE = b"data: [DONE]\n\n"
MOST_PARTS = 4096
"""Limit of the index of a choice in a stream, and of a tool call in a choice. Higher ones are errors of the sender."""


def to_stream(completion: Mapping[str, Any], request_body: Mapping[str, Any]) -> bytes:
    """The events of a `chat.completion` object. `stream_options.include_usage` adds a last event with the usage."""
    base = {
        "id": completion["id"],
        "object": "chat.completion.chunk",
        "created": completion["created"],
        "model": completion["model"],
    }
    chunks: list[dict[str, Any]] = []
    for choice in completion["choices"]:
        for part in _stream_parts(choice):
            chunks.append({**base, "choices": [part]})
    if "prompt_token_ids" in completion:
        chunks[0]["prompt_token_ids"] = completion["prompt_token_ids"]
    if (request_body.get("stream_options") or {}).get("include_usage"):
        chunks.append({**base, "choices": [], "usage": completion.get("usage")})
    return b"".join(b"data: " + msgspec.json.encode(chunk) + b"\n\n" for chunk in chunks) + DONE


def _stream_parts(choice: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The parts of a stream for one choice: the role, then the content, then each tool call, then the finish reason."""
    index = choice["index"]
    message = choice["message"]
    role_and_empty_content = {"role": "assistant", "content": None}
    if message.get("content") is not None:
        role_and_empty_content["content"] = ""
    yield {"index": index, "delta": role_and_empty_content, "finish_reason": None}
    fields = {
        name: value for name, value in message.items() if name not in ("role", "tool_calls") and value is not None
    }
    extra = {name: choice[name] for name in ("logprobs", "token_ids") if choice.get(name) is not None}
    if fields or extra:
        yield {"index": index, "delta": fields, "finish_reason": None, **extra}
    for position, tool in enumerate(message.get("tool_calls") or []):
        yield {"index": index, "delta": {"tool_calls": [{"index": position, **tool}]}, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}


class ChatStream:
    """Collects the events of a stream into a chat completion."""

    def __init__(self) -> None:
        self._completion: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def take(self, event: Any) -> bool:
        """Add a chunk of a completion. Raises ValueError for an error event.

        Returns False, as no chunk tells that it is the last: the stream ends with `[DONE]`.
        """
        if not isinstance(event, dict):
            raise ValueError(f"event {event!r} is no object")
        if event.get("error"):
            raise ValueError(f"error event: {event['error']}")
        for key in ("id", "model", "created", "usage", "prompt_token_ids"):
            if event.get(key) is not None:
                self._completion[key] = event[key]
        for choice_part in event.get("choices") or []:
            index = index_of_part(choice_part, "index")
            empty_choice = {"index": index, "message": {"role": "assistant", "content": None}, "finish_reason": None}
            choice = self._choices.setdefault(index, empty_choice)
            _add_to_choice(choice, choice_part)
        return False

    def over(self, *, done: bool) -> bool:
        return done or (bool(self._choices) and all(choice["finish_reason"] for choice in self._choices.values()))

    def holds_answer(self) -> bool:
        return False

    def has_parts(self) -> bool:
        """Whether the events hold any part of an answer."""
        messages = [choice["message"] for choice in self._choices.values()]
        return any(len(message) > 2 or message["content"] for message in messages)

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The completion. If it is not `whole`, unfinished choices get the finish reason `interrupted`."""
        for choice in self._choices.values():
            if not choice["finish_reason"]:
                choice["finish_reason"] = None if whole else "interrupted"
            tools = choice["message"].get("tool_calls")
            if isinstance(tools, _ToolCalls):
                choice["message"]["tool_calls"] = tools.in_order()
        return {**self._completion, "choices": [self._choices[index] for index in sorted(self._choices)]}


def events(raw: bytes) -> Iterator[bytes]:
    """The data of each server-sent event of a stream. Data lines of one event are joined."""
    lines: list[bytes] = []
    for line in raw.splitlines():
        if line.startswith(b"data:"):
            lines.append(line[5:].strip())
        elif not line and lines:
            yield from _event_data(lines)
            lines = []
    yield from _event_data(lines)


def _event_data(lines: list[bytes]) -> list[bytes]:
    """The data of one event with these lines; or one event for each line, if the first line is complete JSON.

    Some servers leave out the empty line between events.
    """
    if len(lines) < 2:
        return lines
    try:
        msgspec.json.decode(lines[0], type=msgspec.Raw)
    except msgspec.DecodeError:
        return [b"\n".join(lines)]
    return lines


def append_text(fields: dict[str, Any], name: str, addition: Any) -> None:
    """Append `addition` to the text in the field `name`. Raises TypeError if it is no text."""
    # `pop` leaves one reference to the text, so Python appends in place. Otherwise it would copy the whole text for
    # each part of a stream.
    text = fields.pop(name, None)
    if text is None:
        text = addition
    elif isinstance(addition, str):
        text += addition
    fields[name] = text  # before the error, so that the text up to now is kept
    if not isinstance(addition, str):
        raise TypeError(f"{name} is of type {type(addition).__name__}")


def index_of_part(part: Mapping[str, Any], name: str) -> int:
    """The index in a part of a stream; 0 if it is missing. Raises ValueError for any other value."""
    index = part.get(name) or 0
    if type(index) is not int or not 0 <= index < MOST_PARTS:
        raise ValueError(f"{name} is {str(index)[:20]}, no whole number below {MOST_PARTS}")
    return index


def _add_to_choice(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    """Add one part of a stream to the choice that it belongs to. Raises TypeError for a mistyped content."""
    if part.get("finish_reason"):
        choice["finish_reason"] = part["finish_reason"]
    if part.get("token_ids"):
        choice.setdefault("token_ids", []).extend(part["token_ids"])
    if part.get("logprobs"):
        logprobs = choice.setdefault("logprobs", {"content": []})
        logprobs["content"].extend(part["logprobs"].get("content") or [])
    message = choice["message"]
    for key, value in (part.get("delta") or {}).items():
        if key == "tool_calls":
            for tool_call_part in value or []:
                tool_calls = message.setdefault("tool_calls", _ToolCalls())
                tool_calls.add(tool_call_part)
        elif key == "content" and not isinstance(value, str | list | None):
            raise TypeError(f"content is of type {type(value).__name__}")
        elif value is not None and key != "role":
            _join_field(message, key, value)


def _join_field(fields: dict[str, Any], key: str, addition: Any) -> None:
    """Add a value to a field: append to a text or a list, merge into an object, replace any other value.

    Raises TypeError if it would replace a text.
    """
    present_value = fields.get(key)
    if present_value and isinstance(present_value, str):
        append_text(fields, key, addition)
    elif isinstance(present_value, list) and isinstance(addition, list):
        present_value.extend(addition)
    elif isinstance(present_value, dict) and isinstance(addition, dict):
        for name, value in addition.items():
            if value is not None:
                _join_field(present_value, name, value)
    else:
        fields[key] = addition


class _ToolCalls:
    """Collects the tool calls of a choice from the pieces of a stream.

    Each index should belong to one call. Some servers give all parallel calls the same index, or none. Therefore a new
    id together with a name also begins a call. A new id alone does not: some servers invent an id for every piece.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple[int, int], dict[str, Any]] = {}
        """(index, number of the call under this index) -> call."""
        self._counts: dict[int, int] = {}
        """Index -> number of its calls."""
        self._by_id: dict[tuple[int, Any], dict[str, Any]] = {}

    def add(self, part: Mapping[str, Any]) -> None:
        """Add a piece to the call with its id, or else to the newest call of its index. A piece with a new id and a
        name begins another call.

        Raises ValueError or TypeError for a mistyped piece.
        """
        index = index_of_part(part, "index")
        id = part.get("id")
        function = part.get("function") or {}
        n_calls = self._counts.get(index, 0)
        newest_call = self._calls.get((index, n_calls - 1))
        names_another_call = newest_call is not None and newest_call["id"] and id and function.get("name")
        if id and (index, id) in self._by_id:
            call = self._by_id[index, id]
        elif newest_call is not None and not names_another_call:
            call = newest_call
        else:
            if len(self._calls) == MOST_PARTS:
                raise ValueError(f"there are more than {MOST_PARTS} tool calls")
            call = {"id": None, "type": "function", "function": {"name": "", "arguments": ""}}
            self._calls[index, n_calls] = call
            self._counts[index] = n_calls + 1
        if id:
            call["id"] = id
            self._by_id[index, id] = call
        for name in ("name", "arguments"):
            append_text(call["function"], name, function.get(name) or "")

    def in_order(self) -> list[dict[str, Any]]:
        """The calls by their index, which may skip some."""
        return [self._calls[key] for key in sorted(self._calls)]
