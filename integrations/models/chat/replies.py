"""Reads sampled ids of one model as assistant messages: reasoning, tool calls and text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cotune.integrations.models.chat.tool_formats import (
    HERMES,
    REASONING,
    ToolFormat,
    is_call,
    split_reasoning,
    tool_call,
    with_arguments,
)

Tools = Sequence[Mapping[str, Any]]
TAIL = 16
"""Number of last tokens of a prompt that may contain the mark that opens or closes reasoning."""


class Replies:
    """Reads the replies of one model, by the tokenizer's own `response_template` if it has one.

    `format` is the format of tool calls, or None if it is unknown. `refused` is called for a reply that cannot be read
    completely. Safe to use from several threads.
    """

    def __init__(
        self, tokenizer: Any, ends: Sequence[int], format: ToolFormat | None, refused: Callable[[], object]
    ) -> None:
        """A reader of the replies of one model.

        Args:
            ends: token ids that end a reply.
            format: the format of the model's tool calls; None if it is unknown. Then they are read as Hermes calls.
            refused: called for each reply that the tokenizer's own template cannot read.
        """
        self.tokenizer = tokenizer
        self.format = format
        self._end_ids = ends
        self._on_refused = refused
        marks = (*REASONING, *(format or HERMES).marks)
        mark_ids = {tokenizer.convert_tokens_to_ids(mark) for mark in marks}
        self._ids_without_text = (set(tokenizer.all_special_ids) | set(ends)) - mark_ids
        """Special tokens that mark neither reasoning nor calls, so they are left out of the text."""

    def parse(
        self, token_ids: Sequence[int], stop: Sequence[str], prompt: Sequence[int], tools: Tools
    ) -> tuple[str, dict[str, Any], str]:
        """Read a reply. Returns (text, assistant message, finish reason); see `ChatTemplate.parse`."""
        text_ids = [id for id in token_ids if id not in self._ids_without_text]
        text = _text_before_stop(self.decode(text_ids), stop)
        if self.template:
            # The tokenizer's own template reads all special tokens but the end.
            ids_before_end = [id for id in token_ids if id not in self._end_ids]
            text_with_tokens = _text_before_stop(self.decode(ids_before_end), stop)
            template_message = self._parse_by_template(text_with_tokens, self.decode(prompt), tools)
            if template_message is None:
                return text, {"role": "assistant", "content": text}, "malformed"
            return text, template_message, _finish_reason(template_message, HERMES if tools else None)

        # Most tokenizers have no template for this: read the reasoning and the calls by their marks.
        reader = self.format or HERMES
        reasoning, answer = split_reasoning(text, opened=self.opened(prompt))
        message: dict[str, Any] = {"role": "assistant", "content": answer, **_reasoning_field(reasoning)}
        if not tools:
            return text, message, _finish_reason(message, None)
        try:
            content, calls = reader.read(answer, tools)
        except (ValueError, KeyError, TypeError):
            self._on_refused()
            return text, message, "malformed"
        message["content"] = content
        if calls:
            message["content"] = content.strip() or None
            message["tool_calls"] = [tool_call(call) for call in calls]
        return text, message, _finish_reason(message, reader)

    def stopped_by(self, token_ids: Sequence[int], stop: Sequence[str]) -> str:
        """See `ChatTemplate.stopped_by`."""
        text = self.decode([id for id in token_ids if id not in self._ids_without_text])
        places = [(text.find(mark), mark) for mark in stop if mark and mark in text]
        return min(places)[1] if places else ""

    def opened(self, prompt: Sequence[int]) -> bool:
        """Whether a prompt ends with the mark that opens reasoning."""
        return self.tail(prompt).endswith(REASONING[0])

    def tail(self, prompt: Sequence[int]) -> str:
        """The end of a prompt, without white space after it."""
        return self.decode(prompt[-TAIL:]).rstrip()

    @property
    def template(self) -> Any:
        """The tokenizer's own response template."""
        return getattr(self.tokenizer, "response_template", None)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _parse_by_template(self, reply: str, prompt: str, tools: Tools) -> dict[str, Any] | None:
        """Parse a reply with the tokenizer's response template. Returns None for a malformed reply, which stays
        text.
        """
        try:
            parsed = self.tokenizer.parse_response(reply, prefix=prompt, tools=list(tools))
        except (ValueError, KeyError, TypeError):
            self._on_refused()
            return None
        message: dict[str, Any] = {"role": "assistant", "content": parsed.get("content") or ""}
        # Templates of different models name the fields differently.
        message |= _reasoning_field(parsed.get("reasoning_content") or parsed.get("thinking") or "")
        calls = [with_arguments(call.get("function", call)) for call in parsed.get("tool_calls") or []]
        if not all(is_call(call) for call in calls):
            self._on_refused()
            return None
        if calls and not tools:
            # Without tools in the request, a text that looks like a call is plain text.
            opening, _ = REASONING
            _, text_after_reasoning = split_reasoning(reply, opened=prompt.rstrip().endswith(opening))
            message["content"] = text_after_reasoning
        elif calls:
            message["tool_calls"] = [tool_call(call) for call in calls]
        return message


def _reasoning_field(reasoning: str) -> dict[str, Any]:
    return {"reasoning_content": reasoning} if reasoning else {}


def _finish_reason(message: Mapping[str, Any], reader: ToolFormat | None) -> str:
    """The finish reason of a reply. `reader` is the format of calls, or None if the request has no tools."""
    if reader is not None and reader.unread(message.get("content") or ""):
        return "malformed"
    return "tool_calls" if message.get("tool_calls") else "stop"


def _text_before_stop(text: str, stop: Sequence[str]) -> str:
    """The text before the first stop text."""
    places = [text.find(mark) for mark in stop if mark and mark in text]
    return text[: min(places, default=len(text))]
