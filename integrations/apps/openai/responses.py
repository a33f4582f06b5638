"""Requests of the Responses API as chat requests, with the earlier responses of the same episode that they refer to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from cotune.prompts.chat_texts import Said, each, map_format, map_message, map_tool
from cotune.recording.recorder import LiveCall, LiveEpisode
from cotune.runtime.bounded_cache import BoundedCache, bytes_of

_NOTE = "openai_responses"
ENTRIES, BYTES = 100_000, 64 << 20
"""Most responses with their items, and bytes of all, that are kept of one episode."""
_UNANSWERED = {
    "background": "a response in the background",
    "conversation": "a conversation that the provider keeps",
    "prompt": "a prompt that the provider keeps",
}


_REFERENCE = "item_reference"
_CUT = (
    "A Responses request refers to what was said outside of its episode, or is no longer kept: "
    "its call is recorded without that."
)
_FORGOTTEN = (
    f"The responses of one episode take more than {BYTES >> 20} MiB, or one takes a fourth of that: the least recently "
    "used, or that one, are forgotten. "
    "A call that goes on from one of them is recorded without what was said before."
)


class Conversation(NamedTuple):
    """The messages up to a response, its own included; not `whole` where it continues one that is not known."""

    messages: tuple[dict[str, Any], ...] = ()
    whole: bool = True


class EarlierResponses:
    """The responses of an episode by id, and their items, for `previous_response_id` and item references.

    The least recently used are forgotten when they take more than `BYTES`.
    """

    def __init__(self) -> None:
        self._kept: BoundedCache[Any] = BoundedCache(ENTRIES, BYTES)

    def keep(self, call: LiveCall, asked: Mapping[str, Any], response: Mapping[str, Any]) -> None:
        """Remember the response to a call. Instructions are of one request only, so they are left out.

        What is forgotten for it is counted, as is a call that was recorded without what it refers to.
        """
        whole = self.before(asked).whole and not any(m.get("type") == _REFERENCE for m in call.messages)
        if not whole:
            call.episode.warn("cut_conversation", _CUT)
        output, _ = readable(response.get("output") or ())
        history = call.messages[1:] if asked.get("instructions") else call.messages
        messages = (*history, *messages_of(output))
        kept = Conversation(messages, whole)
        forgotten = self._kept.put(("response", str(response.get("id"))), kept, bytes_of(messages))
        for item in output:
            if item.get("id"):
                forgotten += self._kept.put(("item", str(item["id"])), item, bytes_of(item))
        for _ in range(forgotten):
            call.episode.warn("forgotten_response", _FORGOTTEN)

    def before(self, asked: Mapping[str, Any]) -> Conversation:
        """The conversation that a request continues."""
        name = asked.get("previous_response_id")
        return (self._kept.get(("response", name)) or Conversation(whole=False)) if name else Conversation()

    def get(self, item_id: Any) -> Mapping[str, Any] | None:
        """The item of this id."""
        found: Mapping[str, Any] | None = self._kept.get(("item", item_id))
        return found


def earlier_in(episode: LiveEpisode) -> EarlierResponses:
    """The episode's responses."""
    found: EarlierResponses | None = episode.notes.get(_NOTE)
    return found if found is not None else episode.notes.setdefault(_NOTE, EarlierResponses())


def read(asked: Mapping[str, Any], episode: LiveEpisode) -> tuple[dict[str, Any], str]:
    """A Responses request as a chat request: instructions first, then the earlier conversation, then the input. And
    what in it only a provider can serve, or "".

    Raises ValueError for an input that is neither text nor a list of items.
    """
    earlier = earlier_in(episode)
    messages = [{"role": "system", "content": asked["instructions"]}] if asked.get("instructions") else []
    before = earlier.before(asked)
    messages += before.messages
    messages += messages_of(_items(asked), earlier)
    body = {**_params(asked), "messages": messages, "api": "responses"}
    if asked.get("tools"):
        body["tools"] = [_tool(tool) for tool in asked["tools"]]
    if isinstance(asked.get("tool_choice"), Mapping):
        body["tool_choice"] = _tool(asked["tool_choice"])
    reasons = [reason for field, reason in _UNANSWERED.items() if asked.get(field)]
    if not before.whole:
        name = asked["previous_response_id"]
        reasons.append(f"the response {name!r}, which was not made in this episode, or goes on from what is not known")
    reasons += hosted_tools(body)
    unread = [str(message.get("type")) for message in messages if "role" not in message]
    if unread:
        reasons.append(f"input items of type {', '.join(dict.fromkeys(unread))}")
    return body, " and ".join(reasons)


def rewrite(asked: Mapping[str, Any], said: Said) -> Mapping[str, Any]:
    """A request with its edited prompts; itself where nothing changes."""
    changed: dict[str, Any] = {}
    for name, role in (("instructions", "system"), ("input", "user")):
        if isinstance(given := asked.get(name), str):
            message = {"role": role, "content": given}
            if (new := map_message(message, said)) is not message:
                changed[name] = new["content"]
    for name, one in (("input", map_message), ("tools", map_tool)):
        if isinstance(given := asked.get(name), list) and (made := each(given, partial(one, said=said))) is not given:
            changed[name] = made
    text = asked.get("text")
    if isinstance(text, Mapping) and (form := map_format(text.get("format"), said)) is not text.get("format"):
        changed["text"] = {**text, "format": form}
    return {**asked, **changed} if changed else asked


def keep(call: LiveCall, asked: Mapping[str, Any], response: Mapping[str, Any]) -> None:
    """Remember a response for later requests that refer to it."""
    earlier_in(call.episode).keep(call, asked, response)


def hosted_tools(chat: Mapping[str, Any]) -> list[str]:
    """A phrase for the tools of a request that are no functions, if there are any."""
    kinds = [str(tool.get("type")) for tool in chat.get("tools") or () if tool.get("type") != "function"]
    return [f"tools that the provider runs ({', '.join(dict.fromkeys(kinds))})"] if kinds else []


def messages_of(items: Iterable[Mapping[str, Any]], known: EarlierResponses | None = None) -> list[dict[str, Any]]:
    """Items of an input or an output as chat messages. What belongs to one assistant turn becomes one message.

    An item that no chat message can say is kept as it is.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for given in items:
        item = given
        if item.get("type") in (_REFERENCE, None) and "id" in item and "content" not in item:
            item = (known.get(item["id"]) if known is not None else None) or {**item, "type": _REFERENCE}
        kind = str(item.get("type") or "message")
        if kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant"):
            if turn is None or _complete(turn, kind):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _add(turn, kind, item)
        else:
            turn = None
            messages.append(_message(kind, item))
    return messages


def readable(output: Iterable[Any]) -> tuple[list[Mapping[str, Any]], list[Any]]:
    """Items of an output that can be read, and those that cannot."""
    sound, broken = [], []
    for item in output:
        try:
            messages_of((item,))
            sound.append(item)
        except (TypeError, AttributeError, KeyError, ValueError):
            broken.append(item)
    return sound, broken


def text_of(parts: Any) -> str:
    """The text in a content: a string, or the parts that have text."""
    if isinstance(parts, str):
        return parts
    return "".join(str(part.get("text") or "") for part in parts or ())


def _items(asked: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    given = asked.get("input")
    if given is None:
        return ()
    if isinstance(given, str):
        return ({"role": "user", "content": given},)
    if not isinstance(given, list) or not all(isinstance(item, Mapping) for item in given):
        raise ValueError("input is neither text nor a list of items")
    return given


def _complete(turn: Mapping[str, Any], kind: str) -> bool:
    """Whether an item of this kind begins another turn: calls and text end the reasoning, calls end the text."""
    if kind == "function_call":
        return False
    return bool(turn.get("tool_calls")) or turn["content"] is not None


def _add(turn: dict[str, Any], kind: str, item: Mapping[str, Any]) -> None:
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
        refusals = [part["refusal"] for part in parts if part.get("refusal")] if isinstance(parts, list) else []
        if refusals:
            turn["refusal"] = "".join(refusals)


def _message(kind: str, item: Mapping[str, Any]) -> dict[str, Any]:
    if kind == "function_call_output":
        return {"role": "tool", "tool_call_id": item.get("call_id"), "content": _content(item.get("output"))}
    if kind == "message" and "role" in item:
        return {"role": item["role"], "content": _content(item.get("content"))}
    return dict(item)


def _content(parts: Any) -> Any:
    """A content in chat form: text where it is one part of text, else a list of parts."""
    if not isinstance(parts, list):
        return parts
    made = [_part(part) for part in parts]
    return made[0]["text"] if len(made) == 1 and made[0].get("type") == "text" else made


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text"):
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "input_image":
        image = {"url": part.get("image_url"), "detail": part.get("detail"), "file_id": part.get("file_id")}
        return {"type": "image_url", "image_url": {k: v for k, v in image.items() if v is not None}}
    if kind == "input_file":
        return {"type": "file", "file": {k: v for k, v in part.items() if k != "type"}}
    return dict(part)


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function tool, or the choice of one, in chat form; others as they are."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _params(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The other fields under the names that chat requests have for them."""
    rest = {k: v for k, v in asked.items() if k not in ("input", "instructions", "tools", "max_output_tokens", "text")}
    if "max_output_tokens" in asked:
        rest["max_completion_tokens"] = asked["max_output_tokens"]
    text = dict(asked.get("text") or {})
    shape = text.pop("format", None)
    if shape:
        schema = {k: v for k, v in shape.items() if k != "type"}
        rest["response_format"] = {"type": shape.get("type"), **({shape["type"]: schema} if schema else {})}
    return {**rest, **text}
