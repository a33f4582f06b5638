"""Response objects of the Responses API, whole and as events: an answer as one, and one as an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from cotune.integrations.apps.openai.completions import grow, number, sent, several
from cotune.integrations.apps.openai.responses import keep, messages_of, readable, text_of
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
"""Fields of a request that its response repeats, with their values where the request leaves them out."""
_READ = ("message", "function_call", "reasoning")


class ProviderFailed(Exception):
    """The provider says, in a well-formed answer, that it has none."""


def response_of(call: LiveCall, answer: Answer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The Response object of an answer's chosen candidate, under the model name that was asked for."""
    candidate = answer.candidates[answer.chosen]
    cut = candidate.finish_reason == "length"
    given = {k: default if asked.get(k) is None else asked[k] for k, default in _ECHOED.items()}
    read, written = answer.usage.prompt_tokens, len(candidate.token_ids) or answer.usage.completion_tokens
    response = {
        "id": f"resp_{call.id}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if cut else "completed",
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        **given,
        "model": call.model,
        "output": _output(call, candidate, asked),
        "usage": {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": read + written,
        },
    }
    if asked.get("return_token_ids"):
        response["prompt_token_ids"] = list(answer.prompt_ids)
        response["token_ids"] = list(candidate.token_ids)
    return response


def content_of(call: LiveCall, answer: Answer, asked: Mapping[str, Any]) -> tuple[bytes, str]:
    """What answers a request: a Response object, which is kept, or a stream of it; and the content type."""
    response = response_of(call, answer, asked)
    keep(call, asked, response)
    return sent(call, response, lambda: to_events(response, asked))


def _output(call: LiveCall, candidate: Candidate, asked: Mapping[str, Any]) -> list[dict[str, Any]]:
    message, name = candidate.message, f"{call.id}_{candidate.index}"
    items: list[dict[str, Any]] = []
    if message.get("reasoning_content"):
        summary = [{"type": "summary_text", "text": message["reasoning_content"]}]
        items.append({"id": f"rs_{name}", "type": "reasoning", "summary": summary, "status": "completed"})
    text = text_of(message.get("content"))
    if text or not candidate.tool_calls:
        part: dict[str, Any] = {"type": "output_text", "text": text, "annotations": []}
        if asks_logprobs(asked):
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


def answer_of(response: Any) -> Answer:
    """The answer in a Response object. Items that only a provider makes are kept under `items` of the message.

    Raises ValueError when it has no output, ProviderFailed when it says that it failed or has not begun.
    """
    if not isinstance(response, Mapping) or not isinstance(response.get("output"), list):
        raise ValueError("no output")
    status = response.get("status")
    if status in ("failed", "cancelled"):
        error = response.get("error") or {}
        reason = f"{error.get('code')}: {error.get('message')}" if isinstance(error, Mapping) else error
        raise ProviderFailed(f"the response {status}: {reason}")
    if status in ("queued", "in_progress"):
        raise ProviderFailed(f"the response is {status}: it is made in the background, and its answer is not recorded")
    sound, broken = readable(response["output"])
    message: dict[str, Any] = {"role": "assistant", "content": None}
    for turn in messages_of(item for item in sound if item.get("type") in _READ):
        for key, value in turn.items():
            if key != "role" and value is not None:
                message[key] = value if message.get(key) is None else message[key] + value
    others = [item for item in sound if item.get("type") not in _READ]
    if others:
        message["items"] = others
    if broken:
        message[MALFORMED] = {"output": broken}
    candidate = Candidate(
        index=0,
        text=message["content"] or "",
        message=message,
        token_ids=several(response.get("token_ids")),
        finish_reason=_finish(response, message),
        shown=_shown(sound),
    )
    return Answer(
        candidates=(candidate,),
        prompt_ids=several(response.get("prompt_token_ids")),
        usage=counts(response.get("usage"), "input_tokens", "output_tokens"),
    )


def _shown(items: Sequence[Mapping[str, Any]]) -> tuple[ShownToken, ...] | None:
    texts = [part for item in items if isinstance(parts := item.get("content"), list) for part in parts]
    told = [part.get("logprobs") for part in texts if isinstance(part, Mapping)]
    return shown_of([token for tokens in told if isinstance(tokens, list) for token in tokens])


def _finish(response: Mapping[str, Any], message: Mapping[str, Any]) -> str:
    if response.get("status") == "interrupted":
        return "interrupted"
    if response.get("status") == "incomplete":
        details = response.get("incomplete_details")
        filtered = isinstance(details, Mapping) and details.get("reason") == "content_filter"
        return "content_filter" if filtered else "length"
    return "tool_calls" if message.get("tool_calls") else "stop"


def to_events(response: Mapping[str, Any], asked: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a response, in its order: item by item, part by part."""
    begun = {**response, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    last = f"response.{response['status']}"
    made: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
    ]
    for index, item in enumerate(response["output"]):
        field, empty = _GROWING[item["type"]]
        parts = ((kind, {"item_id": item["id"], **event}) for kind, event in _CONTENT[item["type"]](item))
        of_item: list[tuple[str, dict[str, Any]]] = [
            ("response.output_item.added", {"item": {**item, "status": "in_progress", field: empty}}),
            *parts,
            ("response.output_item.done", {"item": item}),
        ]
        made += ((kind, {"output_index": index, **event}) for kind, event in of_item)
    made.append((last, {"response": response}))
    bodies = [{"type": kind, "sequence_number": number, **event} for number, (kind, event) in enumerate(made)]
    return b"".join(
        [b"event: %s\ndata: %s\n\n" % (body["type"].encode(), msgspec.json.encode(body)) for body in bodies]
    )


def _text(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, part in enumerate(item["content"]):
        where, logprobs = {"content_index": at}, part.get("logprobs") or []
        yield "response.content_part.added", {**where, "part": {**part, "text": "", "logprobs": []}}
        yield "response.output_text.delta", {**where, "delta": part["text"], "logprobs": logprobs}
        yield "response.output_text.done", {**where, "text": part["text"], "logprobs": logprobs}
        yield "response.content_part.done", {**where, "part": part}


def _arguments(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "response.function_call_arguments.delta", {"delta": item["arguments"]}
    yield "response.function_call_arguments.done", {"name": item["name"], "arguments": item["arguments"]}


def _reasoning(item: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for at, part in enumerate(item["summary"]):
        where = {"summary_index": at}
        yield "response.reasoning_summary_part.added", {**where, "part": {**part, "text": ""}}
        yield "response.reasoning_summary_text.delta", {**where, "delta": part["text"]}
        yield "response.reasoning_summary_text.done", {**where, "text": part["text"]}
        yield "response.reasoning_summary_part.done", {**where, "part": part}


_CONTENT = {"message": _text, "function_call": _arguments, "reasoning": _reasoning}
_GROWING: dict[str, tuple[str, Any]] = {
    "message": ("content", []),
    "function_call": ("arguments", ""),
    "reasoning": ("summary", []),
}
"""By type of an item: the field that its events fill in, and its value before the first."""


_LAST = ("response.completed", "response.incomplete", "response.failed")


class ResponseStream:
    """What the events of a stream add up to: the response that its last event holds, else the items so far."""

    def __init__(self) -> None:
        self._response: dict[str, Any] | None = None
        self._items: dict[int, dict[str, Any]] = {}
        self._done: set[int] = set()
        """Items that came as a whole."""

    def take(self, event: Any) -> bool:
        """Add an event; whether it is the last. Raises ProviderFailed for an error event."""
        kind = event.get("type")
        if kind == "error" or event.get("error"):
            raise ProviderFailed(f"error event: {event.get('error') or event.get('message')}")
        if kind in _LAST:
            self._response = dict(event["response"])
        elif kind in ("response.output_item.added", "response.output_item.done"):
            index = number(event, "output_index")
            self._items[index] = dict(event["item"])
            if kind == "response.output_item.done":
                self._done.add(index)
        elif kind in _GROWS:
            item_type, add = _GROWS[kind]
            index = number(event, "output_index")
            # Servers leave out events that announce an item or a part of it; clients do without.
            item = self._items.setdefault(index, {"type": item_type, "role": "assistant"})
            add(item, event)
        return self._response is not None

    def over(self, *, done: bool) -> bool:
        return done and bool(self._items) and self._done.issuperset(self._items)

    def holds_answer(self) -> bool:
        return self._response is not None

    def some(self) -> bool:
        """Whether it says anything."""
        return any(item.get("content") or item.get("arguments") or item.get("summary") for item in self._items.values())

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The response; where it is not `whole`, the items so far with the status `interrupted`."""
        items = [self._items[index] for index in sorted(self._items)]
        if not whole:
            return {"status": "interrupted", "output": items}
        if self._response is None:
            return {"status": "completed", "output": items}
        if not self._response.get("output") and items:  # the last event repeats the output on most servers, not on all
            return {**self._response, "output": items}
        return self._response


def _part(item: dict[str, Any], field: str, event: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an item that an event belongs to: of its `content` or its `summary`. New ones are empty texts."""
    kind = {"content": "output_text", "summary": "summary_text"}[field]
    at = number(event, f"{field}_index")
    parts: list[dict[str, Any]] = item.setdefault(field, [])
    while len(parts) <= at:
        parts.append({"type": kind, "text": ""})
    return parts[at]


def _grow_content(item: dict[str, Any], event: Mapping[str, Any]) -> None:
    grow(_part(item, "content", event), "text", event["delta"])


def _grow_summary(item: dict[str, Any], event: Mapping[str, Any]) -> None:
    grow(_part(item, "summary", event), "text", event["delta"])


def _grow_arguments(item: dict[str, Any], event: Mapping[str, Any]) -> None:
    grow(item, "arguments", event["delta"])


_GROWS: dict[str, tuple[str, Callable[[dict[str, Any], Mapping[str, Any]], None]]] = {
    "response.content_part.added": ("message", lambda item, event: _part(item, "content", event).update(event["part"])),
    "response.reasoning_summary_part.added": (
        "reasoning",
        lambda item, event: _part(item, "summary", event).update(event["part"]),
    ),
    "response.output_text.delta": ("message", _grow_content),
    "response.reasoning_summary_text.delta": ("reasoning", _grow_summary),
    "response.function_call_arguments.delta": ("function_call", _grow_arguments),
}
"""By type of an event: the type of its item, and how it is added to it."""
