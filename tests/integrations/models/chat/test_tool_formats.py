"""Tool calls as other model families write them: recognised in the chat template, read, framed, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotune.errors import ConfigError, RequestRefused, SamplerError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import FORMATS, tool_format
from tests.integrations import tiny_models

USER = {"role": "user", "content": "hi"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "go",
            "parameters": {
                "type": "object",
                "properties": {"to": {"type": "integer"}, "why": {"type": "string"}, "by": {"type": "array"}},
            },
        },
    }
]
WANTED = {"to": 7, "why": 'a "b"; {c}\n[TOOL_CALLS]d'.replace("[TOOL_CALLS]", ""), "by": [1, {"x": None}]}
CALLS = {
    "hermes": "<tool_call>\n{{ {'name': f.name, 'arguments': f.arguments} | tojson }}\n</tool_call>",
    "qwen3_coder": "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}<parameter={{ k }}>\n"
    "{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}</function>\n</tool_call>",
    "mistral": "[TOOL_CALLS] [{{ {'name': f.name, 'arguments': f.arguments} | tojson }}]",
    "mistral_v11": "[TOOL_CALLS]{{ f.name }}[ARGS]{{ f.arguments | tojson }}",
    "llama3_json": "{{ {'name': f.name, 'parameters': f.arguments} | tojson }}",
}


def made(call: str, tools: str = "auto") -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        f"{{% set f = c.function %}}{call}"
        "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    return ChatTemplate(tokenizer, [2], tools=tools)


def said(chat: ChatTemplate, message: dict[str, Any]) -> str:
    """A reply as the template writes it."""
    head = chat._template([USER], None, {})
    return chat._template([USER, message], None, {}, generation=False)[len(head) :].removesuffix("<|im_end|>\n")


def called(arguments: dict[str, Any]) -> dict[str, Any]:
    return {"id": "abcdefghi", "type": "function", "function": {"name": "go", "arguments": json.dumps(arguments)}}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_as_the_template_writes_it_is_read(name: str) -> None:
    chat = made(CALLS[name])
    assert chat.tool_format is FORMATS[name]
    reply = said(chat, {"role": "assistant", "content": "", "tool_calls": [called(WANTED)]})
    ids = chat.tokenizer.encode(reply, add_special_tokens=False)
    _, message, finish = chat.parse([*ids, 2], tools=TOOLS)
    assert finish == "tool_calls"
    assert message["content"] is None
    [call] = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("go", WANTED)
    assert chat.parse(chat.tokenizer.encode("Plain [1] {x}.", add_special_tokens=False), tools=TOOLS)[1:] == (
        {"role": "assistant", "content": "Plain [1] {x}."},
        "stop",
    )


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_v11"])
def test_a_call_can_be_demanded(name: str) -> None:
    chat = made(CALLS[name])
    reply = said(chat, {"role": "assistant", "content": "", "tool_calls": [called({"to": 7})]})
    grammar = chat.grammar({"tool_choice": "required"}, TOOLS, chat.render([USER], TOOLS))
    for text, taken in ((reply, True), ("No.", False)):
        matcher = chat._grammars.start(grammar)
        ids = [*chat.tokenizer.encode(text, add_special_tokens=False), 2]
        assert all(matcher.consume(token) for token in ids) == taken


@pytest.mark.parametrize("name", ["qwen3_coder", "llama3_json"])
def test_a_call_that_cannot_be_demanded_is_refused(name: str) -> None:
    chat = made(CALLS[name])
    prompt = chat.render([USER], TOOLS)
    with pytest.raises(RequestRefused, match="cannot be enforced in the format"):
        chat.grammar({"tool_choice": "required"}, TOOLS, prompt)
    assert chat.grammar({"tool_choice": "none"}, TOOLS, prompt)


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("mistral", '[TOOL_CALLS] [{"name": "go", "argum'),
        ("mistral", "[TOOL_CALLS] go there"),
        ("mistral_v11", '[TOOL_CALLS]go[ARGS]{"to": '),
        ("llama3_json", '{"name": "go", "parameters": {'),
        ("qwen3_coder", "<tool_call>\n<function=go>\n<parameter=to>"),
        ("qwen3_coder", '<tool_call>{"name": "go"}</tool_call>'),
    ],
)
def test_a_call_that_cannot_be_read_is_text_and_named(name: str, reply: str) -> None:
    chat = made(CALLS[name])
    text, message, finish = chat.parse(chat.tokenizer.encode(reply, add_special_tokens=False), tools=TOOLS)
    assert (text, finish) == (reply, "malformed")
    assert message == {"role": "assistant", "content": reply}


@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("mistral", '[TOOL_CALLS][{"name": "go", "arguments": {}}, {"name": "go", "arguments": {"to": 1}}]'),
        ("mistral_v11", '[TOOL_CALLS]go[ARGS]{}[TOOL_CALLS]go[ARGS]{"to": 1}'),
        ("qwen3_coder", "<tool_call><function=go></function></tool_call>\n"
                        "<tool_call><function=go><parameter=to>1</parameter></function></tool_call>"),
    ],
)  # fmt: skip
def test_two_calls_in_one_reply(name: str, reply: str) -> None:
    rest, calls = FORMATS[name].read(reply, TOOLS)
    assert rest.strip() == ""
    assert [call["arguments"] for call in calls] == [{}, {"to": 1}]


def test_json_that_is_an_answer_is_no_call() -> None:
    chat = made(CALLS["llama3_json"])
    for reply, tools in (('{"name": "Bob", "type": "cat"}', TOOLS), ('{"name": "f", "parameters": {}}', None)):
        ids = chat.tokenizer.encode(reply, add_special_tokens=False)
        assert chat.parse(ids, tools=tools)[1:] == ({"role": "assistant", "content": reply}, "stop")


def test_a_form_that_nothing_reads_is_refused_when_tools_are_offered() -> None:
    chat = made("CALL {{ f.name }} WITH {{ f.arguments }}")
    assert chat.tool_format is None
    assert chat.render([USER], None)
    with pytest.raises(SamplerError, match=r"in an unknown form: \"CALL probe_function.*vllm:NAME"):
        chat.render([USER], TOOLS)


def test_a_format_that_is_named_is_taken_and_an_unknown_one_refused() -> None:
    assert made("CALL {{ f.name }}", "mistral").tool_format is FORMATS["mistral"]
    with pytest.raises(ConfigError, match=r"tool_format = 'gpt4' is not auto, hermes, .*vllm:NAME") as caught:
        tool_format("gpt4", None)
    assert caught.value.field == "tool_format"


def test_a_template_without_calls_is_read_as_hermes() -> None:
    assert made("").tool_format is FORMATS["hermes"]
    refusing = "{{ raise_exception('no tools') if messages[-1].tool_calls }}{{ messages[0].content }}"
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = refusing
    assert ChatTemplate(tokenizer, [2]).tool_format is FORMATS["hermes"]


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        ('{"name": "go", "parameters": {"to": 1}}', {"to": 1}),
        ('{"name": "go", "arguments": {}, "parameters": {"to": 1}}', {}),
        ('{"name": "go"}', {}),
    ],
)
def test_parameters_in_place_of_arguments_are_the_arguments(call: str, arguments: Any) -> None:
    chat = made(CALLS["hermes"])
    ids = chat.tokenizer.encode(f"<tool_call>{call}</tool_call>", add_special_tokens=False)
    [found] = chat.parse(ids, tools=TOOLS)[1]["tool_calls"]
    assert json.loads(found["function"]["arguments"]) == arguments


def test_parameters_that_are_no_object_are_no_call() -> None:
    text = '<tool_call>{"name": "go", "parameters": [1]}</tool_call>'
    assert FORMATS["hermes"].read(text, TOOLS) == (text, [])
