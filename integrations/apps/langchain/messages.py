"""Translates LangChain's messages, tools and results to OpenAI's form, and back."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.exceptions import OutputParserException
from langchain_core.messages import AIMessage, AIMessageChunk, convert_to_openai_messages
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool

from cotune.errors import error_text
from cotune.integrations.apps.edited import edited_blocks, edited_tools
from cotune.json_values import plain_json
from cotune.prompts.chat_texts import Kind, ReplaceText, map_format, map_tool
from cotune.recording.recorder import LiveCall
from cotune.records.answers import MALFORMED, Answer, counts
from cotune.records.structs import Candidate

_KINDS: Mapping[str, Kind] = {"system": "system", "developer": "system", "human": "user", "user": "user"}
"""Type of a message, or role of a message of type "chat" -> kind of its text."""


def request_of(
    model: Any, messages: Sequence[Any], stop: Sequence[str] | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """The arguments of a model's method as the body of a chat request."""
    facts = model._get_ls_params(stop=list(stop) if stop else None)
    body = {
        "model": facts.get("ls_model_name") or type(model).__name__,
        "messages": plain_json(convert_to_openai_messages(messages)),
        "temperature": facts.get("ls_temperature"),
        "max_tokens": facts.get("ls_max_tokens"),
        "stop": list(stop) if stop else None,
        **{key: plain_json(value) for key, value in options.items() if key != "tools"},
        "tools": [plain_json(_tool(tool)) for tool in options.get("tools") or ()],
    }
    return {key: value for key, value in body.items() if value is not None}


def edited_message(message: Any, replace_text: ReplaceText) -> Any:
    """The message, or a copy of it with edited texts."""
    kind = _KINDS.get(message.role if message.type == "chat" else message.type)
    if kind is None:
        return message
    content = message.content
    if isinstance(content, str):
        new = replace_text(kind, "", content)
    else:
        blocks = edited_blocks(content, kind, replace_text, "\n")
        new = None if blocks is content else blocks
    return message if new is None else message.model_copy(update={"content": new})


def edited_options(options: Mapping[str, Any], replace_text: ReplaceText) -> dict[str, Any]:
    """The options of a model's method with edited texts of tools and response format."""
    changed = dict(options)
    if tools := options.get("tools"):
        changed["tools"] = [_edited_tool(tool, replace_text) for tool in tools]
    if (form := options.get("response_format")) is not None:
        changed["response_format"] = map_format(form, replace_text)
    return changed


def _edited_tool(tool: Any, replace_text: ReplaceText) -> Any:
    if isinstance(tool, Mapping) and "input_schema" in tool:
        return edited_tools([tool], replace_text, _tool, "description", "input_schema")[0]
    openai_tool = tool if isinstance(tool, Mapping) else _tool(tool)
    edited = map_tool(openai_tool, replace_text)
    return tool if edited is openai_tool else edited


def result_of(call: LiveCall, answer: Answer) -> ChatResult:
    """The chosen candidate as the result of `_generate`."""
    candidate = answer.candidates[answer.chosen]
    calls = []
    invalid = []
    for raw in candidate.tool_calls:
        try:
            calls.append(parse_tool_call(dict(raw), return_id=True))
        except OutputParserException as error:
            invalid.append(make_invalid_tool_call(dict(raw), str(error)))
    message = AIMessage(
        tool_calls=[c for c in calls if c],
        invalid_tool_calls=invalid,
        **_common_fields(call, answer, candidate),
    )
    return ChatResult(generations=[ChatGeneration(message=message, generation_info=_message_metadata(call, candidate))])


def chunk_of(call: LiveCall, answer: Answer) -> ChatGenerationChunk:
    """The chosen candidate as the one chunk of a stream."""
    candidate = answer.candidates[answer.chosen]
    message = AIMessageChunk(
        tool_call_chunks=[
            {
                "name": tool["function"]["name"],
                "args": tool["function"]["arguments"],
                "id": tool.get("id"),
                "index": i,
                "type": "tool_call_chunk",
            }
            for i, tool in enumerate(candidate.tool_calls)
        ],
        **_common_fields(call, answer, candidate),
        chunk_position="last",
    )
    return ChatGenerationChunk(message=message, generation_info=_message_metadata(call, candidate))


def answer_of_result(result: ChatResult | list[ChatGenerationChunk]) -> Answer:
    """The answer in a model's result, or in the chunks that it streamed. Raises ValueError for an empty one."""
    if isinstance(result, list):
        if not result:
            raise ValueError("an empty stream")
        try:
            generations: Sequence[Any] = [result[0] if len(result) == 1 else result[0] + result[1:]]
        except Exception as broken:  # noqa: BLE001 - chunks that LangChain itself cannot merge
            text = "".join(part for chunk in result if isinstance(part := chunk.message.content, str))
            message = {"role": "assistant", "content": text, MALFORMED: {"stream": error_text(broken)}}
            return Answer(candidates=(Candidate(index=0, text=text, message=message),))
    else:
        generations = result.generations
    if not generations:
        raise ValueError("no generations")
    return Answer(
        candidates=tuple(_candidate(i, g) for i, g in enumerate(generations)),
        usage=counts(getattr(generations[0].message, "usage_metadata", None), "input_tokens", "output_tokens"),
    )


def _candidate(index: int, generation: Any) -> Candidate:
    """One answer of a model as a candidate. An answer that LangChain cannot convert is marked as malformed."""
    answer = generation.message
    try:
        message = plain_json(convert_to_openai_messages(answer))
        text = str(answer.text)
    except Exception as broken:  # noqa: BLE001 - a message that LangChain itself cannot read
        text = answer.content if isinstance(getattr(answer, "content", None), str) else ""
        message = {"role": "assistant", "content": text, MALFORMED: {"message": f"{type(broken).__name__}: {answer!r}"}}
    # Models report the reason in either place; the second one wins.
    facts: dict[str, Any] = {}
    for table in (getattr(answer, "response_metadata", None), generation.generation_info):
        if isinstance(table, Mapping):
            facts.update(table)
    finish = facts.get("finish_reason") or facts.get("stop_reason")
    if not isinstance(finish, str):
        finish = "tool_calls" if message.get("tool_calls") else "stop"
    return Candidate(index=index, text=text, message=message, finish_reason=finish)


def _common_fields(call: LiveCall, answer: Answer, candidate: Candidate) -> dict[str, Any]:
    """The fields that a message and a chunk have in common."""
    prompt_tokens = answer.usage.prompt_tokens
    written_tokens = len(candidate.token_ids)
    additional = {}
    for name, value in candidate.message.items():
        if name not in ("role", "content", "tool_calls") and value is not None:
            additional[name] = value
    return {
        "content": candidate.message.get("content") or "",
        "additional_kwargs": additional,
        "usage_metadata": {
            "input_tokens": prompt_tokens,
            "output_tokens": written_tokens,
            "total_tokens": prompt_tokens + written_tokens,
        },
        "response_metadata": _message_metadata(call, candidate),
    }


def _message_metadata(call: LiveCall, candidate: Candidate) -> dict[str, Any]:
    return {"finish_reason": candidate.finish_reason, "model_name": call.model}


def _tool(tool: Any) -> Any:
    with contextlib.suppress(ValueError, TypeError):
        return convert_to_openai_tool(tool)
    return tool
