"""Translates Anthropic's Messages API to chat requests and answers, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from cotune.integrations.apps.edited import edited_blocks, edited_tools
from cotune.integrations.apps.openai.completions import answer_body, append_text, index_of_part
from cotune.integrations.apps.openai.forms import Form
from cotune.integrations.apps.openai.response_body import ProviderFailed
from cotune.integrations.apps.openai.responses import hosted_tools, text_of
from cotune.prompts.chat_texts import ReplaceText, map_format, map_list, map_message
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Usage
from cotune.runtime.bounded_cache import BoundedCache, bytes_of
from cotune.sampling.request_params import CONTINUE

_REASONS = {"tool_calls": "tool_use", "length": "max_tokens", "content_filter": "refusal"}
_FINISHES = {**{reason: finish for finish, reason in _REASONS.items()}, "interrupted": "interrupted"}
_FIELD_OF_DELTA = {"text_delta": "text", "thinking_delta": "thinking"}
"""Kind of an event's delta -> the field of its block to which it appends. The block's type has the same name."""


def message_of(call: LiveCall, answer: Answer, request_body: Mapping[str, Any]) -> dict[str, Any]:
    """The Message of an answer: its reasoning, its text, its tool calls."""
    candidate = answer.candidates[answer.chosen]
    # A provider's answer may have no token ids.
    output_tokens = len(candidate.token_ids) or answer.usage.completion_tokens
    return {
        "id": f"msg_{call.id}",
        "type": "message",
        "role": "assistant",
        "model": call.model,
        "content": list(_answer_blocks(call, candidate.message)),
        "stop_reason": "stop_sequence" if candidate.stop else _REASONS.get(candidate.finish_reason, "end_turn"),
        "stop_sequence": candidate.stop or None,
        "usage": {"input_tokens": answer.usage.prompt_tokens, "output_tokens": output_tokens},
    }


def _answer_blocks(call: LiveCall, message: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The content blocks of an answer: its reasoning, its text, then its tool calls. An answer without any gets an
    empty text.
    """
    if message.get("reasoning_content"):
        yield {"type": "thinking", "thinking": message["reasoning_content"], "signature": ""}
    if message.get("content") or not message.get("tool_calls"):
        yield {"type": "text", "text": message.get("content") or ""}
    for position, tool in enumerate(message.get("tool_calls") or ()):
        function = tool.get("function") or {}
        arguments = function.get("arguments") or "{}"
        id = tool.get("id") or f"toolu_{call.id}_{position}"
        # Blocks have arguments as objects. The model's exact text is needed when a later prompt repeats this call.
        keep_arguments(call.episode, id, arguments)
        yield {"type": "tool_use", "id": id, "name": function.get("name"), "input": msgspec.json.decode(arguments)}


def to_events(message: Mapping[str, Any], request_body: Mapping[str, Any]) -> bytes:
    """The events that a provider sends for a Message, in its order."""
    empty_usage = {**message["usage"], "output_tokens": 0}
    empty_message = {**message, "content": [], "stop_reason": None, "usage": empty_usage}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": empty_message}]
    for index, block in enumerate(message["content"]):
        events += ({**event, "index": index} for event in _block_events(block))
    stop = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    final_usage = {"output_tokens": message["usage"]["output_tokens"]}
    events.append({"type": "message_delta", "delta": stop, "usage": final_usage})
    events.append({"type": "message_stop"})
    encoded = [b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event)) for event in events]
    return b"".join(encoded)


def _block_events(block: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of a stream for one content block: start, one delta with the whole content, and stop."""
    kind = block["type"]
    if kind == "tool_use":
        empty: dict[str, Any] = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": msgspec.json.encode(block["input"]).decode()}
    else:
        empty = {kind: ""}
        delta = {"type": f"{kind}_delta", kind: block[kind]}
    yield {"type": "content_block_start", "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "delta": delta}
    yield {"type": "content_block_stop"}


def answer_of(message: Any) -> Answer:
    """The answer in a Message. Raises ValueError if it has no content, ProviderFailed for an error."""
    if isinstance(message, Mapping) and message.get("type") == "error":
        raise ProviderFailed(f"error: {message.get('error')}")
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), list):
        raise ValueError("no content")
    assistant = assistant_of(message["content"])
    candidate = Candidate(
        index=0,
        text=assistant["content"] or "",
        message=assistant,
        finish_reason=_FINISHES.get(message.get("stop_reason"), "stop"),  # type: ignore[arg-type]
        stop=message.get("stop_sequence") or "",
    )
    reported = message.get("usage") or {}
    prompt_tokens = 0
    # Anthropic does not count tokens that its cache reads or writes among the input tokens.
    for field in ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"):
        prompt_tokens += reported.get(field) or 0
    usage = Usage(prompt_tokens, reported.get("output_tokens") or 0)
    return Answer(candidates=(candidate,), usage=usage)


class MessageStream:
    """Collects the events of a stream into a Message."""

    def __init__(self) -> None:
        self._message: dict[str, Any] = {}
        self._blocks: dict[int, dict[str, Any]] = {}

    def take(self, event: Any) -> bool:
        """Add an event. True if it is the last one. Raises ProviderFailed for an error event."""
        kind = event.get("type")
        if kind == "error":
            raise ProviderFailed(f"error event: {event.get('error')}")
        if kind == "message_start":
            self._message.update(event.get("message") or {})
        elif kind == "content_block_start":
            self._blocks[index_of_part(event, "index")] = dict(event["content_block"])
        elif kind == "content_block_delta":
            index = index_of_part(event, "index")
            delta = event["delta"]
            text_field = _FIELD_OF_DELTA.get(delta.get("type"))
            if index not in self._blocks and text_field:
                # Some servers leave out the event that announces a text, and clients accept that. A block of a text has
                # the name of its text field as its type.
                self._blocks[index] = {"type": text_field, text_field: ""}
            block = self._blocks[index]
            if delta.get("type") == "input_json_delta":
                # The arguments of a tool as JSON, which is parsed once it is complete.
                append_text(block, "partial", delta["partial_json"])
            elif text_field:
                append_text(block, text_field, delta[text_field])
        elif kind == "message_delta":
            self._message["usage"] = {**(self._message.get("usage") or {}), **(event.get("usage") or {})}
            self._message.update(event.get("delta") or {})
        return bool(kind == "message_stop")

    def over(self, *, done: bool) -> bool:
        return False

    def holds_answer(self) -> bool:
        return False

    def has_parts(self) -> bool:
        """Whether the events hold any part of an answer."""
        return any(
            block.get("text") or block.get("thinking") or block.get("partial") or block.get("name")
            for block in self._blocks.values()
        )

    def body(self, *, whole: bool) -> dict[str, Any]:
        """The Message so far. If it is not `whole` and has no stop reason, its stop reason is `interrupted`."""
        content = []
        for index in sorted(self._blocks):
            block = dict(self._blocks[index])
            # The JSON text of a tool's arguments, put together from the events.
            arguments = block.pop("partial", None)
            if arguments:
                block["input"] = arguments
            content.append(block)
        message = {**self._message, "content": content}
        if not whole and not message.get("stop_reason"):
            message["stop_reason"] = "interrupted"
        return message


def _keep_call_arguments(call: LiveCall, request_body: Mapping[str, Any], message: Mapping[str, Any]) -> None:
    """Remember the arguments of tool calls as the model wrote them. Later requests contain them as objects only."""
    for tool in assistant_of(message.get("content") or ()).get("tool_calls", ()):
        if arguments_in(call.episode).get(str(tool["id"])) is None:
            keep_arguments(call.episode, str(tool["id"]), tool["function"]["arguments"])


ENTRIES = 100_000
BYTES = 8 << 20
"""Limits for the remembered arguments of one episode: number of tool calls, and bytes of all."""
_PLAIN_TOOL = (None, "custom")
_FORGOTTEN = (
    f"The arguments of one episode's tool calls take more than {BYTES >> 20} MiB: the least recently used are "
    "forgotten. A later prompt may have them in another spelling than the model's."
)
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_PROVIDER_ONLY = {
    "mcp_servers": "MCP servers that the provider calls",
    "container": "a container of the provider's",
    "context_management": "context management by the provider",
}


def to_chat_request(request_body: Mapping[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """A Messages request as a chat request, and a text with its features that only a provider can serve.

    The system text becomes the first message. Parameters without a counterpart keep their names. The text is empty if a
    policy can serve everything. Raises ValueError for a content that is neither text nor a list of blocks.
    """
    translated = ("system", "messages", "stop_sequences", "tools", "tool_choice", "output_config", "output_format")
    chat = {name: value for name, value in request_body.items() if name not in translated}
    chat["messages"] = messages_of(request_body.get("messages") or (), arguments_in(episode))
    if request_body.get("system"):
        chat["messages"].insert(0, {"role": "system", "content": text_of(request_body["system"])})
    chat["api"] = "messages"
    if chat["messages"] and chat["messages"][-1]["role"] == "assistant":
        chat[CONTINUE] = True  # a prefill: the reply continues this text
    if request_body.get("stop_sequences"):
        chat["stop"] = request_body["stop_sequences"]
    if request_body.get("tools"):
        chat["tools"] = [_chat_tool(tool) for tool in request_body["tools"]]
    if choice := request_body.get("tool_choice"):
        one_tool = {"type": "function", "function": {"name": choice.get("name")}}
        chat["tool_choice"] = _CHOICES.get(choice.get("type"), one_tool)
        if choice.get("disable_parallel_tool_use"):
            chat["parallel_tool_calls"] = False
    output = request_body.get("output_config") or {}
    if form := output.get("format") or request_body.get("output_format"):
        schema = {"name": "output", "schema": form.get("schema"), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if output.get("effort"):
        chat["reasoning_effort"] = output["effort"]
    if (request_body.get("thinking") or {}).get("type") == "disabled":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    return chat, " and ".join(_provider_only(request_body, chat))


def _provider_only(request_body: Mapping[str, Any], chat: Mapping[str, Any]) -> list[str]:
    """The features of a request that only a provider can serve. `chat` is its translation."""
    features = [feature for field, feature in _PROVIDER_ONLY.items() if request_body.get(field)]
    features += hosted_tools(chat)
    untranslated: dict[str, None] = {}  # types of blocks, in order and without duplicates
    for message in chat["messages"]:
        if not isinstance(message["content"], list):
            continue  # a text
        for part in message["content"]:
            if part.get("type") not in ("text", "image_url"):
                untranslated[str(part.get("type"))] = None
    if untranslated:
        features.append(f"blocks of type {', '.join(untranslated)}")
    return features


def rewrite(request_body: Mapping[str, Any], replace_text: ReplaceText) -> Mapping[str, Any]:
    """A request with its edited prompts; the same object if nothing changes.

    The blocks of a system text are recorded as one text, but stay blocks here: unchanged blocks keep their place in the
    provider's cache.
    """
    changed: dict[str, Any] = {}
    system = request_body.get("system")
    if isinstance(system, str) and system:
        new_text = replace_text("system", "", system)
        if new_text is not None:
            changed["system"] = new_text
    elif system:
        blocks = edited_blocks(system, "system", replace_text, "")
        if blocks is not system:
            changed["system"] = blocks
    messages = request_body.get("messages") or ()
    edited_messages = map_list(messages, lambda message: map_message(message, replace_text))
    if edited_messages is not messages:
        changed["messages"] = edited_messages
    if tools := request_body.get("tools"):
        new_tools = edited_tools(tools, replace_text, _chat_tool, "description", "input_schema")
        if new_tools is not tools:
            changed["tools"] = new_tools
    # The format of the answer is in `output_config`, or in the older field `output_format`.
    output = request_body.get("output_config") or {}
    output_format = _with_edited_schema(output.get("format"), replace_text)
    if output_format is not output.get("format"):
        changed["output_config"] = {**output, "format": output_format}
    older_format = _with_edited_schema(request_body.get("output_format"), replace_text)
    if older_format is not request_body.get("output_format"):
        changed["output_format"] = older_format
    return {**request_body, **changed} if changed else request_body


def _with_edited_schema(output_format: Any, replace_text: ReplaceText) -> Any:
    """The format of an answer with the edited texts of its schema; `output_format` itself if nothing changes."""
    if not output_format:
        return output_format
    chat_format = {"name": "output", "schema": output_format.get("schema")}
    edited_format = map_format(chat_format, replace_text)
    if edited_format is chat_format:
        return output_format
    return {**output_format, "schema": edited_format["schema"]}


def arguments_in(episode: LiveEpisode) -> BoundedCache[str]:
    """The arguments of the episode's tool calls as the model wrote them, by the id of the call."""
    cache: BoundedCache[str] | None = episode.notes.get("anthropic")
    return cache if cache is not None else episode.notes.setdefault("anthropic", BoundedCache(ENTRIES, BYTES))


def keep_arguments(episode: LiveEpisode, name: str, arguments: str) -> None:
    """Remember the arguments of a tool call. Warns of others that are forgotten to make room."""
    for _ in range(arguments_in(episode).put(name, arguments, bytes_of((name, arguments)))):
        episode.warn("forgotten_arguments", _FORGOTTEN)


def messages_of(messages: Iterable[Mapping[str, Any]], written: BoundedCache[str]) -> list[dict[str, Any]]:
    """Messages of blocks as chat messages. Each tool result becomes a message of its own, before the text.

    A block without a chat form stays unchanged, as a part of its message's content.
    """
    chat: list[dict[str, Any]] = []
    for message in messages:
        blocks = _content_blocks(message.get("content"))
        if message.get("role") == "assistant":
            chat.append(assistant_of(blocks, written))
            continue
        tool_results = [block for block in blocks if block.get("type") == "tool_result"]
        other_blocks = [block for block in blocks if block.get("type") != "tool_result"]
        for block in tool_results:
            content = _chat_content(_content_blocks(block.get("content")))
            chat.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content})
        if other_blocks or not tool_results:
            chat.append({"role": message.get("role", "user"), "content": _chat_content(other_blocks)})
    return chat


def assistant_of(
    blocks: Iterable[Mapping[str, Any]], arguments_by_id: BoundedCache[str] | None = None
) -> dict[str, Any]:
    """The blocks of one assistant turn as a chat message. Blocks without a chat form are under `items`.

    Blocks have the arguments of a tool call as an object. `arguments_by_id` has them as the text that the model wrote,
    by the id of the tool call, for earlier calls of the episode.
    """
    message: dict[str, Any] = {"role": "assistant", "content": None}
    other_blocks: list[dict[str, Any]] = []
    for block in blocks:
        kind = block.get("type")
        if kind == "text":
            message["content"] = (message["content"] or "") + (block.get("text") or "")
        elif kind == "thinking":
            message["reasoning_content"] = message.get("reasoning_content", "") + (block.get("thinking") or "")
        elif kind == "tool_use":
            text_of_model = None
            if arguments_by_id is not None:
                text_of_model = arguments_by_id.get(str(block.get("id")))
            arguments = _arguments(block.get("input"), text_of_model)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif kind != "redacted_thinking":
            other_blocks.append(dict(block))
    if other_blocks:
        message["items"] = other_blocks
    return message


def _arguments(value: Any, written: str | None) -> str:
    """Arguments as JSON text: `written`, the model's own text, if it has this value; otherwise encoded again."""
    if isinstance(value, str):
        return value
    if written is not None and msgspec.json.decode(written) == value:
        return written
    return msgspec.json.encode(value or {}).decode()


def _content_blocks(content: Any) -> list[Mapping[str, Any]]:
    """A content as a list of blocks. A text becomes one block. Raises ValueError for any other value."""
    if content is None:
        return []
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    if not isinstance(content, list) or not all(isinstance(block, Mapping) for block in content):
        raise ValueError("content is neither text nor a list of blocks")
    return content


def _chat_content(blocks: list[Mapping[str, Any]]) -> Any:
    """A content in chat form: a text if it is a single text block or empty, else a list of parts."""
    parts = [_chat_part(block) for block in blocks]
    if not parts:
        return ""
    if len(parts) == 1 and parts[0]["type"] == "text":
        return parts[0]["text"]
    return parts


def _chat_part(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block as a part of a chat message. A block without a chat form keeps its fields, and `_provider_only` reports
    its type.
    """
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


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of a chat function. A tool that runs at the provider is unchanged, and `hosted_tools` reports
    it.
    """
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


def content_of(call: LiveCall, answer: Answer, request_body: Mapping[str, Any]) -> tuple[bytes, str]:
    """The response to a request, as one body or a stream, and its content type. Its tool arguments are remembered."""
    message = message_of(call, answer, request_body)
    _keep_call_arguments(call, request_body, message)
    return answer_body(call, message, lambda: to_events(message, request_body))


MESSAGES = Form(
    name="messages",
    path="/messages",
    read=to_chat_request,
    content=content_of,
    answer=answer_of,
    stream=MessageStream,
    rewrite=rewrite,
    keep=_keep_call_arguments,
)
"""The interface at /v1/messages."""
