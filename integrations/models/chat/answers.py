"""Encodes recorded answers as token ids: the tokens that a model would have to write, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cotune.errors import SamplerError
from cotune.integrations.models.chat.content import calls_of, text_of
from cotune.integrations.models.chat.template import ANY_TOOLS, ChatTemplate
from cotune.integrations.models.chat.tool_formats import split_reasoning


class EncodedAnswer(NamedTuple):
    """Token ids of a prompt, and of its answer with the end token."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    dropped_reasoning: bool = False
    """Whether the recorded answer has reasoning that the template does not show."""


def encode_answer(
    chat: ChatTemplate,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    answer: Mapping[str, Any],
    options: Mapping[str, Any] | None = None,
) -> EncodedAnswer | str:
    """The ids of a prompt and its answer (messages in OpenAI form), or the reason why the template cannot express them.

    The reason is "unrenderable" if the template refuses the messages, and "empty_answer" for an answer without text and
    tool calls. It is "inexpressible" if the rendered answer does not continue the rendered prompt, or if it is read
    back as another answer (the template leaves out a tool call, or the text contains marks of the template). `options`
    are variables for the template.
    """
    if answer.get("function_call"):  # the old form of a tool call, which no template writes
        return "inexpressible"
    if not _text_and_calls(answer):
        return "empty_answer"
    try:
        prompt = chat.render(messages, tools, options=options)
        prompt_text = chat.transcript(messages, tools, options=options, generation=True)
        full_text = chat.transcript([*messages, answer], tools, options=options)
    except (SamplerError, TypeError, AttributeError):
        return "unrenderable"
    if not full_text.startswith(prompt_text):
        return "inexpressible"
    ids = _ids_to_first_end(chat, full_text[len(prompt_text) :])
    # Imported traces may have answers with tool calls, but no recorded tools.
    reply_tools = tools or (ANY_TOOLS if answer.get("tool_calls") else None)
    _, parsed_answer, _ = chat.parse(ids, prompt=prompt, tools=reply_tools)
    if _text_and_calls(parsed_answer) != _text_and_calls(answer):
        return "inexpressible"
    drops_reasoning = bool(_reasoning(answer)) and not _reasoning(parsed_answer)
    return EncodedAnswer(tuple(prompt), tuple(ids), drops_reasoning)


def _ids_to_first_end(chat: ChatTemplate, text: str) -> list[int]:
    """The ids of an answer up to its first end token. An end token is added if the template writes none."""
    ids = chat.tokenizer.encode(text, add_special_tokens=False)
    for place, token in enumerate(ids):
        if token in chat.end_token_ids:
            return ids[: place + 1]
    return [*ids, chat.end_token_ids[0]]


def _text_and_calls(message: Mapping[str, Any]) -> tuple[str, str] | None:
    """Text and tool calls of an answer in a form to compare; None for an answer without both."""
    text = split_reasoning(text_of(message.get("content")))[1].strip()
    calls = calls_of(message)
    return (text, json.dumps(calls, sort_keys=True)) if text or calls else None


def _reasoning(message: Mapping[str, Any]) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    return reasoning if isinstance(reasoning, str) else split_reasoning(text_of(message.get("content")))[0]
