"""Prompts that go on from earlier replies begin with the very ids that were sampled, whatever the template respells."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.token_reuse import EarlierIds, PathTexts
from cotune.records.ids import pack_ids
from tests.integrations import tiny_models

USER = {"role": "user", "content": "hi"}
TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
END = "<|im_end|>"
MERGED = ['": ', '{"', "</", "go", 'e": "', "\n<", "ar", "name"]
HEAD = """{%- if tools %}<|im_start|>system
# Tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}<|im_end|>
{% endif %}"""
RESULTS = """{%- elif m.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}<|im_start|>user{% endif %}
<tool_response>
{{ m.content }}
</tool_response>
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}<|im_end|>
{% endif %}"""
CALLS = """{%- for call in m.tool_calls or [] %}
{%- if m.content or not loop.first %}{{ "\\n" }}{% endif -%}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
"""
TAIL = """{%- else %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
HERMES = (
    HEAD
    + """{% for m in messages %}{% if m.role == "assistant" %}<|im_start|>assistant
{{ m.content | trim }}"""
    + CALLS
    + RESULTS
    + TAIL
)
"""Trims what the assistant said, spells calls anew, groups tool results into a user turn."""
QWEN3 = (
    HEAD
    + """{% set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == "user" %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}{% if m.role == "assistant" %}<|im_start|>assistant
{% if m.reasoning_content and loop.index0 > ns.last %}<think>
{{ m.reasoning_content }}
</think>

{% endif %}{{ m.content }}"""
    + CALLS
    + RESULTS
    + TAIL
)
"""Shows reasoning only after the last user message."""
TEMPLATES = {"hermes": HERMES, "qwen3": QWEN3}


@pytest.fixture(scope="module")
def chats() -> dict[str, ChatTemplate]:
    """Tokenizers with merged tokens, so that one text has many spellings in ids."""
    made = {}
    for name, template in TEMPLATES.items():
        tokenizer = tiny_models.tokenizer()
        tokenizer.add_tokens(MERGED)
        tokenizer.chat_template = template
        made[name] = ChatTemplate(tokenizer, [2])
    return made


def sampled(chat: ChatTemplate, text: str, cuts: list[int]) -> list[int]:
    """Ids of a text that is cut somewhere first, as a model may choose its tokens."""
    places = sorted({cut % (len(text) + 1) for cut in cuts})
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    return [i for piece in pieces for i in chat.tokenizer.encode(piece, add_special_tokens=False)]


texts = st.text(st.sampled_from("ab \nég{}"), max_size=8)
objects = st.dictionaries(texts, st.one_of(st.integers(-9, 9), texts, st.lists(texts, max_size=2)), max_size=2)


@st.composite
def spelled_calls(draw: Any) -> str:
    body = {"name": draw(st.sampled_from(["go", "name"])), "arguments": draw(objects)}
    if draw(st.booleans()):
        body = dict(reversed(body.items()))
    separators = draw(st.sampled_from([(",", ":"), (", ", ": "), (" , ", " : ")]))
    spelled = json.dumps(body, ensure_ascii=draw(st.booleans()), separators=separators)
    space = draw(st.sampled_from(["", "\n", " \n"]))
    return f"<tool_call>{space}{spelled}{space}</tool_call>"


broken_calls = st.sampled_from(["<tool_call>{oops</tool_call>", "<tool_call>\n", '<tool_call>{"name": 1}</tool_call>'])


@st.composite
def replies(draw: Any) -> tuple[str, str]:
    """(reasoning, what follows it)."""
    thought = draw(st.sampled_from(["", "", "why", "so\nthen"]))
    said = draw(texts).lstrip("\n") + "".join(draw(st.lists(st.one_of(spelled_calls(), broken_calls), max_size=2)))
    return (f"<think>\n{thought}\n</think>\n\n" if thought else ""), said


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_prompt_begins_with_the_sampled_ids_of_the_turn_before(
    chats: dict[str, ChatTemplate], name: str, data: Any
) -> None:
    """Within one user's turn: the application sends replies back with other spaces in their JSON, and tool results."""
    chat, messages, earlier = chats[name], [USER], []
    for _ in range(data.draw(st.integers(2, 4))):
        prompt = chat.render(messages, TOOLS, earlier=[*map(pack_ids, earlier)])
        assert not earlier or prompt[: len(earlier[-1])] == earlier[-1]
        thought, said = data.draw(replies())
        if name == "hermes":
            thought = ""
        ids = sampled(chat, thought + said, data.draw(st.lists(st.integers(0, 99), max_size=4)))
        ids += [2] if data.draw(st.booleans()) or not ids else []
        earlier += [prompt, [*prompt, *ids]]
        message = chat.parse(ids, tools=TOOLS)[1]
        for call in message.get("tool_calls", ()):
            arguments = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=True, separators=(",", ":"))
        results = [{"role": "tool", "content": data.draw(texts)} for _ in message.get("tool_calls", ())]
        messages = [*messages, message, *(results or [{"role": "tool", "content": "none"}])]


def respelled(chat: ChatTemplate, reply: str, message: dict[str, Any] | None = None, *, then: Any = USER):
    prompt = chat.render([USER], TOOLS)
    path = [*prompt, *sampled(chat, reply, [1, 3]), 2]
    said = chat.parse(path[len(prompt) :], tools=TOOLS)[1] if message is None else message
    return path, chat.render([USER, said, then], TOOLS, earlier=[pack_ids(prompt), pack_ids(path)])


def test_a_call_that_the_template_spells_in_another_way_keeps_its_ids(chats: dict[str, ChatTemplate]) -> None:
    chat = chats["hermes"]
    path, after = respelled(chat, ' Go. <tool_call>{"arguments":{"to":"é"},"name":"go"}</tool_call>')
    assert after[: len(path)] == path
    assert chat.tokenizer.decode(after[len(path) :]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.counts["respelled"] >= 1


def test_a_last_request_without_tools_goes_on_from_replies_that_called_some(chats: dict[str, ChatTemplate]) -> None:
    chat, tools = chats["hermes"], None
    prompt = chat.render([USER], tools)
    path = [*prompt, *sampled(chat, '<tool_call>{"arguments":{"to":1},"name":"go"}</tool_call>', [1]), 2]
    said = chat.parse(path[len(prompt) :], tools=TOOLS)[1]
    after = chat.render([USER, said, USER], tools, earlier=[pack_ids(prompt), pack_ids(path)])
    assert said["tool_calls"] and after[: len(path)] == path


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Edited."},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "go", "arguments": '{"to": 2}'}}]},
    ],
)
def test_a_reply_that_the_application_changes_is_not_kept(
    chats: dict[str, ChatTemplate], message: dict[str, Any]
) -> None:
    chat = chats["hermes"]
    path, after = respelled(chat, '<tool_call>{"arguments":{"to":1},"name":"go"}</tool_call>', message)
    prompt = chat.render([USER], TOOLS)
    assert after[: len(prompt)] == prompt
    assert chat.tokenizer.decode(after) == chat.tokenizer.decode(chat.render([USER, message, USER], TOOLS))
    assert after[: len(path)] != path


def test_reasoning_that_the_template_drops_is_not_kept(chats: dict[str, ChatTemplate]) -> None:
    """Qwen3 shows reasoning within a user's turn only."""
    chat = chats["qwen3"]
    reply = '<think>\nwhy\n</think>\n\n<tool_call>{"name":"go"}</tool_call>'
    path, after = respelled(chat, reply, then={"role": "tool", "content": "3"})
    assert after[: len(path)] == path
    path, after = respelled(chat, reply, then=USER)
    assert "<think>" not in chat.tokenizer.decode(after)


def test_a_reply_with_another_end_token_is_kept_up_to_its_end() -> None:
    tokenizer = tiny_models.tokenizer()
    tokenizer.chat_template = HERMES
    chat = ChatTemplate(tokenizer, [2, 0])
    prompt = chat.render([USER], None)
    reply = tokenizer.encode("yes", add_special_tokens=False)
    said = {"role": "assistant", "content": "yes"}
    after = chat.render([USER, said, USER], None, earlier=[pack_ids(prompt), pack_ids([*prompt, *reply, 0])])
    assert after[: len(prompt) + 4] == [*prompt, *reply, 2]


def test_two_replies_that_say_the_same_keep_each_their_own_spelling(chats: dict[str, ChatTemplate]) -> None:
    chat, messages, earlier = chats["hermes"], [USER], []
    for spelled in ('{"name":"go"}', '{ "name" : "go" }', '{"name": "go", "arguments": {}}'):
        prompt = chat.render(messages, TOOLS, earlier=[*map(pack_ids, earlier)])
        ids = [*sampled(chat, f"<tool_call>{spelled}</tool_call>", []), 2]
        earlier = [*earlier, prompt, [*prompt, *ids]]
        messages = [*messages, chat.parse(ids, tools=TOOLS)[1], {"role": "tool", "content": "3"}]
    after = chat.render(messages, TOOLS, earlier=[*map(pack_ids, earlier)])
    assert after[: len(earlier[-1])] == earlier[-1]


def test_of_a_long_conversation_the_path_alone_is_read_that_a_prompt_goes_on_from() -> None:
    read: list[int] = []

    def decode(ids: Any) -> str:
        read.append(len(ids))
        return "".join(map(chr, ids))

    turns = [tuple(range(97, 97 + length)) for length in range(2, 22)]
    known = EarlierIds(map(pack_ids, turns), PathTexts(decode), lambda prompt, ids: {}, ())
    text = "".join(map(chr, turns[-1]))
    assert known.longest(text + "!") == (pack_ids(turns[-1]), "!")
    assert known.longest(text + "?") == (pack_ids(turns[-1]), "?")
    assert read == [len(turns[-1])]


@pytest.mark.parametrize("strips", [False, True])
def test_a_conversation_that_grows_is_read_once(strips: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the template keeps earlier thoughts or strips them, each turn decodes and tokenizes what is new."""
    tokenizer = tiny_models.tokenizer()
    shown = "m.reasoning_content and loop.last" if strips else "m.reasoning_content"
    tokenizer.chat_template = (
        "{%- for m in messages %}<|im_start|>{{ m.role }}\n{% if " + shown + " %}<think>\n{{ m.reasoning_content }}\n"
        "</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
        "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    chat, read = ChatTemplate(tokenizer, [2]), Counter[str]()
    decode, encode = chat._replies.decode, chat._encode

    def decoded(ids: Any) -> str:
        read["decoded"] += len(ids)
        return decode(ids)

    def encoded(text: str) -> list[int]:
        read["encoded"] += len(text)
        return encode(text)

    monkeypatch.setattr(chat._texts, "decode", decoded)
    monkeypatch.setattr(chat, "_encode", encoded)
    messages, earlier, turns = [USER], [], 16
    for turn in range(turns):
        prompt = chat.render(messages, None, earlier=[*map(pack_ids, earlier)])
        ids = [*sampled(chat, f"<think>\nwhy {turn}\n</think>\n\nsaid {turn}", []), 2]
        earlier += [prompt, [*prompt, *ids]]
        messages = [*messages, chat.parse(ids, prompt=prompt)[1], USER]
    assert chat.counts["extended"] == turns - 1
    assert read["decoded"] < turns * 200 < len(prompt) * turns / 2
    assert read["encoded"] < 3 * len(chat.tokenizer.decode(prompt))


def test_a_reply_at_whose_beginning_a_text_is_written_otherwise_is_decoded_whole() -> None:
    """As tokenizers do that drop the space before a text's first word."""

    def decode(ids: Any) -> str:
        return "".join(f" {id}" for id in ids).removeprefix(" ")

    texts, prompt = PathTexts(decode), pack_ids([1, 2])
    path = prompt + pack_ids([3])
    assert texts.of(prompt) == "1 2"
    assert texts.of(path, [prompt]) == decode([1, 2, 3]) == "1 2 3"
    texts.keep(prompt, "changed")
    assert texts.of(path + pack_ids([4]), [prompt]) == "1 2 3 4"
