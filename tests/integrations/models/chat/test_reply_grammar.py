"""What a request fixes of its reply, as a grammar: random walks through it are read back by the chat format."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from cotune.errors import RequestRefused, SamplerError
from cotune.integrations.models.chat import grammar
from cotune.integrations.models.chat.reply_grammar import json_grammar
from cotune.integrations.models.chat.template import ChatTemplate
from tests.integrations.tiny_models import tokenizer

USER = {"role": "user", "content": "go"}
GO = {
    "type": "function",
    "function": {
        "name": "go",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"to": {"enum": ["north", "south"]}, "far": {"$ref": "#/$defs/far"}},
            "required": ["to", "far"],
            "$defs": {"far": {"type": "integer", "minimum": 1, "maximum": 3}},
        },
    },
}
STAY = {"type": "function", "function": {"name": "stay", "parameters": {"type": "object", "uniqueItems": True}}}
NAMED = {"type": "function", "function": {"name": "go"}}
POINT = {"type": "object", "properties": {"x": {"type": "integer", "maximum": 9, "minimum": 0}}, "required": ["x"]}
FORM = {"type": "json_schema", "json_schema": {"name": "point", "schema": POINT}}


def chat(template: str = "", **changes: Any) -> ChatTemplate:
    made = tokenizer()
    made.chat_template += template
    return ChatTemplate(made, [2], **changes)


def walk(chat: ChatTemplate, asked: dict[str, Any], tools: Any = None, seed: int = 0, first: str = "") -> list[int]:
    """A reply drawn evenly from what the grammar allows, `first` at its beginning, of at most 400 tokens."""
    prompt = chat.render([USER], tools)
    matcher = chat._grammars.start(chat.grammar(asked, tools, prompt))
    chance, bits, reply = np.random.default_rng(seed), np.empty(matcher.words, np.int32), []
    forced = chat._encode(first)
    while len(reply) < 400 and 2 not in reply:
        matcher.allowed(bits)
        allowed = np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little"))
        token = forced[len(reply)] if len(reply) < len(forced) else int(chance.choice(allowed))
        assert token in allowed, chat.tokenizer.decode([*reply, token])
        assert matcher.consume(token)
        reply.append(token)
    return reply


@pytest.mark.parametrize("seed", range(4))
def test_a_schema_is_kept_and_closed(seed: int) -> None:
    format = chat()
    text, message, finish = format.parse(walk(format, {"response_format": FORM}, seed=seed))
    assert finish == "stop"
    assert message == {"role": "assistant", "content": text}
    jsonschema.validate(json.loads(text), {**POINT, "additionalProperties": False})


def test_a_json_object() -> None:
    format = chat()
    text, _, _ = format.parse(
        walk(format, {"response_format": {"type": "json_object"}}, first='{"a": [1, {}], "b": null}')
    )
    assert json.loads(text) == {"a": [1, {}], "b": None}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["required", NAMED, {"type": "allowed_tools", "mode": "required", "tools": [NAMED]}])
def test_a_forced_call_is_read_and_fits_its_schema(choice: Any, seed: int) -> None:
    format = chat()
    asked = {"tool_choice": choice, "parallel_tool_calls": False}
    first = '<tool_call>\n{"name": "go"' if seed % 2 else ""
    tools = [GO] if choice == "required" else [GO, STAY]
    _, message, finish = format.parse(walk(format, asked, tools, seed, first), tools=tools)
    assert finish == "tool_calls"
    assert message["content"] is None
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "go"
    jsonschema.validate(json.loads(call["function"]["arguments"]), GO["function"]["parameters"])


def test_strict_tools_leave_text_free_and_hold_calls() -> None:
    format = chat()
    reply = walk(format, {}, [GO, STAY], first='Hello.<tool_call>{"name": "go", "arguments": {"to": "n')
    said = format.tokenizer.decode(reply)
    assert said.startswith('Hello.<tool_call>{"name": "go", "arguments": {"to": "north"')
    with pytest.raises(AssertionError):
        walk(format, {}, [GO, STAY], first='<tool_call>{"name": "go", "arguments": {}')
    walk(format, {}, [GO, STAY], first='<tool_call>{"name": "stay", "arguments": {}}')


def phrases() -> ChatTemplate:
    """Of a tokenizer with tokens for whole words and runs of signs, as `": "`, and none for a part of one, as `":`."""
    words = ["<|pad|>", "?", "<|im_end|>", "assistant", "name", "go", "arguments", "to", "north", "south"]
    signs = ["<|im_start|>", "<tool_call>", "</tool_call>", "\n", '{"', '": "', '", "', '": {"', '"}}']
    inner = Tokenizer(models.WordLevel({text: i for i, text in enumerate([*words, *signs])}, unk_token="?"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\n|[^\w\n]+"), "isolated")
    inner.decoder = decoders.Fuse()
    inner.add_tokens([text for text in (*words, *signs) if text.startswith("<")])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = tokenizer().chat_template
    return ChatTemplate(made, [2])


@pytest.mark.parametrize("seed", range(4))
def test_no_token_is_forced_where_a_tokenizer_has_none_for_the_text(seed: int) -> None:
    ways = {"type": "object", "properties": {"to": {"enum": ["north", "south"]}}, "required": ["to"]}
    tool = {"type": "function", "function": {"name": "go", "strict": True, "parameters": ways}}
    format = phrases()
    _, message, finish = format.parse(walk(format, {"tool_choice": "required"}, [tool], seed), tools=[tool])
    assert finish == "tool_calls"
    for call in message["tool_calls"]:
        jsonschema.validate(json.loads(call["function"]["arguments"]), ways)


def test_a_reply_ends_where_a_tokenizer_lacks_the_character_that_must_come() -> None:
    inner = Tokenizer(models.BPE(unk_token="?"))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|pad|>", "?", "<|im_end|>"]
    learned = trainers.BpeTrainer(vocab_size=99, special_tokens=special, show_progress=False)
    inner.train_from_iterator(['{"x" 12}<tool_call>\n'], learned)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = tokenizer().chat_template
    reply = walk(ChatTemplate(made, [2]), {"response_format": FORM})
    assert made.decode(reply) == '{"x"<|im_end|>'


def test_one_call_at_most() -> None:
    format = chat()
    call = '<tool_call>{"name": "stay", "arguments": {}}</tool_call>'
    walk(format, {}, [GO, STAY], first=call + call)
    for asked in ({"parallel_tool_calls": False}, {"parallel_tool_calls": False, "tool_choice": "required"}):
        walk(format, asked, [GO, STAY], first=call)
        with pytest.raises(AssertionError):
            walk(format, asked, [GO, STAY], first=call + call)


def test_no_call_where_none_may_be_made() -> None:
    with pytest.raises(AssertionError):
        walk(chat(), {"tool_choice": "none"}, [STAY], first="<tool_call>")
    walk(chat(), {"tool_choice": "none"}, [STAY], first="nothing to call")


def test_tools_beside_a_schema_answer_with_either() -> None:
    for first in ('{"x": 3}', "<tool_call>"):
        walk(chat(), {"response_format": FORM}, [GO], first=first)
    with pytest.raises(AssertionError):
        walk(chat(), {"response_format": FORM}, [GO], first="Sure")


def test_reasoning_comes_before_what_is_fixed() -> None:
    thinks = "{# <think> #}"
    _, message, _ = chat().parse(walk(chat(thinks), {"response_format": FORM}, first="<think>hm</think>\n\n{"))
    assert json.loads(message["content"])["x"] in range(10)
    assert message["reasoning_content"] == "hm"
    walk(chat(thinks), {"response_format": FORM}, first='{"x"')
    walk(chat("<think>\n"), {"response_format": FORM}, first='I see</think>{"x"')
    with pytest.raises(AssertionError):
        walk(chat("<think></think>"), {"response_format": FORM}, first="<think>")


def test_other_end_tokens_end_a_reply_too() -> None:
    made = tokenizer()
    other = made.convert_tokens_to_ids("<|pad|>")
    format = ChatTemplate(made, [2, other])
    matcher = format._grammars.start(format.grammar({"tool_choice": "none"}, [STAY], [8]))
    bits = np.empty(matcher.words, np.int32)
    matcher.allowed(bits)
    assert bits[0] >> 2 & 1
    assert bits[0] >> other & 1


@pytest.mark.parametrize(
    ("asked", "tools", "cause"),
    [
        ({"response_format": {"type": "xml"}}, None, "'xml'"),
        ({"response_format": {"type": "json_schema"}}, None, "no schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, None, "not"),
        ({"guided_choice": ["a", "b"]}, None, "guided_choice"),
        ({"structured_outputs": {"regex": "a+"}}, None, "structured_outputs"),
        ({"tool_choice": "required"}, None, "no tools"),
        ({"tool_choice": "sometimes"}, [GO], "'sometimes'"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, [GO], "'fly'.*'go'"),
        ({}, [{"type": "function", "function": {**STAY["function"], "strict": True}}], "uniqueItems"),
    ],
)
def test_what_cannot_be_enforced_is_refused_by_name(asked: dict[str, Any], tools: Any, cause: str) -> None:
    with pytest.raises(RequestRefused, match=cause):
        chat().grammar(asked, tools, [8])


def test_a_tokenizer_that_no_grammar_knows_is_said_by_the_request_not_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(tokenizer: Any, vocabulary: int) -> None:
        raise SamplerError("Structured output does not know this tokenizer.")

    monkeypatch.setattr(grammar, "_open", unknown)
    format = chat()
    format.open_grammars()
    with pytest.raises(SamplerError, match="does not know this tokenizer"):
        format.grammar({"response_format": {"type": "json_object"}}, None, [8])


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"properties": {"score": {}}, "patternProperties": {"^s": {}}}, r"\$"),
        ({"properties": {"a": {"items": {"properties": {"b": {}}, "patternProperties": {"^x": {}}}}}},
         r"\$\.properties\.a\.items"),
        ({"anyOf": [{}, {"properties": {"b": {}}, "patternProperties": {"^x": {}}}]}, r"\$\.anyOf\[1\]"),
    ],
)  # fmt: skip
def test_patterns_beside_properties_are_refused_with_their_place(schema: dict[str, Any], place: str) -> None:
    with pytest.raises(RequestRefused, match=f"{place}: patternProperties together with properties"):
        json_grammar({"type": "object", **schema})


def test_patterns_alone_are_enforced() -> None:
    patterns = {"type": "object", "patternProperties": {"^x": {"type": "string"}}}
    assert "patternProperties" in json_grammar(patterns)
    assert json_grammar({"enum": [{"properties": {"a": 1}, "patternProperties": {"b": 1}}]})


PATTERN = {"type": "string", "pattern": "^(?!x)a$"}


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"properties": {"amount": {"anyOf": [{"type": "number"}, PATTERN]}}},
         r"amount\.anyOf\[1\]: pattern .*\(\?!x\)"),
        ({"properties": {"a": {"items": {"type": "integer", "minimum": -(2**63), "maximum": 2**64}, "type": "array"}}},
         r"a\.items: (minimum|maximum) "),
        ({"properties": {"a": {"$ref": "#/$defs/A"}},
          "$defs": {"A": {"properties": {"b": {"not": {}}}, "type": "object"}}}, r"a\.b: not \{\}"),
        ({"properties": {"a": {"uniqueItems": True, "type": "array"}}}, "a: uniqueItems true"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_place_and_the_keyword(schema: dict[str, Any], named: str) -> None:
    chat = ChatTemplate(tokenizer(), [2])
    asked = {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object", **schema}}}}
    with pytest.raises(RequestRefused, match=f"cannot be enforced: {named}"):
        chat.grammar(asked, None, [])


def test_a_refusal_of_a_tools_schema_names_the_tool() -> None:
    parameters = {"type": "object", "properties": {"a": PATTERN}}
    strict = [{"type": "function", "function": {"name": "go", "strict": True, "parameters": parameters}}]
    with pytest.raises(RequestRefused, match=r"cannot be enforced: tool go\.a: pattern"):
        ChatTemplate(tokenizer(), [2]).grammar({}, strict, [])
