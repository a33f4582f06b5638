"""Writes the form of a reply that a request asks for as one grammar: JSON, tool calls, or text without calls."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cotune.errors import RequestRefused
from cotune.integrations.models.chat.grammar_trial import NOT_ENFORCEABLE, Trials
from cotune.integrations.models.chat.tool_formats import TOOL_CALL, call_grammar
from cotune.sampling.request_params import (
    GUIDED,
    fixes_form,
    fixes_structure,
    form_type,
    function_of,
    integer,
    restrictions,
    texts_of,
    token_ids,
)

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}
"""Spaces like those of `json.dumps`, or none: a model cannot fill its reply with white space."""

DEPTH = 100
"""Deepest nesting of a schema. The library reads little more."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}


@dataclass(frozen=True)
class Syntax:
    """The syntax of replies in one chat format, for grammars."""

    call_mark: str
    """The mark that opens a tool call."""
    call: Callable[[str, str], str]
    """The grammar after this mark, from the function's name and the grammar of its arguments."""
    token: Callable[[str], int | None]
    """The id of a mark that is a special token; None for a mark that is text."""
    supports: Callable[[str], bool]
    """Whether a grammar can be compiled."""
    think: tuple[str, str] | None = None
    """The marks of reasoning; None if replies have none."""
    thinking: bool = False
    """Whether the prompt has opened the reasoning."""
    ends: Sequence[int] = field(default=())
    """End tokens in addition to the tokenizer's own."""
    spells: bool = True
    """Whether the tokenizer can write any text. If it cannot, llguidance must not choose the tokens of fixed text: it
    would allow only the token for unknown text, and then refuse it."""
    all_ends: Sequence[int] = field(default=())
    """All end tokens."""
    vocabulary: int | None = None
    """Number of tokens; None if unknown."""

    def mark(self, text: str) -> str:
        """A mark in a grammar: a text, or a special token by its id."""
        token = self.token(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def reply_grammar(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, syntax: Syntax) -> str:
    """Lark text of the replies that a request in OpenAI form allows.

    Raises RequestRefused for an unknown form. A schema that cannot be enforced is refused when the grammar is compiled.
    """
    if names := restrictions(body):
        return _restricted_grammar(body, tools, names, syntax)
    format_grammar = _format_grammar(body)
    mode, callable_tools = _tool_choice(body, list(tools or ()))
    must_call = mode == "required"
    several_calls = body.get("parallel_tool_calls") is not False
    calls = r"call (/\n?/ call)*" if several_calls else "call"
    call_rule = f"call: {syntax.mark(syntax.call_mark)} body"

    # `reply` is built from these rules: `call` is the mark of a call and its `body`, `text` has no calls, and `before`
    # is a text up to the mark of a call.
    rules: list[str] = []
    if must_call:
        reply = calls
        rules.append(call_rule)
    elif format_grammar and callable_tools:
        reply = f"{format_grammar} | {calls}"
        rules.append(call_rule)
    elif format_grammar:
        reply = format_grammar
    elif callable_tools:
        reply = "(before body)* text" if several_calls else "text | before body"
        rules += _text_before_call(syntax)
    else:
        reply = "text"
    if callable_tools:
        rules.append("body: " + " | ".join(_call(tool, syntax, forced=must_call) for tool in callable_tools))
    if not must_call and not format_grammar:
        rules += _text(syntax)

    thought = _reasoning_rules(syntax)
    start = f"start: {_thought_prefix(thought, syntax)}reply{_end_rule(syntax)}"
    return _grammar_text([start, f"reply: {reply}", *rules, *thought], syntax)


def _grammar_text(rules: Sequence[str], syntax: Syntax) -> str:
    """The text of a grammar with these rules, for llguidance."""
    options = "{}" if syntax.spells else '{"no_forcing": true}'
    return "\n".join([f"%llguidance {options}", *rules, ""])


def _thought_prefix(thought: list[str], syntax: Syntax) -> str:
    """Reasoning before a reply: required if the prompt has opened it, otherwise optional."""
    if not thought:
        return ""
    return "thought " if syntax.thinking else "thought? "


def _end_rule(syntax: Syntax) -> str:
    """Optional end tokens after a reply."""
    return f" ({' | '.join(f'<[{token}]>' for token in syntax.ends)})?" if syntax.ends else ""


_MOST_TRIES = 64
"""Most parts of a schema that are tried to find the refused one. Each may take a while."""
_SCHEMAS_BY_NAME = ("properties", "patternProperties")
_LISTS_OF_SCHEMAS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE_SCHEMAS = ("items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames")
"""Keywords of a schema that hold schemas: by name, in a list, or one."""


def refused_place(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, fault: Callable[[str], str]
) -> str:
    """The part of a request's schemas that llguidance refuses, as a text with its place in the schema, the keyword, its
    value and the reason; empty if it is not found.

    `fault` returns the reason why a grammar is refused; empty for a grammar that is not.
    """
    schemas: list[tuple[str, Any]] = []
    if form_type(body) == "json_schema":
        schemas.append(("", body["response_format"]["json_schema"]["schema"]))
    for tool in tools or ():
        if function_of(tool).get("strict"):
            schemas.append((f"tool {_name(tool)}", function_of(tool).get("parameters")))
    search = _RefusalSearch(fault)
    for name, schema in schemas:
        if isinstance(schema, Mapping):
            refused_part = search.find(name, schema)
            if refused_part:
                return refused_part
    return ""


class _RefusalSearch:
    """Finds the part of a schema that the library refuses, by trying its parts one by one."""

    def __init__(self, fault: Callable[[str], str]) -> None:
        """`fault` returns the reason why a grammar is refused; empty for a grammar that is not."""
        self._fault = fault
        self._tries = 0

    def find(self, name: str, root: Mapping[str, Any]) -> str:
        """The refused part of the schema `root`: place, keyword, value and reason; empty for a schema that is accepted.

        `name` begins the place; it is empty for a request's only schema.
        """
        reason = self._refusal_reason(root, root)
        if not reason:
            return ""
        path, schema, reason = self._innermost_refused(root, reason)
        if name:
            path = [name, *path]
        place = ".".join(path) or "the schema"
        # Find the keyword without which this part would be accepted.
        for keyword in schema:
            if keyword == "type":
                continue  # the other keywords depend on it
            other_keywords = {key: value for key, value in schema.items() if key != keyword}
            if not self._refusal_reason(other_keywords, root):
                value = json.dumps(schema[keyword], ensure_ascii=False)[:120]
                return f"{place}: {keyword} {value} ({reason.rstrip(':')})"
        return f"{place}: {reason}"

    def _innermost_refused(self, root: Mapping[str, Any], reason: str) -> tuple[list[str], Mapping[str, Any], str]:
        """The innermost part that is refused by itself: its path, the part, and the reason. A part may be a definition
        that the schema refers to. Its path then ends at the part with the reference.

        `reason` is the reason why the whole schema is refused.
        """
        path: list[str] = []
        innermost = root
        followed_references: set[str] = set()
        while True:
            refused_part = self._refused_part(innermost, root)
            if refused_part is not None:
                # Continue inside this part.
                place, innermost = refused_part
                path.append(place)
                reason = self._refusal_reason(innermost, root) or reason
                continue
            # Each part is accepted by itself. The schema may refer to a definition that is refused.
            target = self._refused_target(innermost, root, followed_references)
            if target is None:
                return path, innermost, reason
            innermost = target

    def _refused_part(self, schema: Mapping[str, Any], root: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]] | None:
        """The first part directly inside a schema that is refused by itself, with its place; None without one."""
        for place, part in _inner_schemas(schema):
            if self._refusal_reason(part, root):
                return place, part
        return None

    def _refused_target(
        self, schema: Mapping[str, Any], root: Mapping[str, Any], followed: set[str]
    ) -> Mapping[str, Any] | None:
        """The target of a schema's reference if it is refused, and was not `followed` before; otherwise None."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or reference in followed:
            return None
        followed.add(reference)
        target: Any = root
        for step in reference.removeprefix("#/").split("/"):
            target = target.get(step) if isinstance(target, Mapping) else None
        if isinstance(target, Mapping) and self._refusal_reason(target, root):
            return target
        return None

    def _refusal_reason(self, schema: Any, root: Mapping[str, Any]) -> str:
        """The reason why the library refuses a schema of this root; empty if it accepts it, or after too many tries."""
        self._tries += 1
        if self._tries > _MOST_TRIES:
            return ""
        definitions = {name: root[name] for name in ("$defs", "definitions") if name in root}
        complete = {**definitions, **schema} if isinstance(schema, Mapping) else schema
        try:
            return self._fault(f"start: {json_grammar(complete)}")
        except RequestRefused as refused:
            return refused.cause


def _inner_schemas(schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The schemas directly inside a schema, each with its place, such as `city` or `anyOf[1]`. Definitions are left
    out, as a schema that is only defined restricts nothing.
    """
    parts: list[tuple[str, Any]] = []
    for key, value in schema.items():
        if key in _SCHEMAS_BY_NAME and isinstance(value, Mapping):
            parts += value.items()
        elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
            parts += [(f"{key}[{index}]", part) for index, part in enumerate(value)]
        elif key in _SINGLE_SCHEMAS:
            parts.append((key, value))
    return [(place, part) for place, part in parts if isinstance(part, Mapping)]


def _restricted_grammar(
    body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None, names: list[str], syntax: Syntax
) -> str:
    """The grammar of free text with restricted tokens. `names` are the fields of the request that restrict them:
    min_tokens, allowed_token_ids or bad_words.
    """
    if len(names) > 1 or fixes_structure(body, tools):
        other = names[1] if len(names) > 1 else "a fixed form of the reply"
        raise RequestRefused(f"{names[0]} is not supported together with {other}.", "Ask for one of the two.")
    if names[0] == "min_tokens":
        rules = [_min_tokens_rule(body, syntax)]
    elif names[0] == "allowed_token_ids":
        rules = [_allowed_tokens_rule(body, syntax)]
    elif tools:
        raise RequestRefused("bad_words is not supported together with tools.", "Ask for one of the two.")
    else:
        words = "|".join(_regex(word) for word in texts_of("bad_words", body["bad_words"]))
        allowed_text = f"{_ANY_TEXT} & ~/(.|\\n)*({words})(.|\\n)*/"
        thought = _reasoning_rules(syntax, text=allowed_text)
        start = f"start: {_thought_prefix(thought, syntax)}TEXT{_end_rule(syntax)}"
        rules = [start, f"TEXT: {allowed_text}", *thought]
    return _grammar_text(rules, syntax)


def _min_tokens_rule(body: Mapping[str, Any], syntax: Syntax) -> str:
    """The rule of a reply whose first `min_tokens` tokens are no end tokens."""
    least = integer("min_tokens", body["min_tokens"])
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    if least < 0 or (isinstance(most, int) and least > most):
        cause = f"The request has min_tokens = {least}, which is not an integer from 0 to max_tokens."
        raise RequestRefused(cause, "Change it, or leave it out.")
    # The expression needs an id, so token 0 is excluded if no end token is known.
    end_ids = ",".join(map(str, syntax.all_ends)) or "0"
    tokens_before_end = f"<[^{end_ids}]>" + "{" + str(least) + "}"
    return f"start: {tokens_before_end} <[*]>*"


def _allowed_tokens_rule(body: Mapping[str, Any], syntax: Syntax) -> str:
    """The rule of a reply that has only the tokens in `allowed_token_ids`."""
    allowed = token_ids("allowed_token_ids", body["allowed_token_ids"])
    if syntax.vocabulary is not None and max(allowed) >= syntax.vocabulary:
        raise RequestRefused(
            f"allowed_token_ids names the token {max(allowed)}; the model has the tokens 0 to {syntax.vocabulary - 1}.",
            "Name tokens of the model that answers, by their ids.",
        )
    return f"start: <[{','.join(map(str, sorted(set(allowed))))}]>*"


def unenforceable(body: Mapping[str, Any], tools: Sequence[Mapping[str, Any]] | None) -> str:
    """The reason why no model can be held to the form that a request asks for; empty if it can, or if it asks for none.

    It is checked without a model, before training. Without llguidance installed, the schema itself is not checked.
    """
    if not fixes_form(body, tools):
        return ""
    fault: Callable[[str], str] = lambda grammar: ""  # noqa: E731
    if importlib.util.find_spec("llguidance"):
        fault = _trials().fault
    # Without a tokenizer, all marks are text.
    syntax_without_model = Syntax(
        call_mark=TOOL_CALL[0],
        call=lambda name, arguments: call_grammar(name, arguments, lambda mark: None),
        token=lambda mark: None,
        supports=lambda grammar: not fault(grammar),
    )
    try:
        error = fault(reply_grammar(body, tools, syntax_without_model))
        if error:
            # Name the part of the schema that is refused, if it can be found.
            error = refused_place(body, tools, fault) or error
    except RequestRefused as refused:
        return refused.cause
    return f"{NOT_ENFORCEABLE}: {error}." if error else ""


@functools.cache
def _trials() -> Trials:
    return Trials(None)


def json_grammar(schema: Mapping[str, Any] | bool) -> str:
    """The grammar of the JSON that a schema allows, without free white space.

    An object gets no further properties if its schema does not mention them, unless schemas are combined with `allOf`.
    Raises RequestRefused for a schema that is nested too deeply.
    """
    if _is_deeper(schema, DEPTH):
        raise RequestRefused(
            f"{NOT_ENFORCEABLE}: its schema is nested more than {DEPTH} deep.",
            "Use $defs and $ref, or ask for plain text and check the reply.",
        )
    if mixed_object := _mixed_patterns(schema):
        raise RequestRefused(
            f"{NOT_ENFORCEABLE}: {mixed_object}: patternProperties together with properties is not supported.",
            "Name all properties, or use patternProperties alone.",
        )
    # Properties of an object may stand in different parts of an `allOf`, and each part must allow the others.
    combines_schemas = "allOf" in json.dumps(schema)
    closed = schema if combines_schemas else _close_objects(schema)
    if not isinstance(closed, Mapping):  # a schema may also be true or false
        closed = {"allOf": [closed]}
    return "%json " + json.dumps({**closed, "x-guidance": JSON_STYLE})


def _format_grammar(body: Mapping[str, Any]) -> str:
    """The grammar of the reply's text that `response_format` asks for; empty for plain text. Raises RequestRefused for
    other forms.
    """
    for name in GUIDED:
        if body.get(name) is not None:
            raise RequestRefused(f"{name} is not supported.", "Ask for the form as response_format, or by a tool.")
    kind = form_type(body)
    if kind == "text":
        return ""
    if kind == "json_object":
        return json_grammar(ANY_OBJECT)
    if kind != "json_schema":
        raise RequestRefused(f"response_format {kind!r} is not supported.", "Use text, json_object or json_schema.")
    json_schema = body["response_format"].get("json_schema")
    schema = json_schema.get("schema") if isinstance(json_schema, Mapping) else None
    if not isinstance(schema, Mapping):
        raise RequestRefused("The response_format has no schema.", 'Give it as {"json_schema": {"schema": {...}}}.')
    return json_grammar(schema)


def _tool_choice(body: Mapping[str, Any], tools: list[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """Read `tool_choice` of a request. Returns "none", "auto" or "required", and the tools that the reply may call.

    A request may allow some of its tools only, or demand a call of a certain tool.
    """
    choice = body.get("tool_choice") or "auto"
    if not isinstance(choice, Mapping):
        return _mode_and_tools(str(choice), tools)
    if choice.get("type") != "allowed_tools":
        # A certain tool: {"type": "function", "function": {"name": ...}}, or with the name beside the type.
        return _mode_and_tools("required", _tools_named([_name(choice)], tools))
    # Chat Completions has the mode and the tools in an object of their own, the Responses API beside the type.
    restriction = choice.get("allowed_tools") or choice
    names = [_name(tool) for tool in restriction.get("tools") or ()]
    return _mode_and_tools(restriction.get("mode") or "auto", _tools_named(names, tools))


def _mode_and_tools(mode: str, tools: list[Mapping[str, Any]]) -> tuple[str, list[Mapping[str, Any]]]:
    """The mode "none", "auto" or "required" that `mode` names, and which of the tools a reply may call in it.

    "any" is another word for "required". Raises RequestRefused for other modes, and for "required" without tools.
    """
    if mode == "none":
        return "none", []
    if mode == "auto":
        return "auto", tools
    if mode not in ("required", "any"):
        raise RequestRefused(f"tool_choice = {mode!r} is not supported.", "Use none, auto, required or a function.")
    if not tools:
        raise RequestRefused("tool_choice asks for a call, and the request has no tools.", "Send the tools with it.")
    return "required", tools


def _tools_named(names: Sequence[str], tools: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The tools with these names. Raises RequestRefused for a name that the request's tools do not have."""
    tool_of_name = {_name(tool): tool for tool in tools}
    for name in names:
        if name not in tool_of_name:
            raise RequestRefused(
                f"tool_choice names {name!r}, which is none of the request's tools: {sorted(tool_of_name)}.",
                "Name a tool that the request sends.",
            )
    return [tool_of_name[name] for name in names]


def _name(tool: Mapping[str, Any]) -> str:
    return str(function_of(tool).get("name") or tool.get("name"))


def _call(tool: Mapping[str, Any], syntax: Syntax, *, forced: bool) -> str:
    """The grammar of a call of one function.

    The schema of its arguments is enforced for a strict function. It is also enforced if the reply must be a call and
    the library supports the schema.
    """
    function = function_of(tool)
    schema = function.get("parameters") or ANY_OBJECT
    is_enforced = bool(function.get("strict"))
    if not is_enforced and forced and not _is_deeper(schema, DEPTH):
        is_enforced = syntax.supports(f"start: {json_grammar(schema)}")
    arguments = json_grammar(schema if is_enforced else ANY_OBJECT)
    return syntax.call(_name(tool), arguments)


_ANY_TEXT = "/(.|\\n)*/"
"""A regular expression of a grammar that any text matches."""


def _text_before_call(syntax: Syntax) -> list[str]:
    """The rules of a text before a call, including the call's mark."""
    if syntax.token(syntax.call_mark) is None:
        return [f"before[lazy]: /(.|\\n)*{_regex(syntax.call_mark)}/"]
    return [f"before: ANYTHING {syntax.mark(syntax.call_mark)}"]


def _text(syntax: Syntax) -> list[str]:
    """The rules of a text without calls. A mark that is a special token is never a part of text."""
    if syntax.token(syntax.call_mark) is not None:
        return ["text: ANYTHING", f"ANYTHING: {_ANY_TEXT}"]
    return ["text: TEXT", f"TEXT: {_ANY_TEXT} & ~/(.|\\n)*{_regex(syntax.call_mark)}(.|\\n)*/"]


def _reasoning_rules(syntax: Syntax, text: str = _ANY_TEXT) -> list[str]:
    """The grammar rules of the model's reasoning before its reply; none for a model that does not reason.

    `text` is the pattern of the reasoning between its marks. It is ignored if the closing mark is no special token.
    """
    if syntax.think is None:
        return []
    opening, closing = syntax.think
    # Nothing, if the prompt has opened the reasoning already.
    opening_mark = "" if syntax.thinking else syntax.mark(opening) + " "
    up_to_two_newlines = r"/\n{0,2}/"
    if syntax.token(closing) is None:
        # The closing mark is text, so the reasoning ends with its first occurrence (`lazy`).
        return [
            f"thought: {opening_mark}thinking {up_to_two_newlines}",
            f"thinking[lazy]: /(.|\\n)*{_regex(closing)}/",
        ]
    return [f"thought: {opening_mark}THINKING {syntax.mark(closing)} {up_to_two_newlines}", f"THINKING: {text}"]


def _regex(text: str) -> str:
    return re.escape(text).replace("/", "\\/")


def _is_deeper(value: Any, most: int) -> bool:
    """Whether a JSON value is nested more than `most` deep."""
    # Level by level, not by recursion, which a deep value would break.
    level = [value]
    for _ in range(most):
        inner: list[Any] = []
        for part in level:
            if isinstance(part, Mapping):
                inner += part.values()
            elif isinstance(part, list):
                inner += part
        level = inner
    return bool(level)


_DATA = ("enum", "const", "default", "examples")
"""Keywords whose values are data instead of schemas."""


def _mixed_patterns(schema: Any, place: str = "$") -> str:
    """The place of an object that has both `patternProperties` and `properties`; empty without one.

    llguidance allows a comma after the last property even if no further name fits a pattern. The reply would then end
    there, in the middle of the object.
    """
    if isinstance(schema, list):
        parts = [(f"{place}[{index}]", part) for index, part in enumerate(schema)]
    elif isinstance(schema, Mapping):
        patterns = schema.get("patternProperties")
        properties = schema.get("properties")
        if isinstance(patterns, Mapping) and isinstance(properties, Mapping) and patterns and properties:
            return place
        parts = [(f"{place}.{key}", part) for key, part in schema.items() if key not in _DATA]
    else:
        return ""
    for part_place, part in parts:
        if mixed := _mixed_patterns(part, part_place):
            return mixed
    return ""


def _close_objects(schema: Any) -> Any:
    """The schema with `additionalProperties` false for each object that lists its properties and allows no others."""
    if isinstance(schema, list):
        return [_close_objects(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    closed = {key: value if key in _DATA else _close_objects(value) for key, value in schema.items()}
    lists_properties = schema.get("type") == "object" and isinstance(schema.get("properties"), Mapping)
    allows_others = any(key in schema for key in ("additionalProperties", "patternProperties", "unevaluatedProperties"))
    if lists_properties and not allows_others:
        closed["additionalProperties"] = False
    return closed
