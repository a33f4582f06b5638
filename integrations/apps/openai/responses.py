"""Translates requests of the Responses API to chat requests. They may refer to earlier responses of their episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cotune.prompts.chat_texts import ReplaceText, map_format, map_list, map_message, map_tool
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_NOTE = "openai_responses"
ENTRIES = 100_000
BYTES = 64 << 20
"""Limits for the earlier responses of one episode: number of responses and items, and bytes of all."""
_PROVIDER_ONLY = {
    "background": "a response in the background",
    "conversation": "a conversation that the provider keeps",
    "prompt": "a prompt that the provider keeps",
}


_REFERENCE = "item_reference"
_CUT_CONVERSATION = (
    "A Responses request refers to what was said outside of its episode, or is no longer kept: "
    "its call is recorded without that."
)
_FORGOTTEN = (
    f"The responses of one episode take more than {BYTES >> 20} MiB, or one takes a fourth of that: the least recently "
    "used, or that one, are forgotten. "
    "A call that goes on from one of them is recorded without what was said before."
)


class Conversation(NamedTuple):
    """The messages up to and including a response.

    It is not `whole` if it refers to a response or an item that is unknown, so that messages are missing.
    """

    messages: tuple[dict[str, Any], ...] = ()
    whole: bool = True


class EarlierResponses:
    """The responses of an episode and their items by id, for `previous_response_id` and item references.

    Beyond `BYTES`, the least recently used are forgotten.
    """

    def __init__(self) -> None:
        self._cache: BoundedCache[Any] = BoundedCache(ENTRIES, BYTES)

    def keep(self, call: LiveCall, request_body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Remember the response to a call, as later requests may name it instead of repeating its conversation.

        Warns of responses that are forgotten to make room, and of a call that refers to an unknown response: its
        recorded prompt has no beginning.
        """
        has_unknown_items = any(message.get("type") == _REFERENCE for message in call.messages)
        is_complete = self.before(request_body).whole and not has_unknown_items
        if not is_complete:
            call.episode.warn("cut_conversation", _CUT_CONVERSATION)
        output, _ = well_formed_items(response.get("output") or ())
        prompt = call.messages
        if request_body.get("instructions"):
            # They are the first message, and apply to this request only.
            prompt = prompt[1:]
        messages = (*prompt, *messages_of(output))
        conversation = Conversation(messages, is_complete)
        forgotten = self._cache.put(("response", str(response.get("id"))), conversation, bytes_of(messages))
        for item in output:
            if item.get("id"):
                forgotten += self._cache.put(("item", str(item["id"])), item, bytes_of(item))
        for _ in range(forgotten):
            call.episode.warn("forgotten_response", _FORGOTTEN)

    def before(self, request_body: Mapping[str, Any]) -> Conversation:
        """The conversation that a request continues."""
        response_id = request_body.get("previous_response_id")
        if not response_id:
            return Conversation()
        return self._cache.get(("response", response_id)) or Conversation(whole=False)

    def get(self, item_id: Any) -> Mapping[str, Any] | None:
        """The item with this id; None for an unknown one."""
        item: Mapping[str, Any] | None = self._cache.get(("item", item_id))
        return item


def earlier_in(episode: LiveEpisode) -> EarlierResponses:
    """The earlier responses of an episode."""
    earlier: EarlierResponses | None = episode.notes.get(_NOTE)
    return earlier if earlier is not None else episode.notes.setdefault(_NOTE, EarlierResponses())


def read(request_body: Mapping[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """A Responses request as a chat request, and a text that names its features that only a provider can serve.

    The messages are the instructions, then the earlier conversation, then the input. The text is empty if a policy can
    serve everything. Raises ValueError for an input that is neither text nor a list of items.
    """
    # 1. The messages of the chat request.
    earlier_responses = earlier_in(episode)
    messages: list[dict[str, Any]] = []
    if request_body.get("instructions"):
        messages.append({"role": "system", "content": request_body["instructions"]})
    conversation = earlier_responses.before(request_body)
    messages += conversation.messages
    messages += messages_of(_input_items(request_body), earlier_responses)

    # 2. Its other fields.
    body = {**_chat_params(request_body), "messages": messages, "api": "responses"}
    if request_body.get("tools"):
        body["tools"] = [_chat_tool(tool) for tool in request_body["tools"]]
    if isinstance(request_body.get("tool_choice"), Mapping):
        body["tool_choice"] = _chat_tool(request_body["tool_choice"])
    # 3. Its features that only a provider can serve.
    features = [feature for field, feature in _PROVIDER_ONLY.items() if request_body.get(field)]
    if not conversation.whole:
        name = request_body["previous_response_id"]
        features.append(f"the response {name!r}, which was not made in this episode, or continues an unknown response")
    features += hosted_tools(body)
    # An item without a chat form was left as it is.
    untranslated_types = [str(message.get("type")) for message in messages if "role" not in message]
    if untranslated_types:
        features.append(f"input items of type {', '.join(dict.fromkeys(untranslated_types))}")
    return body, " and ".join(features)


def rewrite(request_body: Mapping[str, Any], replace_text: ReplaceText) -> Mapping[str, Any]:
    """A request with its edited prompts; the same object if nothing changes."""
    changed: dict[str, Any] = {}
    # The input is one text or a list of items; the instructions are a text.
    for name, role in (("instructions", "system"), ("input", "user")):
        text = request_body.get(name)
        if isinstance(text, str):
            message = {"role": role, "content": text}
            edited_message = map_message(message, replace_text)
            if edited_message is not message:
                changed[name] = edited_message["content"]
    for name, map_item in (("input", map_message), ("tools", map_tool)):
        items = request_body.get(name)
        if isinstance(items, list):
            edited_items = map_list(items, partial(map_item, replace_text=replace_text))
            if edited_items is not items:
                changed[name] = edited_items
    # The format of the answer, whose schema has texts too.
    text_options = request_body.get("text")
    if isinstance(text_options, Mapping):
        text_format = text_options.get("format")
        edited_format = map_format(text_format, replace_text)
        if edited_format is not text_format:
            changed["text"] = {**text_options, "format": edited_format}
    return {**request_body, **changed} if changed else request_body


def keep(call: LiveCall, request_body: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Remember a response for later requests that refer to it."""
    earlier_in(call.episode).keep(call, request_body, response)


def hosted_tools(chat: Mapping[str, Any]) -> list[str]:
    """A phrase for the tools of a request that are no functions, if there are any."""
    kinds = [str(tool.get("type")) for tool in chat.get("tools") or () if tool.get("type") != "function"]
    return [f"tools that the provider runs ({', '.join(dict.fromkeys(kinds))})"] if kinds else []


def messages_of(items: Iterable[Mapping[str, Any]], earlier: EarlierResponses | None = None) -> list[dict[str, Any]]:
    """Turn input or output items of the Responses API into chat messages. The items of one assistant turn become one
    message.

    References to earlier items are resolved in `earlier`. An item without a chat form is unchanged.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        # A reference may leave out its type.
        if item.get("type") in (_REFERENCE, None) and "id" in item and "content" not in item:
            earlier_item = earlier.get(item["id"]) if earlier is not None else None
            item = earlier_item or {**item, "type": _REFERENCE}
        kind = str(item.get("type") or "message")
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if turn is None or _ends_turn(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add_to_turn(turn, kind, item)
        else:
            turn = None
            messages.append(_message(kind, item))
    return messages


def well_formed_items(output: Iterable[Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Divide the items of an output into well-formed and malformed ones."""
    well_formed = []
    malformed = []
    for item in output:
        try:
            messages_of((item,))
            well_formed.append(item)
        except (TypeError, AttributeError, KeyError, ValueError):
            malformed.append(item)
    return well_formed, malformed


def text_of(parts: Any) -> str:
    """The text in a content: a string, or the parts that have text."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("text") or "") for part in parts or ())


def _input_items(request_body: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """The input of a request as items. Raises ValueError unless it is a text or a list of objects."""
    items = request_body.get("input")
    if items is None:
        return ()
    if isinstance(items, str):
        return ({"role": "user", "content": items},)
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items):
        raise ValueError("input is neither text nor a list of items")
    return items


def _ends_turn(turn: Mapping[str, Any], kind: str) -> bool:
    """Whether an item of this kind begins another turn: calls and text end the reasoning, calls end the text."""
    if kind == "function_call":
        return False
    return bool(turn.get("tool_calls")) or turn["content"] is not None


def _add_to_turn(turn: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
    """Add an item to the assistant message `turn`: a function call, reasoning, or a text with its refusals."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "reasoning":
        text = text_of(item.get("content")) or text_of(item.get("summary"))
        if text:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
    else:
        parts = item.get("content")
        turn["content"] = text_of(parts)
        if isinstance(parts, list):
            refusals = [part["refusal"] for part in parts if part.get("refusal")]
            if refusals:
                turn["refusal"] = "".join(refusals)


def _message(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _chat_content(item.get("output"))}
    if kind == "message" and "role" in item:
        return {"role": item["role"], "content": _chat_content(item.get("content"))}
    return dict(item)


def _chat_content(parts: Any) -> Any:
    """A content in chat form: a text if it is a single text part, else a list of parts."""
    if not isinstance(parts, list):
        return parts
    chat_parts = [_chat_part(part) for part in parts]
    if len(chat_parts) == 1 and chat_parts[0].get("type") == "text":
        return chat_parts[0]["text"]
    return chat_parts


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    """A part of an input or output item of the Responses API in the form of chat requests.

    A part that has no form in chat requests is returned unchanged. Only a provider can serve a request with this part.
    """
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image":
        image = {"url": part.get("image_url"), "detail": part.get("detail"), "file_id": part.get("file_id")}
        return {"type": "image_url", "image_url": {name: value for name, value in image.items() if value is not None}}
    if kind == "input_file":
        return {"type": "file", "file": {name: value for name, value in part.items() if name != "type"}}
    return dict(part)


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function tool, or the choice of one, in chat form; other tools unchanged."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_params(request_body: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a request under their names in chat requests."""
    translated = ("input", "instructions", "tools", "max_output_tokens", "text")
    params = {name: value for name, value in request_body.items() if name not in translated}
    if "max_output_tokens" in request_body:
        params["max_completion_tokens"] = request_body["max_output_tokens"]
    text_options = dict(request_body.get("text") or {})
    text_format = text_options.pop("format", None)
    if text_format:
        # Chat Completions has the fields of a format in an object that is named after the format's type.
        params["response_format"] = {"type": text_format.get("type")}
        fields = {name: value for name, value in text_format.items() if name != "type"}
        if fields:
            params["response_format"][text_format["type"]] = fields
    return {**params, **text_options}  # the other options of a text have the same names
