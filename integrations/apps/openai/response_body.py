"""Translates answers to Response objects of the Responses API, and back. A response is one body, or events."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.integrations.apps.openai.completions import answer_body, append_text, as_list, index_of_part
from cotune.integrations.apps.openai.responses import keep, messages_of, text_of, well_formed_items
from cotune.integrations.apps.openai.token_logprobs import shown_of, token_logprobs
from cotune.recording.recorder import LiveCall
from cotune.records.answers import MALFORMED, Answer, counts
from cotune.records.structs import Candidate, ShownToken
from cotune.sampling.request_params import asks_logprobs

_ECHOED: dict[str, Any] = {
    "instructions": None,
    "max_output_tokens": None,
    "metadata": {},
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None},
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}},
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""Fields of a request that its response repeats, with their defaults."""
_CHAT_ITEMS = ("message", "function_call", "reasoning")
"""Types of output items that have a counterpart in chat messages."""


class ProviderFailed(Exception):
    """The provider reports, in a well-formed body, that it has no answer."""


def response_of(call: LiveCall, answer: Answer, request_body: Mapping[str, Any]) -> dict[str, Any]:
    """The Response object of an answer's chosen candidate, under the model name of the request."""
    candidate = answer.candidates[answer.chosen]
    is_cut_short = candidate.finish_reason == "length"
    # Clients expect the parameters of their request in the response, or their defaults.
    echoed = {}
    for name, default in _ECHOED.items():
        value = request_body.get(name)
        echoed[name] = default if value is None else value
    prompt_tokens = answer.usage.prompt_tokens
    # A provider's answer may have no token ids.
    output_tokens = len(candidate.token_ids) or answer.usage.completion_tokens
    response = {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if is_cut_short else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut_short else None,
        **echoed,
        "model": call.model,
        "output": _output_items(call, candidate, request_body),
        "usage": {
            "input_tokens": prompt_tokens,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt_tokens + output_tokens,
        },
    }
    if request_body.get("return_token_ids"):
        response["prompt_token_ids"] = list(answer.prompt_ids)
        response["token_ids"] = list(candidate.token_ids)
    return response


def content_of(call: LiveCall, answer: Answer, request_body: Mapping[str, Any]) -> tuple[bytes, str]:
    """The response to a request, as one body or a stream, and its content type. It is kept for later requests."""
    response = response_of(call, answer, request_body)
    keep(call, request_body, response)
    return answer_body(call, response, lambda: to_events(response, request_body))


def _output_items(call: LiveCall, candidate: Candidate, request_body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The output items of a candidate: its reasoning, its message, then its function calls.

    A candidate without text and calls gets a message with an empty text.
    """
    message = candidate.message
    name = f"{call.id}_{candidate.index}"
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": summary, "status": "completed"})
    text = text_of(message.get("content"))
    if text or not candidate.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if asks_logprobs(request_body):
            part["logprobs"] = token_logprobs(candidate)
        status = "incomplete" if candidate.finish_reason == "length" else "completed"
        item = {"id": f"msg_{name}", "type": "message", "role": "assistant", "status": status, "content": [part]}
        items.append(item)
    for position, tool in enumerate(candidate.tool_calls):
        function = tool["function"]
        items.append(
            {
                "id": f"fc_{name}_{position}",
                "type": "function_call",
                "call_id": tool.get("id"),
                "name": function["name"],
                "arguments": function["arguments"],
                "status": "completed",
            }
        )
    return items


def _check_status(response: Mapping[str, Any]) -> None:
    """Raise ProviderFailed for a response that has no answer: it has failed, or is not finished."""
    status = response.get("status")
    if status in ("failed", "cancelled"):
        error = response.get("error") or {}
        reason = error
        if isinstance(error, Mapping):
            reason = f"{error.get('code')}: {error.get('message')}"
        raise ProviderFailed(f"the response {status}: {reason}")
    if status in ("queued", "in_progress"):
        raise ProviderFailed(f"the response is {status}: it is made in the background, and its answer is not recorded")


def answer_of(response: Any) -> Answer:
    """The answer in an object of the Responses API. Items that only a provider produces, such as searches, are stored
    under `items` of the message.

    Raises ValueError without an output, ProviderFailed for a response that failed or has not begun.
    """
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise ValueError("no output")
    _check_status(response)
    items, malformed_items = well_formed_items(response["output"])
    message: dict[str, Any] = {"role": "assistant", "content": None}
    # The output may divide one answer into several messages: their texts and tool calls are joined.
    for turn in messages_of(item for item in items if item.get("type") in _CHAT_ITEMS):
        for key, value in turn.items():
            if key != "role" and value is not None:
                message[key] = value if message.get(key) is None else message[key] + value
    provider_items = [item for item in items if item.get("type") not in _CHAT_ITEMS]
    if provider_items:
        message["items"] = provider_items
    if malformed_items:
        message[MALFORMED] = {"output": malformed_items}
    candidate = Candidate(
        index=0,
        text=message["content"] or "",
        message=message,
        token_ids=as_list(response.get("token_ids")),
        finish_reason=_finish_reason(response, message),
        shown=_token_logprobs(items),
    )
    return Answer(
        candidates=(candidate,),
        prompt_ids=as_list(response.get("prompt_token_ids")),
        usage=counts(response.get("usage"), "input_tokens", "output_tokens"),
    )


def _token_logprobs(items: Sequence[Mapping[str, Any]]) -> tuple[ShownToken, ...] | None:
    """The tokens of all parts, with their log-probabilities; None if the response has none."""
    tokens: list[Any] = []
    for item in items:
        parts = item.get("content")
        for part in parts if isinstance(parts, list) else []:
            if isinstance(part, Mapping) and isinstance(part.get("logprobs"), list):
                tokens += part["logprobs"]
    return shown_of(tokens)


def _finish_reason(response: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    """The finish reason of a response, in the words of chat completions."""
    if response.get("status") == "interrupted":
        return "interrupted"
    if response.get("status") == "incomplete":
        details = response.get("incomplete_details")
        filtered = isinstance(details, Mapping) and details.get("reason") == "content_filter"
        return "content_filter" if filtered else "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def to_events(response: Mapping[str, Any], request_body: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a response, in its order: item by item, part by part."""
    events: list[bytes] = []

    def add(kind: str, fields: Mapping[str, Any]) -> None:
        body = {"type": kind, "sequence_number": len(events), **fields}
        events.append(b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body)))

    unfinished_response = {
        **response,
        "status": "in_progress",
        "output": [],
        "usage": None,
        "incomplete_details": None,
    }
    add("response.created", {"response": unfinished_response})
    add("response.in_progress", {"response": unfinished_response})
    for index, item in enumerate(response["output"]):
        field, empty_value = _FILLED_FIELDS[item["type"]]
        unfinished_item = {**item, "status": "in_progress", field: empty_value}
        add("response.output_item.added", {"output_index": index, "item": unfinished_item})
        content_events = _CONTENT_EVENTS[item["type"]]
        for kind, fields in content_events(item):
            add(kind, {"output_index": index, "item_id": item["id"], **fields})
        add("response.output_item.done", {"output_index": index, "item": item})
    add(f"response.{response['status']}", {"response": response})
    return b"".join(events)


def _text_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events for the content of a message item. Each part is a text, sent in one piece."""
    for index, part in enumerate(item["content"]):
        index_field = {"content_index": index}
        logprobs = part.get("logprobs") or []
        empty_part = {**part, "text": "", "logprobs": []}
        yield "response.content_part.added", {**index_field, "part": empty_part}
        yield "response.output_text.delta", {**index_field, "delta": part["text"], "logprobs": logprobs}
        yield "response.output_text.done", {**index_field, "text": part["text"], "logprobs": logprobs}
        yield "response.content_part.done", {**index_field, "part": part}


def _arguments_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
    yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}


def _reasoning_events(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The events for the summary of a reasoning item. Each part is a text, sent in one piece."""
    for index, part in enumerate(item["summary"]):
        index_field = {"summary_index": index}
        empty_part = {**part, "text": ""}
        yield "response.reasoning_summary_part.added", {**index_field, "part": empty_part}
        yield "response.reasoning_summary_text.delta", {**index_field, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**index_field, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**index_field, "part": part}


_CONTENT_EVENTS = {"message": _text_events, "function_call": _arguments_events, "reasoning": _reasoning_events}
"""Type of an item -> the function that makes the events of its content."""
_FILLED_FIELDS: dict[str, tuple[str, Any]] = {
    "message": ("content", []),
    "function_call": ("arguments", ""),
    "reasoning": ("summary", []),
}
"""Type of an item -> the field that its events fill in, and the value of this field before the first event."""


_LAST_EVENTS = ("response.completed", "response.incomplete", "response.failed")


class ResponseStream:
    """Collects the events of a stream: the response in its last event, or the items so far."""

    def __init__(self) -> None:
        self._response: dict[str, Any] | None = None
        self._items: dict[int, dict[str, Any]] = {}
        self._finished_items: set[int] = set()
        """Indices of items whose last event has come."""

    def take(self, event: Any) -> bool:
        """Add an event. True if it is the last one. Raises ProviderFailed for an error event."""
        kind = event.get("type")
        if kind == "error" or event.get("error"):
            raise ProviderFailed(f"error event: {event.get('error') or event.get('message')}")
        if kind in _LAST_EVENTS:  # it has the status and the usage, and from most servers the output
            self._response = dict(event["response"])
        elif kind in ("response.output_item.added", "response.output_item.done"):
            index = index_of_part(event, "output_index")
            self._items[index] = dict(event["item"])
            if kind == "response.output_item.done":
                self._finished_items.add(index)
        elif kind in _ITEM_OF_EVENT:  # a piece of an item
            index = index_of_part(event, "output_index")
            # Some servers leave out the events that announce an item or a part of it, and clients accept that.
            item = self._items.setdefault(index, {"type": _ITEM_OF_EVENT[kind], "role": "assistant"})
            _add_to_item(item, event)
        return self._response is not None

    def over(self, *, done: bool) -> bool:
        return done and bool(self._items) and self._finished_items.issuperset(self._items)

    def holds_answer(self) -> bool:
        return self._response is not None

    def has_parts(self) -> bool:
        """Whether the events hold any part of an answer."""
        return any(item.get("content") or item.get("arguments") or item.get("summary") for item in self._items.values())

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The response. If it is not `whole`, it has the items so far and the status `interrupted`."""
        items = [self._items[index] for index in sorted(self._items)]
        if not whole:
            return {"status": "interrupted", "output": items}
        if self._response is None:
            return {"status": "completed", "output": items}
        # Most servers repeat the output in the last event, but not all.
        if not self._response.get("output") and items:
            return {**self._response, "output": items}
        return self._response


def _part(item: dict[str, Any], field: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """The part that an event belongs to, in the `content` or the `summary` of an item. A new part is an empty text."""
    kind = {"content": "output_text", "summary": "summary_text"}[field]
    index = index_of_part(event, f"{field}_index")
    parts: list[dict[str, Any]] = item.setdefault(field, [])
    while len(parts) <= index:
        parts.append({"type": kind, "text": ""})
    return parts[index]


_ITEM_OF_EVENT = {
    "response.content_part.added": "message",
    "response.output_text.delta": "message",
    "response.reasoning_summary_part.added": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
}
"""Type of an event that adds to an item -> the type of the item."""


def _add_to_item(item: dict[str, Any], event: Mapping[str, Any]) -> None:
    """Add an event to its item: a new part, or the next piece of a text or of a function's arguments."""
    match event["type"]:
        case "response.content_part.added":
            _part(item, "content", event).update(event["part"])
        case "response.output_text.delta":
            append_text(_part(item, "content", event), "text", event["delta"])
        case "response.reasoning_summary_part.added":
            _part(item, "summary", event).update(event["part"])
        case "response.reasoning_summary_text.delta":
            append_text(_part(item, "summary", event), "text", event["delta"])
        case "response.function_call_arguments.delta":
            append_text(item, "arguments", event["delta"])
