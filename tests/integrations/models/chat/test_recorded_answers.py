"""Answers of another model as token ids of this one: by its own template, or not at all."""

from __future__ import annotations

import json
from typing import Any

import pytest

from cotune.integrations.models.chat.answers import EncodedAnswer, encode_answer
from cotune.integrations.models.chat.template import ChatTemplate
from tests.integrations import tiny_models

ASKED = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how much?"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"properties": {"item": {}}}}}]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(template: str | None = None) -> ChatTemplate:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = template or tokenizer.chat_template
    return ChatTemplate(tokenizer, [tokenizer.eos_token_id])


def said(text: str | None, *calls: tuple[str, Any], **more: Any) -> dict[str, Any]:
    made = [{"id": "x", "type": "function", "function": {"name": n, "arguments": a}} for n, a in calls]
    return {"role": "assistant", "content": text, **({"tool_calls": made} if made else {}), **more}


def answer_of(model: ChatTemplate, answer: dict[str, Any], tools: Any = None) -> str:
    found = encode_answer(model, ASKED, tools, answer)
    assert isinstance(found, EncodedAnswer)
    assert list(found.prompt) == model.render(ASKED, tools)
    return str(model.tokenizer.decode(found.answer))


def test_a_text_ends_with_the_end_token() -> None:
    assert answer_of(chat(), said("nine")) == "nine<|im_end|>"
    assert (
        answer_of(chat(), said([{"type": "text", "text": "ni"}, {"type": "text", "text": "ne"}])) == "ni\nne<|im_end|>"
    )
    plain = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    plain += "{% if add_generation_prompt %}assistant: {% endif %}"
    assert answer_of(chat(plain), said("nine")) == "nine\n<|im_end|>"


def test_a_tool_call_is_written_as_the_model_writes_it() -> None:
    arguments = json.dumps({"item": "lamp"})
    found = answer_of(chat(), said("I look.", ("look", arguments), ("look", '{"item": "pen"}')), TOOLS)
    calls = [json.dumps({"name": "look", "arguments": {"item": item}}) for item in ("lamp", "pen")]
    assert [json.loads(part.partition("</tool_call>")[0]) for part in found.split("<tool_call>")[1:]] == [
        json.loads(call) for call in calls
    ]
    assert found.startswith("I look.<tool_call>") and found.endswith("</tool_call><|im_end|>")


def test_a_call_is_an_answer_where_the_record_has_no_tools() -> None:
    """As traces of other tools may have none, though the answer calls one."""
    found = answer_of(chat(), said(None, ("look", '{"item": "pen"}')))
    assert found.startswith("<tool_call>") and found.endswith("</tool_call><|im_end|>")


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (said(None), "empty_answer"),
        (said("  "), "empty_answer"),
        (said("one<|im_end|>two"), "inexpressible"),
        (said('<tool_call>{"name": "look", "arguments": {}}</tool_call>'), "inexpressible"),
        (said(None, function_call={"name": "look", "arguments": "{}"}), "inexpressible"),
        (said([{"type": "text", "text": "see"}, {"type": "image_url"}]), "unrenderable"),
    ],
)
def test_what_the_template_cannot_express(answer: dict[str, Any], reason: str) -> None:
    assert encode_answer(chat(), ASKED, TOOLS, answer) == reason


def test_calls_that_the_template_does_not_show_are_no_answer() -> None:
    assert encode_answer(chat(THINKING), ASKED, TOOLS, said("I look.", ("look", "{}"))) == "inexpressible"


def test_reasoning_is_learned_where_the_template_shows_it() -> None:
    thought = said("nine", reasoning_content="3 x 3")
    assert answer_of(chat(THINKING), thought) == "<think>\n3 x 3\n</think>\n\nnine<|im_end|>"
    found = encode_answer(chat(), ASKED, None, thought)
    assert isinstance(found, EncodedAnswer) and found.dropped_reasoning
    assert chat().tokenizer.decode(found.answer) == "nine<|im_end|>"


def test_a_template_that_turns_an_answer_round_is_noticed() -> None:
    upper = tiny_models.TEMPLATE.replace("{{ m.content }}", "{{ m.content | upper }}")
    assert encode_answer(chat(upper), ASKED, None, said("nine")) == "inexpressible"
    opened = THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    assert encode_answer(chat(opened), ASKED, None, said("nine")) == "inexpressible"
