"""Translates CrewAI's messages, tools and results to OpenAI's form, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from cotune.integrations.apps.clients import json_schema
from cotune.json_values import plain_json
from cotune.prompts.chat_texts import ReplaceText, map_message, map_tool
from cotune.records.answers import MALFORMED, Answer
from cotune.records.structs import Candidate, Usage

_PARTS = ("role", "content", "tool_calls", "tool_call_id", "name")
_OPTIONS = ("temperature", "top_p", "max_tokens", "seed", "frequency_penalty", "presence_penalty", "n")


def request_of(model: Any, call_arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The chat request that a call of CrewAI's `LLM` stands for, in OpenAI's form. `call_arguments` are the
    arguments of the call.

    Options of the model object are parameters of the request, because they apply to every call.
    """
    messages = call_arguments.get("messages") or []
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    chat_messages = []
    for message in messages:
        chat_messages.append({field: plain_json(message[field]) for field in _PARTS if message.get(field) is not None})
    response_model = call_arguments.get("response_model")
    body = {
        "model": model.model,
        "messages": chat_messages,
        "tools": [plain_json(tool) for tool in call_arguments.get("tools") or ()],
        "stream": bool(model._effective_stream()),
        "stop": list(model.stop_sequences) or None,
        "response_format": None if response_model is None else json_schema(response_model),
        **{name: getattr(model, name, None) for name in _OPTIONS},
    }
    return {key: value for key, value in body.items() if value is not None}


def edited_arguments(call_arguments: Mapping[str, Any], replace_text: ReplaceText) -> dict[str, Any]:
    """The arguments of a call of CrewAI's `LLM` with edited prompts. Its messages may also be a single text: the
    user's.
    """
    messages = call_arguments.get("messages") or []
    tools = call_arguments.get("tools")
    if isinstance(messages, str):
        new_text = replace_text("user", "", messages)
        return {**call_arguments, "messages": messages if new_text is None else new_text}
    changed = {**call_arguments, "messages": [map_message(message, replace_text) for message in messages]}
    if tools:
        changed["tools"] = [map_tool(tool, replace_text) for tool in tools]
    return changed


def answer_of(value: Any) -> Answer:
    """The answer in the result of a model's `call`: a list of tool calls, an object, or a text.

    Raises ValueError for an empty result.
    """
    if value is None or value == "" or value == []:
        raise ValueError(f"the model returned {value!r}")
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if isinstance(value, list):
        malformed = []
        message["tool_calls"] = []
        for index, tool_call in enumerate(value):
            try:
                message["tool_calls"].append(_tool_call(index, tool_call))
            except (TypeError, AttributeError, ValueError):
                malformed.append(repr(tool_call))
        if malformed:
            message[MALFORMED] = {"tool_calls": malformed}
    elif isinstance(value, BaseModel):
        message["content"] = value.model_dump_json()
    else:
        message["content"] = value if isinstance(value, str) else json.dumps(plain_json(value))
    finish = "tool_calls" if "tool_calls" in message else "stop"
    candidate = Candidate(index=0, text=message["content"] or "", message=message, finish_reason=finish)
    return Answer(candidates=(candidate,), usage=Usage(0, 0))


def result_of_call(model: Any, answer: Answer, call_arguments: Mapping[str, Any]) -> Any:
    """The chosen candidate as the result of `call`: a text, a parsed object, tool calls, or the result of a tool."""
    candidate = answer.candidates[answer.chosen]
    functions = call_arguments.get("available_functions")
    if candidate.tool_calls and not functions:
        return [dict(tool) for tool in candidate.tool_calls]
    if candidate.tool_calls and functions:
        result_of_tool = _run_tool(model, candidate.tool_calls[0], functions, call_arguments)
        if result_of_tool is not None:
            return result_of_tool
    text = candidate.message.get("content") or ""
    response_model = call_arguments.get("response_model")
    if response_model is None:
        return text
    return model._validate_structured_output(text, response_model)


def _run_tool(
    model: Any, tool: Mapping[str, Any], functions: Mapping[str, Any], call_arguments: Mapping[str, Any]
) -> Any:
    """Run a tool through CrewAI, as a model class does. Returns None if CrewAI cannot run it."""
    function = tool["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = {}
    return model._handle_tool_execution(
        function_name=function["name"],
        function_args=arguments,
        available_functions=functions,
        from_task=call_arguments.get("from_task"),
        from_agent=call_arguments.get("from_agent"),
    )


def _tool_call(index: int, value: Any) -> dict[str, Any]:
    """A tool call of any provider: OpenAI's objects and dicts, or a name with arguments."""
    fields: Mapping[str, Any]
    if isinstance(value, BaseModel):
        fields = value.model_dump()
    elif isinstance(value, Mapping):
        fields = value
    else:
        fields = {name: getattr(value, name, None) for name in ("id", "function", "name")}
    # Some providers have the name and the arguments in the tool call itself.
    function = fields.get("function") or fields
    arguments: Any = None
    if isinstance(function, Mapping):
        name = function.get("name")
        # Providers have different names for this field.
        for field in ("arguments", "input", "args"):
            if arguments is None:
                arguments = function.get(field)
    else:
        name = function.name
        arguments = function.arguments
    if not isinstance(arguments, str):
        arguments = json.dumps(plain_json(arguments or {}))
    return {
        "id": str(fields.get("id") or fields.get("toolUseId") or f"call_{index}"),
        "type": "function",
        "function": {"name": str(name), "arguments": arguments},
    }
