"""The formats of tool calls and reasoning in replies. The object of a format has its marks, its reader and its grammar.

Formats other than Hermes are read by transformers' response templates, or by any tool parser of vLLM (`vllm:NAME`).
"""

from __future__ import annotations

import functools
import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from cotune.errors import ConfigError, RequestRefused, install_extra
from cotune.integrations.models.chat.content import parsed_arguments

REASONING = ("<think>", "</think>")
TOOL_CALL = ("<tool_call>", "</tool_call>")

_TOOL_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_ID_ALPHABET = string.ascii_letters + string.digits
AUTO = "auto"
VLLM = "vllm:"
Tools = Sequence[Mapping[str, Any]]
Read = Callable[[str, Tools], tuple[str, list[dict[str, Any]]]]
"""A function of a reply without reasoning and of the request's tools. It returns the remaining text and the calls
(`name`, `arguments`)."""


Token = Callable[[str], int | None]
"""A function that returns the id of a mark that is a special token; None for a mark that is text."""
Grammar = Callable[[str, str, Token], str]


def read_hermes(text: str) -> tuple[str, list[dict[str, Any]]]:
    """The remaining text of a reply, and its calls. A call that is malformed or not closed stays in the text."""
    calls: list[dict[str, Any]] = []

    def take(match: re.Match[str]) -> str:
        call = with_arguments(_value(match.group(1)))
        if not is_call(call):
            return match.group(0)
        calls.append(call)
        return ""

    return _TOOL_CALL.sub(take, text), calls


def call_grammar(name: str, arguments: str, token: Callable[[str], int | None]) -> str:
    """The grammar of the text after the mark of a call, from the grammar of its arguments."""
    opened = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
    closing = token(TOOL_CALL[1])
    end = json.dumps(TOOL_CALL[1]) if closing is None else f"<[{closing}]>"
    return rf'/\n?/ {opened} {arguments} "}}" /\n?/ {end}'


def split_reasoning(text: str, *, opened: bool = False) -> tuple[str, str]:
    """Reasoning of a reply, and the text after it, which is empty if the reply ends within its reasoning.

    `opened` says that the prompt has opened the reasoning.
    """
    opening, closing = REASONING
    before, closing_mark, after = text.partition(closing)
    if closing_mark:
        # The prompt may have opened the reasoning, so that the reply has only the closing mark.
        reasoning = before.partition(opening)[2] if opening in before else before
        return reasoning.strip(), after.lstrip("\n")
    if text.lstrip().startswith(opening):
        return text.partition(opening)[2].strip(), ""
    if opened:
        return text.strip(), ""
    return "", text


def is_call(call: Any) -> bool:
    """Whether a value is a call: a name, and arguments that are an object, or the text of one.

    The arguments must be JSON to every reader. Python's own parser also takes NaN, Infinity, numbers that overflow and
    halves of a surrogate pair. An application may refuse those, and no record can hold them.
    """
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return False
    arguments = call.get("arguments", {})
    try:
        call["name"].encode()
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return isinstance(msgspec.json.decode(written), dict)
    except (ValueError, TypeError, RecursionError):  # msgspec's and Unicode's errors are ValueErrors
        return False


def with_arguments(call: Any) -> Any:
    """A call with `parameters`, as some models write it, with `arguments` instead; any other value unchanged."""
    if isinstance(call, dict) and call.get("arguments") is None and call.get("parameters") is not None:
        return {**call, "arguments": call["parameters"]}
    return call


def tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call in OpenAI form, with the model's id or a random one."""
    arguments = call.get("arguments", {})
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    name = call.get("id") or "".join(secrets.choice(_ID_ALPHABET) for _ in range(9))
    return {"id": name, "type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _no_grammar(function: str, arguments: str, token: Token) -> str:
    raise RequestRefused(
        "Tool calls cannot be enforced in the format in which this model writes them.",
        "Leave the choice to the model: tool_choice auto, functions that are not strict, and no response_format.",
    )


@dataclass(frozen=True)
class ToolFormat:
    """A format of tool calls."""

    name: str
    marks: tuple[str, ...]
    """Texts that open and close calls. If the remaining text of a reply contains the first one, a call could not be
    read."""
    read: Read
    """Raises ValueError for a reply that cannot be read at all."""
    call: Grammar = _no_grammar
    """The grammar after the first mark, from a function's name, the grammar of its arguments, and the ids of marks.
    Raises RequestRefused for a format without a grammar."""

    def unread(self, content: str) -> bool:
        """Whether the remaining text of a reply contains the mark of a call."""
        return bool(self.marks) and self.marks[0] in content


def _response_template(**call: Any) -> dict[str, Any]:
    """A response template of transformers with this field for tool calls; everything else is content."""
    return {
        "start_anchor": "\0",
        "defaults": {"content": ""},
        "fields": {"tool_calls": {"repeats": True, **call}, "content": {"content": "text", "content_args": _AS_IS}},
    }


_AS_IS = {"strip": False}
_TEMPLATES: Mapping[str, Mapping[str, Any]] = {
    "llama3_json": _response_template(
        open_pattern=r"\A\s*(?:<\|python_tag\|>\s*)?(?=\{.*\"(?:parameters|arguments)\"\s*:)",
        close_pattern=r"\s*\Z",
        content="json",
    ),
    "mistral": _response_template(
        open_pattern=r"\[TOOL_CALLS\]\s*(?=\[)",
        close_pattern=r"\s*\Z",
        content="json",
    ),
    "mistral_v11": _response_template(
        open_pattern=r"\[TOOL_CALLS\]\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)",
        close_pattern=r"\s*(?=\[TOOL_CALLS\])|\s*\Z",
        content="json",
        transform={"name": "{name}", "arguments": "{content}"},
    ),
    "qwen3_coder": _response_template(
        open_pattern=r"\s*<tool_call>\s*<function=(?P<name>[^>\s]+)>",
        close_pattern=r"</function>\s*</tool_call>\s*",
        content="xml-inline",
        content_args={"tag_pattern": r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>"},
        transform={"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    ),
}


def _by_template(name: str, call_marks: tuple[str, str] | None = None) -> Read:
    """A reader by a response template. `call_marks` are the mark that opens a call, and the mark that must close it;
    None if a call needs no closing mark.
    """
    template = _TEMPLATES[name]

    def read(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        """Read content and tool calls of a reply by the tokenizer's own response template. Raises ValueError for broken
        calls.
        """
        if call_marks is not None:
            opening, closing = call_marks
            last_call_is_open = text.rfind(opening) > text.rfind(closing)
            if last_call_is_open:
                raise ValueError("a tool call that is not closed")
        parse_response = _parse_response()
        parsed_reply = parse_response(text, template, prefix="", tools=list(tools))
        calls = []
        for match in parsed_reply.get("tool_calls") or []:
            # A match may be one call, or a list of calls.
            calls_of_match = match if isinstance(match, list) else [match]
            calls += [_name_and_arguments(call) for call in calls_of_match]
        if not all(is_call(call) for call in calls):
            raise ValueError("a tool call without name and arguments")
        return parsed_reply.get("content") or "", calls

    return read


@functools.cache
def _parse_response() -> Callable[..., dict[str, Any]]:
    """transformers' parser. It is cached because `without_torch` removes transformers from the loaded modules."""
    from transformers.utils.chat_parsing import parse_response

    return parse_response


def _name_and_arguments(call: Any) -> dict[str, Any]:
    """A call as `name` and `arguments`, from the different forms of models."""
    if not isinstance(call, Mapping):
        raise ValueError("a tool call that is no object")
    call = call.get("function", call) if isinstance(call.get("function", call), Mapping) else call
    plain = {"name": call.get("name"), "arguments": call.get("arguments", call.get("parameters"))}
    return {**plain, "arguments": {}} if plain["arguments"] is None else plain


def _mistral(function: str, arguments: str, token: Token) -> str:
    opened = json.dumps(f'[{{"name": {json.dumps(function)}, "arguments": ')
    return f'/ ?/ {opened} {arguments} "}}]"'


def _mistral_v11(function: str, arguments: str, token: Token) -> str:
    mark = token("[ARGS]")
    return f"{json.dumps(function)} {json.dumps('[ARGS]') if mark is None else f'<[{mark}]>'} {arguments}"


HERMES = ToolFormat("hermes", TOOL_CALL, lambda text, tools: read_hermes(text), call_grammar)
FORMATS: Mapping[str, ToolFormat] = {
    format.name: format
    for format in (
        HERMES,
        ToolFormat("qwen3_coder", (*TOOL_CALL, "<function="), _by_template("qwen3_coder", TOOL_CALL)),
        ToolFormat("mistral", ("[TOOL_CALLS]",), _by_template("mistral"), _mistral),
        ToolFormat("mistral_v11", ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"), _by_template("mistral_v11"), _mistral_v11),
        ToolFormat("llama3_json", ("<|python_tag|>",), _by_template("llama3_json")),
    )
}
"""Name -> format. `auto` tries them in this order on the output of a chat template."""


def tool_format(name: str, tokenizer: Any) -> ToolFormat:
    """The format of a name: of `FORMATS`, or `vllm:` and the name of a tool parser of vLLM. Raises ConfigError."""
    check_tool_format(name)
    return FORMATS[name] if name in FORMATS else _of_vllm(name, tokenizer)


def check_tool_format(name: str, field: str = "tool_format") -> None:
    """Raise ConfigError for an unknown `tool_format`. A parser of vLLM is only checked when it is loaded."""
    if name in (AUTO, *FORMATS) or name.startswith(VLLM):
        return
    raise ConfigError(field, name, f"is not auto, {', '.join(FORMATS)}, or vllm:NAME of a tool parser of vLLM")


def _of_vllm(name: str, tokenizer: Any) -> ToolFormat:
    """A format that reads tool calls with a parser of vLLM. Raises ConfigError if vLLM or the parser cannot be used."""
    try:
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError("tool_format", name, f"needs vLLM ({error})", install_extra("vllm")) from None
    try:
        parser_class: Any = ToolParserManager.get_tool_parser(name.removeprefix(VLLM))
    except KeyError:
        names = ", ".join(ToolParserManager.list_registered())
        raise ConfigError(
            "tool_format", name, "is not a tool parser of vLLM", f"Use vllm: and one of {names}."
        ) from None
    try:
        parser_class(tokenizer)
    except Exception as error:  # noqa: BLE001, a parser that lacks its marks in the vocabulary may raise any error
        raise ConfigError(
            "tool_format", name, f"is not a format of this model ({error})", 'Use tool_format = "auto".'
        ) from None

    def read(text: str, tools: Tools) -> tuple[str, list[dict[str, Any]]]:
        """Read content and tool calls of a reply by a tool parser of vLLM. Raises ValueError for broken calls."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest.model_validate({"model": "", "messages": [], "tools": list(tools) or None})
        parser = parser_class(tokenizer, request.tools)
        extracted = parser.extract_tool_calls(text, request)
        if not extracted.tools_called:
            return text, []
        calls = []
        for tool_call in extracted.tool_calls:
            function = tool_call.function
            calls.append({"id": tool_call.id, "name": function.name, "arguments": function.arguments})
        if not all(is_call(call) for call in calls):
            raise ValueError("a tool call without name and arguments")
        return extracted.content or "", calls

    return ToolFormat(name, (), read)


_QUESTION = "probe question"
_FUNCTION = "probe_function"
_VALUE = "probe value"
_PROBE_TOOLS = [{"type": "function", "function": {"name": _FUNCTION, "description": "d", "parameters": {
    "type": "object", "properties": {"probe_key": {"type": "string", "description": "d"}}}}}]  # fmt: skip
_CALL = {"type": "function", "id": "probe0001", "function": {"name": _FUNCTION, "arguments": {"probe_key": _VALUE}}}


def write_sample_call(template: Callable[[list[dict[str, Any]], bool], str], ends: Sequence[str]) -> str | None:
    """A tool call as a chat template writes it; None if the template writes none.

    `template` renders messages, with a generation prompt or without. `ends` are the texts of end tokens.
    """
    request = [{"role": "user", "content": _QUESTION}]
    answer = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    prompt = template(request, True)
    transcript = template([*request, answer], False)
    if transcript.startswith(prompt):
        reply = transcript.removeprefix(prompt)
    else:
        _, _, reply = transcript.rpartition(_QUESTION)
    if _FUNCTION not in reply or _VALUE not in reply:
        return None
    # The call ends at the first end token after its arguments.
    arguments_at = reply.index(_VALUE)
    call_end = len(reply)
    for end in ends:
        if end and end in reply[arguments_at:]:
            call_end = min(call_end, reply.index(end, arguments_at))
    return reply[:call_end]


def shown_by(template: Callable[[list[dict[str, Any]], Tools], str]) -> bool:
    """Whether a chat template shows the tools of a request. `template` renders messages with tools."""
    return _FUNCTION in template([{"role": "user", "content": _QUESTION}], _PROBE_TOOLS)


def format_that_reads(sample_call: str) -> ToolFormat | None:
    """The format that can read the text of a tool call from `write_sample_call`; None if no format can."""
    for format in FORMATS.values():
        try:
            _, calls = format.read(sample_call, _PROBE_TOOLS)
        except (ValueError, KeyError, TypeError):
            continue  # not the format of this template
        names_and_arguments = [(call["name"], parsed_arguments(call["arguments"])) for call in calls]
        if names_and_arguments == [(_FUNCTION, {"probe_key": _VALUE})]:
            return format
    return None
