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
    stop_texts = list(stop) if stop else None
    model_params = model._get_ls_params(stop=stop_texts)  # the parameters that LangChain reports to LangSmith
    body = {
        "model": model_params.get("ls_model_name") or type(model).__name__,
        "messages": plain_json(convert_to_openai_messages(messages)),
        "temperature": model_params.get("ls_temperature"),
        "max_tokens": model_params.get("ls_max_tokens"),
        "stop": stop_texts,
        **{key: plain_json(value) for key, value in options.items() if key != "tools"},
        "tools": [plain_json(_tool(tool)) for tool in options.get("tools") or ()],
    }
    return {key: value for key, value in body.items() if value is not None}


def edited_message(message: Any, replace_text: ReplaceText) -> Any:
    """The message, or a copy of it with edited texts."""
    # A message of type "chat" has any role. The type of other messages is their role.
    role = message.role if message.type == "chat" else message.type
    kind = _KINDS.get(role)
    if kind is None:
        return message
    content = message.content
    if isinstance(content, str):
        new_text = replace_text(kind, "", content)
        new_content = content if new_text is None else new_text
    else:
        new_content = edited_blocks(content, kind, replace_text, "\n")
    if new_content is content:
        return message
    return message.model_copy(update={"content": new_content})


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
    tool_calls = []
    invalid_tool_calls = []
    for tool_call in candidate.tool_calls:
        try:
            parsed_call = parse_tool_call(dict(tool_call), return_id=True)
        except OutputParserException as error:
            invalid_tool_calls.append(make_invalid_tool_call(dict(tool_call), str(error)))
        else:
            if parsed_call:
                tool_calls.append(parsed_call)
    message = AIMessage(
        tool_calls=tool_calls,
        invalid_tool_calls=invalid_tool_calls,
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
    """The answer in a model's result, or in the list of chunks that the model streamed.

    Raises ValueError for an empty result or list.
    """
    generations: Sequence[Any]
    if isinstance(result, list):
        chunks = result
        if not chunks:
            raise ValueError("an empty stream")
        try:
            # LangChain's `+` merges chunks into one.
            generations = [chunks[0] if len(chunks) == 1 else chunks[0] + chunks[1:]]
        except Exception as error:  # noqa: BLE001 - chunks that LangChain itself cannot merge
            return _malformed_stream(chunks, error)
    else:
        generations = result.generations
    if not generations:
        raise ValueError("no generations")
    usage = getattr(generations[0].message, "usage_metadata", None)
    return Answer(
        candidates=tuple(_candidate(i, generation) for i, generation in enumerate(generations)),
        usage=counts(usage, "input_tokens", "output_tokens"),
    )


def _malformed_stream(chunks: list[ChatGenerationChunk], error: Exception) -> Answer:
    """The answer for chunks that cannot be merged: the texts among them, marked as malformed with the error."""
    texts = [chunk.message.content for chunk in chunks if isinstance(chunk.message.content, str)]
    text = "".join(texts)
    message = {"role": "assistant", "content": text, MALFORMED: {"stream": error_text(error)}}
    return Answer(candidates=(Candidate(index=0, text=text, message=message),))


def _candidate(index: int, generation: Any) -> Candidate:
    """One answer of a model as a candidate. An answer that LangChain cannot convert is marked as malformed."""
    answer = generation.message
    try:
        message = plain_json(convert_to_openai_messages(answer))
        text = str(answer.text)
    except Exception as error:  # noqa: BLE001 - a message that LangChain itself cannot read
        text = answer.content if isinstance(getattr(answer, "content", None), str) else ""
        fault = f"{type(error).__name__}: {answer!r}"
        message = {"role": "assistant", "content": text, MALFORMED: {"message": fault}}
    # Models report the finish reason in either place; the second one wins.
    metadata: dict[str, Any] = {}
    for metadata_part in (getattr(answer, "response_metadata", None), generation.generation_info):
        if isinstance(metadata_part, Mapping):
            metadata.update(metadata_part)
    finish_reason = metadata.get("finish_reason") or metadata.get("stop_reason")
    if not isinstance(finish_reason, str):
        finish_reason = "tool_calls" if message.get("tool_calls") else "stop"
    return Candidate(index=index, text=text, message=message, finish_reason=finish_reason)


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
