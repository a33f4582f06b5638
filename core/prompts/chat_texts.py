"""Visit the texts of a chat request in OpenAI form that an application writes itself. No other code does this."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

Kind = Literal["system", "user", "assistant", "tool", "format"]
"""The place of a text: a system or developer message, a user message, the application's example of an answer, a tool's
description, a response's schema."""
KIND_NAMES: Mapping[Kind, tuple[str, str]] = {
    "system": ("system message", "system messages"),
    "user": ("user message", "user messages"),
    "assistant": ("example answer", "example answers"),
    "tool": ("tool description", "tool descriptions"),
    "format": ("schema description", "schema descriptions"),
}
"""Names for one text of a kind, and for several."""
ReplaceText = Callable[[Kind, str, str], str | None]
"""Called with a text (kind, key, text). Returns its replacement, or None to leave it unchanged."""

MESSAGE_KEY = ""
"""The key of the texts of messages: they have no name, unlike the descriptions of tools and schemas."""
_KINDS: Mapping[Any, Kind] = {"system": "system", "developer": "system", "user": "user"}
_NAMED = ("properties", "$defs", "definitions", "patternProperties")
"""Keys of a schema whose values are schemas by name."""
_NESTED = ("items", "anyOf", "allOf", "oneOf", "prefixItems", "additionalProperties")


def map_body(body: Mapping[str, Any], replace_text: ReplaceText) -> Mapping[str, Any]:
    """A chat request in which `replace_text` has replaced texts; `body` itself if nothing changes.

    Unchanged parts are shared with `body`, which is never modified. Numbers, names, roles and images are not texts.
    """
    changed: dict[str, Any] = {}
    messages = body.get("messages")
    if isinstance(messages, list | tuple):
        _put(changed, "messages", messages, map_list(messages, lambda message: map_message(message, replace_text)))
    tools = body.get("tools")
    if isinstance(tools, list | tuple):
        _put(changed, "tools", tools, map_list(tools, lambda tool: map_tool(tool, replace_text)))
    form = body.get("response_format")
    _put(changed, "response_format", form, map_format(form, replace_text))
    return {**body, **changed} if changed else body


def map_message(message: Any, replace_text: ReplaceText) -> Any:
    """A system, developer or user message with replaced texts: its content, or each text of a content in parts."""
    if not isinstance(message, Mapping):
        return message
    kind = _KINDS.get(message.get("role"))
    if kind is None:
        return message
    content = message.get("content")
    new_content = content
    if isinstance(content, str):
        new_content = _replacement(replace_text, kind, MESSAGE_KEY, content)
    elif isinstance(content, list | tuple):
        new_content = map_list(content, lambda part: _replace_in_part(part, kind, replace_text))
    return message if new_content is content else {**message, "content": new_content}


def map_tool(tool: Any, replace_text: ReplaceText) -> Any:
    """A tool in the form of chat or of Responses with replaced texts: its description and the descriptions of its
    parameters. The key is its name, followed by the path of the parameter: "search", "search/city"."""
    if not isinstance(tool, Mapping):
        return tool
    function = tool.get("function")
    if isinstance(function, Mapping):
        new = _replace_descriptions(function, "parameters", "tool", replace_text)
        return tool if new is function else {**tool, "function": new}
    return _replace_descriptions(tool, "parameters", "tool", replace_text)


def map_format(form: Any, replace_text: ReplaceText) -> Any:
    """The response format of chat, or the `text.format` of Responses, with replaced descriptions in its schema."""
    if not isinstance(form, Mapping):
        return form
    schema = form.get("json_schema")
    if isinstance(schema, Mapping):
        new = _replace_descriptions(schema, "schema", "format", replace_text)
        return form if new is schema else {**form, "json_schema": new}
    return _replace_descriptions(form, "schema", "format", replace_text)


def _replace_descriptions(
    definition: Mapping[str, Any], schema_key: str, kind: Kind, replace_text: ReplaceText
) -> Mapping[str, Any]:
    """A tool or response format with replaced texts: its own description, and the descriptions in its schema.

    `definition` has a `name`, which is the key of its texts; without one it is returned unchanged. `schema_key` is the
    field with its schema: "parameters" or "schema".
    """
    name = definition.get("name")
    if not isinstance(name, str):
        return definition
    changed: dict[str, Any] = {}
    description = definition.get("description")
    if isinstance(description, str):
        _put(changed, "description", description, _replacement(replace_text, kind, name, description))
    schema = definition.get(schema_key)
    _put(changed, schema_key, schema, _replace_in_schema(schema, kind, f"{name}/", replace_text))
    return {**definition, **changed} if changed else definition


def _replace_in_schema(schema: Any, kind: Kind, key: str, replace_text: ReplaceText) -> Any:
    """A JSON schema with replaced descriptions, in it and in the schemas nested in it; `schema` itself if nothing
    changes.

    `key` names the description: the tool's name and the path of the schema in it, such as `search/filter`.
    """
    path_below = key if key.endswith("/") else f"{key}/"
    if isinstance(schema, list | tuple):
        replaced = [
            _replace_in_schema(nested, kind, f"{path_below}{number}", replace_text)
            for number, nested in enumerate(schema)
        ]
        is_changed = any(new is not old for new, old in zip(replaced, schema, strict=True))
        return replaced if is_changed else schema
    if not isinstance(schema, Mapping):
        return schema
    changed: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword == "description" and isinstance(value, str):
            _put(changed, keyword, value, _replacement(replace_text, kind, key, value))
        elif keyword in _NAMED and isinstance(value, Mapping):
            schemas: dict[str, Any] = {}
            for name, nested in value.items():
                schemas[name] = _replace_in_schema(nested, kind, f"{path_below}{name}", replace_text)
            is_changed = any(schemas[name] is not value[name] for name in schemas)
            if is_changed:
                changed[keyword] = schemas
        elif keyword in _NESTED:
            _put(changed, keyword, value, _replace_in_schema(value, kind, f"{path_below}{keyword}", replace_text))
    return {**schema, **changed} if changed else schema


def _replace_in_part(part: Any, kind: Kind, replace_text: ReplaceText) -> Any:
    """A part of a message's content with its text replaced. Images and other parts stay."""
    if not isinstance(part, Mapping) or part.get("type") not in ("text", "input_text"):
        return part
    text = part.get("text")
    if not isinstance(text, str):
        return part
    new_text = _replacement(replace_text, kind, MESSAGE_KEY, text)
    return part if new_text is text else {**part, "text": new_text}


def _replacement(replace_text: ReplaceText, kind: Kind, key: str, text: str) -> str:
    """The replacement of a text, or the text itself if it stays."""
    new = replace_text(kind, key, text)
    return text if new is None else new


def map_list(values: Any, change: Callable[[Any], Any]) -> Any:
    """The list with `change` applied to each value; the list itself if nothing changes."""
    new = [change(value) for value in values]
    return values if all(a is b for a, b in zip(new, values, strict=True)) else new


def _put(changed: dict[str, Any], key: str, old: Any, new: Any) -> None:
    if new is not old:
        changed[key] = new
