"""Anthropic's Messages API: requests as chat requests, and answers as Messages and their events, both ways."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cotune.integrations.apps.edited import edited_blocks, edited_tools
from cotune.integrations.apps.openai.completions import grow, number, sent
from cotune.integrations.apps.openai.forms import Form
from cotune.integrations.apps.openai.response_body import ProviderFailed
from cotune.integrations.apps.openai.responses import hosted_tools, text_of
from cotune.prompts.chat_texts import Said, each, map_format, map_message
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Usage
from cotune.runtime.bounded_cache import BoundedCache, bytes_of
from cotune.sampling.request_params import CONTINUE

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_FINISHES = {**{reason: finish for finish, reason in _REASONS.items()}, "interrupted": "interrupted"}
_GROWING = {"text_delta": "text", "thinking_delta": "thinking"}


def message_of(call: LiveCall, answer: Answer, asked: Mapping[str, Any]) -> dict[str, Any]:
    """The Message for an answer: its reasoning, its text, its tool calls."""
    candidate = answer.candidates[answer.chosen]
    used = {"input_tokens": answer.usage.prompt_tokens, "output_tokens": len(candidate.token_ids)}
    if not candidate.token_ids:
        used["output_tokens"] = answer.usage.completion_tokens
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": list(_written(call, candidate.message)),
        "stop_reason": "stop_sequence" if candidate.stop else _REASONS.get(candidate.finish_reason, "end_turn"),
        "stop_sequence": candidate.stop or None,
        "usage": used,
    }


def _written(call: LiveCall, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content") or not message.get("tool_calls"):
        yield {"type": "text", "text": message.get("content") or ""}
    for position, tool in enumerate(message.get("tool_calls") or ()):
        function = tool.get("function") or {}
        arguments = function.get("arguments") or "{}"
        name = tool.get("id") or f"toolu_{call.id}_{position}"
        keep_arguments(call.episode, name, arguments)
        yield {"type": "tool_use", "id": name, "name": function.get("name"), "input": msgspec.json.decode(arguments)}


def to_events(message: Mapping[str, Any], asked: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a Message, in its order."""
    begun = {**message, "content": [], "stop_reason": None, "usage": {**message["usage"], "output_tokens": 0}}
    made: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
    for index, block in enumerate(message["content"]):
        made += ({**event, "index": index} for event in _block_events(block))
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    made.append(
        {"type": "message_delta", "delta": ended, "usage": {"output_tokens": message["usage"]["output_tokens"]}}
    )
    made.append({"type": "message_stop"})
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in made)


def _block_events(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        empty: dict[str, Any] = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    else:
        empty, delta = {kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}
    yield {"type": "content_block_start", "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def answer_of(message: Any) -> Answer:
    """The answer in a Message. Raises ValueError when it has no content, ProviderFailed for an error."""
    if isinstance(message, Mapping) and message.get("type") == "error":
        raise ProviderFailed(f"error: {message.get('error')}")
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        raise ValueError("no content")
    read = assistant_of(message["content"])
    used = message.get("usage") or {}
    cached = (used.get("cache_creation_input_tokens") or 0) + (used.get("cache_read_input_tokens") or 0)
    candidate = Candidate(
        index=0,
        text=read["content"] or "",
        message=read,
        finish_reason=_FINISHES.get(message.get("stop_reason"), "stop"),  # type: ignore[arg-type]
        stop=message.get("stop_sequence") or "",
    )
    usage = Usage((used.get("input_tokens") or 0) + cached, used.get("output_tokens") or 0)
    return Answer(candidates=(candidate,), usage=usage)


class MessageStream:
    """What the events of a stream add up to."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def take(self, event: Any) -> bool:
        """Add an event; whether it is the last. Raises ProviderFailed for an error event."""
        kind = event.get("type")
        if kind == "error":
            raise ProviderFailed(f"error event: {event.get('error')}")
        if kind == "message_start":
            self._message.update(event.get("message") or {})
        elif kind == "content_block_start":
            self._blocks[number(event, "index")] = dict(event["content_block"])
        elif kind == "content_block_delta":
            index, delta = number(event, "index"), event["delta"]
            if index not in self._blocks and delta.get("type") in _GROWING:
                # Servers leave out the event that announces a text; clients do without.
                text_field = _GROWING[delta["type"]]
                self._blocks[index] = {"type": text_field, text_field: ""}
            block = self._blocks[index]
            if delta.get("type") == "input_json_delta":
                grow(block, "partial", delta["partial_json"])
            elif field := _GROWING.get(delta.get("type")):
                grow(block, field, delta[field])
        elif kind == "message_delta":
            self._message["usage"] = {**(self._message.get("usage") or {}), **(event.get("usage") or {})}
            self._message.update(event.get("delta") or {})
        return bool(kind == "message_stop")

    def over(self, *, done: bool) -> bool:
        return False

    def holds_answer(self) -> bool:
        return False

    def some(self) -> bool:
        """Whether it says anything."""
        fields = ("text", "thinking", "partial", "name")
        return any(block.get(field) for block in self._blocks.values() for field in fields)

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The Message; where it is not `whole` and has no end, it stopped as `interrupted`."""
        content = []
        for index in sorted(self._blocks):
            block = dict(self._blocks[index])
            partial = block.pop("partial", None)
            content.append({**block, "input": partial} if partial else block)
        ended = {} if whole or self._message.get("stop_reason") else {"stop_reason": "interrupted"}
        return {**self._message, "content": content, **ended}


def _keep(call: LiveCall, asked: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Remember the arguments of tool calls as they were written: requests send them back as objects."""
    for tool in assistant_of(message.get("content") or ()).get("tool_calls", ()):
        if arguments_in(call.episode).get(str(tool["id"])) is None:
            keep_arguments(call.episode, str(tool["id"]), tool["function"]["arguments"])


ENTRIES, BYTES = 100_000, 8 << 20
"""Most arguments of tool calls, and bytes of all, that are kept of one episode as they were written."""
_SAME = ("model", "max_tokens", "stream", "temperature", "top_p", "top_k", "metadata", "service_tier", "thinking")
_PLAIN_TOOL = (None, "custom")
_FORGOTTEN = (
    f"The arguments of one episode's tool calls take more than {BYTES >> 20} MiB: the least recently used are "
    "forgotten. A later prompt may have them in another spelling than the model's."
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_UNANSWERED = {
    "mcp_servers": "MCP servers that the provider calls",
    "container": "a container of the provider's",
    "context_management": "context management by the provider",
}


def read(asked: Mapping[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """A Messages request as a chat request: the system text first. Parameters without a counterpart keep their names.
    And what in it only a provider can serve, or "".

    Raises ValueError for a content that is neither text nor a list of blocks.
    """
    known = {*_SAME, "system", "messages", "stop_sequences", "tools", "tool_choice", "output_config", "output_format"}
    body = {name: asked[name] for name in _SAME if name in asked}
    body |= {name: value for name, value in asked.items() if name not in known}
    system = [{"role": "system", "content": text_of(asked["system"])}] if asked.get("system") else []
    body["messages"] = [*system, *messages_of(asked.get("messages") or (), arguments_in(episode))]
    body["api"] = "messages"
    if body["messages"] and body["messages"][-1]["role"] == "assistant":
        body[CONTINUE] = True  # a prefill: the reply goes on from it
    if asked.get("stop_sequences"):
        body["stop"] = asked["stop_sequences"]
    if asked.get("tools"):
        body["tools"] = [_tool(tool) for tool in asked["tools"]]
    if choice := asked.get("tool_choice"):
        named = {"type": "function", "function": {"name": choice.get("name")}}
        body["tool_choice"] = _CHOICES.get(choice.get("type"), named)
        if choice.get("disable_parallel_tool_use"):
            body["parallel_tool_calls"] = False
    output = asked.get("output_config") or {}
    if form := output.get("format") or asked.get("output_format"):
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.get("effort"):
        body["reasoning_effort"] = output["effort"]
    if (asked.get("thinking") or {}).get("type") == "disabled":
        body["chat_template_kwargs"] = {"enable_thinking": False}
    reasons = [reason for field, reason in _UNANSWERED.items() if asked.get(field)]
    reasons += hosted_tools(body)
    unread = [
        str(part.get("type"))
        for message in body["messages"]
        for part in (message["content"] if isinstance(message["content"], list) else ())
        if part.get("type") not in ("text", "image_url")
    ]
    if unread:
        reasons.append(f"blocks of type {', '.join(dict.fromkeys(unread))}")
    return body, " and ".join(reasons)


def rewrite(asked: Mapping[str, Any], said: Said) -> Mapping[str, Any]:
    """A request with its edited prompts; itself where nothing changes. The blocks of a system text,
    which are recorded as one, stay blocks: those that are not concerned keep their place in the provider's cache."""
    changed: dict[str, Any] = {}
    system = asked.get("system")
    if isinstance(system, str) and system:
        new = said("system", "", system)
        if new is not None:
            changed["system"] = new
    elif system:
        blocks = edited_blocks(system, "system", said, "")
        if blocks is not system:
            changed["system"] = blocks
    messages = asked.get("messages") or ()
    if (made := each(messages, lambda message: map_message(message, said))) is not messages:
        changed["messages"] = made
    if tools := asked.get("tools"):
        described = edited_tools(tools, said, _tool, "description", "input_schema")
        if described is not tools:
            changed["tools"] = described
    output = asked.get("output_config") or {}
    for name, holder in (("output_config", output), ("output_format", {"format": asked.get("output_format")})):
        if form := holder.get("format"):
            named = {"name": "output", "schema": form.get("schema")}
            if (new := map_format(named, said)) is not named:
                form = {**form, "schema": new["schema"]}
                changed[name] = {**holder, "format": form} if name == "output_config" else form
    return {**asked, **changed} if changed else asked


def arguments_in(episode: LiveEpisode) -> BoundedCache[str]:
    """The arguments of the episode's tool calls as the model wrote them, by the id of the call."""
    found: BoundedCache[str] | None = episode.notes.get("anthropic")
    return found if found is not None else episode.notes.setdefault("anthropic", BoundedCache(ENTRIES, BYTES))


def keep_arguments(episode: LiveEpisode, name: str, arguments: str) -> None:
    """Remember arguments as they were written; those that are forgotten for lack of room are counted."""
    for _ in range(arguments_in(episode).put(name, arguments, bytes_of((name, arguments)))):
        episode.warn("forgotten_arguments", _FORGOTTEN)


def messages_of(given: Iterable[Mapping[str, Any]], written: BoundedCache[str]) -> list[dict[str, Any]]:
    """Messages of blocks as chat messages: results of tools become messages of their own, before its text.

    A block that no chat message can say is kept as it is, as a part of its message's content.
    """
    found: list[dict[str, Any]] = []
    for message in given:
        blocks = _blocks(message.get("content"))
        if message.get("role") == "assistant":
            found.append(assistant_of(blocks, written))
            continue
        results = [block for block in blocks if block.get("type") == "tool_result"]
        found += [
            {
                "role": "tool",
                "tool_call_id": block.get("tool_use_id"),
                "content": _content(_blocks(block.get("content"))),
            }
            for block in results
        ]
        others = [block for block in blocks if block.get("type") != "tool_result"]
        if others or not results:
            found.append({"role": message.get("role", "user"), "content": _content(others)})
    return found


def assistant_of(blocks: Iterable[Mapping[str, Any]], written: BoundedCache[str] | None = None) -> dict[str, Any]:
    """The blocks of one assistant turn as a chat message; those that it cannot say are under `items`.

    `written` are arguments of tool calls as they were written, for those that come back as objects.
    """
    message: dict[str, Any] = {"role": "assistant", "content": None}
    others: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] = (message["content"] or "") + (block.get("text") or "")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.get("thinking") or "")
        elif kind == "tool_use":
            known = None if written is None else written.get(str(block.get("id")))
            text = _arguments(block.get("input"), known)
            call = {
                "id": block.get("id"),
                "type": "function",
                "function": {"name": block.get("name"), "arguments": text},
            }
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            others.append(dict(block))
    if others:
        message["items"] = others
    return message


def _arguments(given: Any, written: str | None) -> str:
    if isinstance(given, str):
        return given
    if written is not None and msgspec.json.decode(written) == given:
        return written
    return msgspec.json.encode(given or {}).decode()


def _blocks(content: Any) -> list[Mapping[str, Any]]:
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ValueError("content is neither text nor a list of blocks")
    return content


def _content(blocks: list[Mapping[str, Any]]) -> Any:
    """A content in chat form: text where it is one block of text or none, else a list of parts."""
    parts = [_part(block) for block in blocks]
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    if block.get("type") == "text":
        return {"type": "text", "text": block.get("text") or ""}
    source = block.get("source") or {}
    if block.get("type") == "image" and source.get("type") == "base64":
        return {
            "type": "image_url",
            "image_url": {"url": f"data:{source.get('media_type')};base64,{source.get('data')}"},
        }
    if block.get("type") == "image" and source.get("type") == "url":
        return {"type": "image_url", "image_url": {"url": source.get("url")}}
    return {**block, "type": str(block.get("type"))}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in _PLAIN_TOOL:
        return dict(tool)
    function = {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }
    if tool.get("strict") is not None:
        function["strict"] = tool["strict"]
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def content_of(call: LiveCall, answer: Answer, asked: Mapping[str, Any]) -> tuple[bytes, str]:
    """What answers a request: a message, whose arguments are kept, or a stream of it; and the content type."""
    message = message_of(call, answer, asked)
    _keep(call, asked, message)
    return sent(call, message, lambda: to_events(message, asked))


MESSAGES = Form(
    name="messages",
    path="/messages",
    read=read,
    content=content_of,
    answer=answer_of,
    stream=MessageStream,
    rewrite=rewrite,
    keep=_keep,
)
"""The interface at /v1/messages."""
