"""Translates AutoGen's messages, tools and results to OpenAI's form, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from autogen_core import FunctionCall
from autogen_core.models import (
    AssistantMessage,
    CreateResult,
    FunctionExecutionResultMessage,
    RequestUsage,
    SystemMessage,
    UserMessage,
)

from cotune.integrations.apps.clients import json_schema
from cotune.integrations.apps.edited import edited_blocks
from cotune.json_values import plain_json
from cotune.prompts.chat_texts import Kind, ReplaceText, map_tool
from cotune.records.answers import Answer, counts
from cotune.records.structs import Candidate

_FINISH = {"stop": "stop", "length": "length", "content_filter": "content_filter", "tool_calls": "function_calls"}


def request_of(client: Any, messages: Sequence[Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a model client's method as the body of a chat request."""
    tool_choice = options.get("tool_choice", "auto")
    if not isinstance(tool_choice, str):
        tool_choice = {"type": "function", "function": {"name": tool_choice.name}}
    # `json_output` is true, a class that describes the object, or false or None for a text.
    json_output = options.get("json_output")
    response_format: dict[str, Any] | None = None
    if json_output is True:
        response_format = {"type": "json_object"}
    elif json_output:
        response_format = json_schema(json_output)
    chat_messages: list[dict[str, Any]] = []
    for message in messages:
        chat_messages += _message(message)
    tools = [tool if isinstance(tool, Mapping) else tool.schema for tool in options.get("tools") or ()]
    body = {
        "model": _model_name(client),
        "messages": chat_messages,
        "tools": [{"type": "function", "function": dict(schema)} for schema in tools],
        "tool_choice": tool_choice,
        "response_format": response_format,
        "stream": options.get("stream"),
        **(options.get("extra_create_args") or {}),
    }
    if not body["tools"]:
        del body["tools"], body["tool_choice"]
    return {key: plain_json(value) for key, value in body.items() if value is not None}


def edited_message(message: Any, replace_text: ReplaceText) -> Any:
    """The message, or a copy of it with edited texts."""
    if not isinstance(message, SystemMessage | UserMessage):
        return message
    kind: Kind = "system" if isinstance(message, SystemMessage) else "user"
    content: Any = message.content
    if isinstance(content, str):
        new: Any = replace_text(kind, "", content)
    else:
        blocks = edited_blocks(content, kind, replace_text, joint=None)
        new = None if blocks is content else blocks
    return message if new is None else message.model_copy(update={"content": new})


def edited_tools(tools: Sequence[Any], replace_text: ReplaceText) -> list[Any]:
    """The tools of a request with edited texts. A tool whose texts change is replaced by its schema, a dictionary."""
    edited = []
    for tool in tools:
        schema = tool if isinstance(tool, Mapping) else tool.schema
        new = map_tool(schema, replace_text)
        edited.append(tool if new is schema else new)
    return edited


def result_of(answer: Answer) -> CreateResult:
    """The chosen candidate as the result of `create`."""
    candidate = answer.candidates[answer.chosen]
    text = str(candidate.message.get("content") or "")
    calls = []
    for i, tool in enumerate(candidate.tool_calls):
        function = tool["function"]
        id = str(tool.get("id") or f"call_{i}")
        calls.append(FunctionCall(id=id, name=function["name"], arguments=function["arguments"]))
    finish_reason: Any = _FINISH.get(candidate.finish_reason, "unknown")
    thought = candidate.message.get("reasoning_content") or None
    if calls:
        # A result has function calls or a text, so the text of an answer with calls becomes its thought.
        finish_reason = "function_calls"
        thought = thought or text or None
    return CreateResult(
        finish_reason=finish_reason,
        content=calls or text,
        usage=RequestUsage(answer.usage.prompt_tokens, len(candidate.token_ids) or answer.usage.completion_tokens),
        cached=False,
        thought=thought,
    )


def answer_of_result(result: Any) -> Answer:
    """The answer in the result of a model client. Raises ValueError for any other object."""
    if not isinstance(result, CreateResult):
        raise ValueError(f"no CreateResult but {type(result).__name__}")
    if isinstance(result.content, str):
        message: dict[str, Any] = {"role": "assistant", "content": result.content}
        if result.thought:
            message["reasoning_content"] = result.thought
    else:
        message = {"role": "assistant", "content": result.thought, "tool_calls": [_call(c) for c in result.content]}
    finish_reason: Any = result.finish_reason
    if finish_reason == "function_calls":
        finish_reason = "tool_calls"
    elif finish_reason == "unknown":
        finish_reason = "stop"
    candidate = Candidate(
        index=0,
        text=str(message["content"] or ""),
        message=message,
        finish_reason=finish_reason,
    )
    usage = {
        "prompt_tokens": getattr(result.usage, "prompt_tokens", None),
        "completion_tokens": getattr(result.usage, "completion_tokens", None),
    }
    return Answer(candidates=(candidate,), usage=counts(usage, "prompt_tokens", "completion_tokens"))


def part_of(texts: Sequence[str]) -> Answer | None:
    """The partial answer of a stream that was not read to its end."""
    if not texts:
        return None
    message = {"role": "assistant", "content": "".join(texts)}
    cut = Candidate(index=0, text=message["content"], message=message, finish_reason="interrupted")
    return Answer(candidates=(cut,))


def _message(message: Any) -> Iterator[dict[str, Any]]:
    """An LLM message as chat messages. The results of several function calls become one message each."""
    if isinstance(message, SystemMessage):
        yield {"role": "system", "content": message.content}
    elif isinstance(message, UserMessage):
        content: Any = message.content
        if not isinstance(content, str):
            content = [
                {"type": "text", "text": p} if isinstance(p, str) else dict(p.to_openai_format()) for p in content
            ]
        yield {"role": "user", "name": message.source, "content": content}
    elif isinstance(message, AssistantMessage):
        if isinstance(message.content, str):
            yield {"role": "assistant", "content": message.content}
        else:
            yield {
                "role": "assistant",
                "content": message.thought,
                "tool_calls": [_call(call) for call in message.content],
            }
    elif isinstance(message, FunctionExecutionResultMessage):
        for result in message.content:
            yield {"role": "tool", "tool_call_id": result.call_id, "content": result.content}
    else:
        raise TypeError(f"not an LLM message: {type(message).__name__}")


def _call(call: FunctionCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _model_name(client: Any) -> str:
    """The name of the client's model, or of the client's class if it has none."""
    arguments = getattr(client, "_create_args", None)
    name = arguments.get("model") if isinstance(arguments, Mapping) else getattr(client, "model", None)
    return name if isinstance(name, str) else type(client).__name__
