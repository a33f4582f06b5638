"""Translates OpenAI messages to the form that chat templates expect."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from cotune.errors import SamplerError

SEEING = (
    "Train a model that sees images (docs/how-to/images.md), give the role a policy of kind provider, or take the "
    "image out of the request."
)
"""The remedy for an image that a policy cannot see."""


def for_template(message: Mapping[str, Any], *, parts: bool = False) -> dict[str, Any]:
    """An OpenAI message in the form of chat templates: text content, arguments as objects, no role `developer`.

    With `parts` the content is a list of parts, in which an image is {"type": "image"}. Raises SamplerError for content
    that is neither text nor, with `parts`, an image.
    """
    converted = dict(message)
    if converted.get("role") == "developer":
        converted["role"] = "system"
    content = converted.get("content")
    if parts:
        content_parts = content if isinstance(content, list) else [content]
        converted["content"] = []
        for part in content_parts if content else ():
            if isinstance(part, Mapping) and part.get("type") == "image_url":
                converted["content"].append({"type": "image"})
            else:
                converted["content"].append({"type": "text", "text": _text_part(part)})
    elif content is None:
        converted["content"] = ""
    elif isinstance(content, list):
        converted["content"] = "\n".join(_text_part(part) for part in content)  # as vLLM does
    # Servers answer with an empty list, and applications send it back. Many templates would render it as calls.
    calls = converted.pop("tool_calls", None)
    if calls:
        converted["tool_calls"] = [_call_for_template(call) for call in calls]
    return converted


def _text_part(part: Any) -> str:
    """The text of one part of a content. Raises SamplerError for a part that is no text."""
    if isinstance(part, str):
        return part
    if isinstance(part, Mapping) and part.get("type") in ("text", "input_text", "output_text"):
        return str(part.get("text") or "")
    if isinstance(part, Mapping) and part.get("type") == "refusal":
        return str(part.get("refusal") or "")
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise SamplerError(
        f"A message has a content part of type {kind!r}.", "Policies read text, and images as image_url."
    )


def _call_for_template(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call.get("function") or {})
    if "arguments" in function:
        arguments = parsed_arguments(function["arguments"])
        function["arguments"] = {} if arguments is None else arguments
    return {**call, "function": function}


OPEN, CLOSE = "\ufdd0", "\ufdd1"
"""Noncharacters of Unicode, which are reserved for internal use. They enclose the number of a special token that is
plain text."""
MARKED = re.compile(f"{OPEN}(\\d+){CLOSE}")


class ControlTokens:
    """Keeps special tokens in the texts of messages from acting as control tokens.

    A user may write `<|im_end|>`. In a prompt it would end the user's turn. Therefore it is replaced by a mark before
    the template is rendered, and its letters are tokenized as plain text.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted({token for token in tokens if token.strip()}, key=lambda token: (-len(token), token))
        self._numbers = {token: number for number, token in enumerate(self._tokens)}
        self._any_token = re.compile("|".join(map(re.escape, self._tokens))) if self._tokens else None

    def marked(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """A message with marks in place of special tokens in its text.

        Messages of the assistant are unchanged, because the model itself wrote their tokens.
        """
        content = message.get("content")
        if message.get("role") == "assistant" or not content:
            return message
        if isinstance(content, str):
            return {**message, "content": self._mark_tokens(content)}
        if not isinstance(content, list):
            return message
        parts: list[Any] = []
        for part in content:
            if isinstance(part, str):
                parts.append(self._mark_tokens(part))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts.append({**part, "text": self._mark_tokens(part["text"])})
            else:
                parts.append(part)
        return {**message, "content": parts}

    def pieces(self, text: str) -> Iterator[tuple[str, bool]]:
        """The pieces of a rendered text, each with a flag: whether it is a special token that is plain text."""
        # The pattern has one group, so every second piece is the number in a mark.
        for position, piece in enumerate(MARKED.split(text)):
            is_number = position % 2 == 1
            if is_number and int(piece) < len(self._tokens):
                yield self._tokens[int(piece)], True
            elif piece:
                yield piece, False

    def _mark_tokens(self, text: str) -> str:
        """The text with a mark in place of each special token: its number between `OPEN` and `CLOSE`."""
        if self._any_token is None:
            return text  # the tokenizer has no special tokens
        return self._any_token.sub(lambda match: f"{OPEN}{self._numbers[match.group()]}{CLOSE}", text)


def text_of(content: Any) -> str:
    """The text of a message's content, which may be a list of parts."""
    if isinstance(content, list):
        texts = [str(part.get("text") or "") if isinstance(part, Mapping) else str(part) for part in content]
        return "\n".join(texts)  # as in a prompt
    return str(content or "")


def calls_of(message: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Name and arguments of each tool call of a message, in a form to compare."""
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    return [(function.get("name"), parsed_arguments(function.get("arguments"))) for function in functions]


def parsed_arguments(arguments: Any) -> Any:
    """The arguments of a call: as an object if they are JSON, otherwise as the model wrote them."""
    if arguments is not None and not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except ValueError:
        return arguments
