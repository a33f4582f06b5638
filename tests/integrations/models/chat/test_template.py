from __future__ import annotations

import json
from pathlib import Path

import pytest

from cotune.errors import ConfigError, SamplerError
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import read_hermes, split_reasoning
from cotune.records.ids import pack_ids
from tests.integrations import tiny_models

TOOLS = [{"type": "function", "function": {"name": "go", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "hi"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_models.build("qwen3", path)
    return path


@pytest.fixture
def chat(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder)


def ids(chat: ChatTemplate, text: str) -> list[int]:
    return chat.tokenizer.encode(text, add_special_tokens=False)


def test_a_prompt_is_the_template_with_the_generation_prompt(chat: ChatTemplate) -> None:
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert chat.render([USER], None) == ids(chat, expected)


def test_tools_are_rendered(chat: ChatTemplate) -> None:
    assert '"name": "go"' in chat.tokenizer.decode(chat.render([USER], TOOLS))


def test_tools_that_the_template_does_not_show_are_told_once_and_counted(
    chat: ChatTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    assert chat.shows_tools
    chat.render([USER], TOOLS)
    template = chat.tokenizer.chat_template
    blind = ChatTemplate(chat.tokenizer, chat.end_token_ids)
    try:
        chat.tokenizer.chat_template = template.replace("{{ tools | tojson }}", "")
        shown, _ = blind.shows_tools, [blind.render([USER], TOOLS) for _ in range(2)]
    finally:
        chat.tokenizer.chat_template = template
    assert (shown, blind.counts["unshown_tools"], chat.counts["unshown_tools"]) == (False, 2, 0)
    assert [record.getMessage().split(",")[0] for record in caplog.records] == [
        "The model's chat template shows no tools"
    ]


def test_content_parts_are_joined_and_null_content_is_empty(chat: ChatTemplate) -> None:
    parts = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    assert chat.render([{"role": "user", "content": parts}], None) == chat.render([{**USER, "content": "h\ni"}], None)
    empty = chat.render([{"role": "assistant", "content": None}], None)
    assert chat.tokenizer.decode(empty) == "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"


def test_arguments_reach_the_template_as_objects(chat: ChatTemplate) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "go", "arguments": '{"to": 3}'}}
    text = chat.tokenizer.decode(chat.render([{"role": "assistant", "content": None, "tool_calls": [call]}], None))
    assert '<tool_call>{"name": "go", "arguments": {"to": 3}}</tool_call>' in text


def test_a_picture_is_refused(chat: ChatTemplate) -> None:
    with pytest.raises(SamplerError, match="sees no images"):
        chat.render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], None)


def test_messages_that_the_template_refuses_are_named(folder: Path) -> None:
    chat = ChatTemplate.load(folder)
    chat.tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(SamplerError, match="roles must alternate"):
        chat.render([USER], None)


def test_the_same_messages_are_rendered_once(chat: ChatTemplate) -> None:
    first = chat.render([USER], TOOLS)
    first.append(7)
    assert chat.render([dict(USER)], TOOLS) == first[:-1]
    assert chat.counts == {"rendered": 1, "cached": 1}


def test_earlier_ids_are_kept_when_the_prompt_extends_them(chat: ChatTemplate) -> None:
    prompt = chat.render([USER], None)
    odd_reply = [7 + ord(c) - 10 for c in "yes"] + [2]
    path = [*prompt, *odd_reply]
    spelled = [*path[:-4], *path[-4:]]
    later = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": "go on"}]
    extended = chat.render(later, None, earlier=[pack_ids(prompt), pack_ids(spelled)])
    assert extended[: len(spelled)] == spelled
    assert extended == chat.render(later, None)
    assert chat.counts["extended"] == 1


def test_ids_that_encode_differently_than_they_were_sampled_are_kept(chat: ChatTemplate) -> None:
    """A tokenizer with a merged token: the model wrote "a", "b"; encoding its text again would give "ab"."""
    chat.tokenizer.add_tokens(["ab"])
    prompt = chat.render([USER], None)
    apart = [7 + ord("a") - 10, 7 + ord("b") - 10]
    later = [USER, {"role": "assistant", "content": "ab"}, USER]
    assert chat.render(later, None)[len(prompt)] == chat.tokenizer.convert_tokens_to_ids("ab")
    assert chat.render(later, None, earlier=[pack_ids([*prompt, *apart, 2])])[len(prompt) :][:3] == [*apart, 2]


def test_a_prompt_that_diverges_is_rendered_afresh_and_counted(chat: ChatTemplate) -> None:
    other = chat.render([{"role": "user", "content": "something else"}], None)
    assert chat.render([USER], None, earlier=[pack_ids(other)]) == chat.render([USER], None)
    assert chat.counts["diverged"] == 1


def test_a_reply_loses_its_end_token(chat: ChatTemplate) -> None:
    assert chat.parse([*ids(chat, "fine"), 2]) == ("fine", {"role": "assistant", "content": "fine"}, "stop")


def test_a_reply_ends_before_the_first_stop_string(chat: ChatTemplate) -> None:
    text, message, _ = chat.parse(ids(chat, "one STOP two END"), stop=("END", "STOP"))
    assert text == message["content"] == "one "


def test_a_tool_call_is_in_openai_form(chat: ChatTemplate) -> None:
    reply = 'Going.\n<tool_call>\n{"name": "go", "arguments": {"to": "é"}}\n</tool_call>'
    text, message, finish = chat.parse([*ids(chat, reply), 2], tools=TOOLS)
    [call] = message.pop("tool_calls")
    assert (text, finish, message) == (reply, "tool_calls", {"role": "assistant", "content": "Going."})
    assert call["type"] == "function"
    assert call["function"] == {"name": "go", "arguments": '{"to": "é"}'}
    assert len(call["id"]) == 9


def test_two_tool_calls_have_ids_of_their_own_and_no_content(chat: ChatTemplate) -> None:
    reply = '<tool_call>{"name": "a"}</tool_call>\n<tool_call>{"name": "b"}</tool_call>'
    _, message, _ = chat.parse(ids(chat, reply), tools=TOOLS)
    assert message["content"] is None
    assert [c["function"] for c in message["tool_calls"]] == [
        {"name": "a", "arguments": "{}"},
        {"name": "b", "arguments": "{}"},
    ]
    assert len({c["id"] for c in message["tool_calls"]}) == 2


@pytest.mark.parametrize(
    "body",
    [
        '{"name": "go", "arguments": {',
        "[1]",
        '{"name": 3}',
        '{"arguments": {}}',
        '{"name": "go", "arguments": [1]}',
        '{"name": "go", "arguments": "no JSON"}',
        "",
    ],
)
def test_a_malformed_tool_call_stays_in_the_text(body: str) -> None:
    reply = f"<tool_call>{body}</tool_call>"
    assert read_hermes(reply) == (reply, [])


def test_a_call_is_text_where_no_tools_are_offered(chat: ChatTemplate) -> None:
    """A request without tools has no place for a call: AutoGen's selector would fail on one."""
    reply = 'Go. <tool_call>{"name": "go"}</tool_call>'
    assert chat.parse([*ids(chat, reply), 2]) == (reply, {"role": "assistant", "content": reply}, "stop")


@pytest.mark.parametrize("reply", ["<tool_call>{oops</tool_call>", '<tool_call>{"name": "go"}', "Now <tool_call>"])
def test_a_malformed_or_unclosed_tool_call_is_named(chat: ChatTemplate, reply: str) -> None:
    assert chat.parse([*ids(chat, reply), 2], tools=TOOLS) == (
        reply,
        {"role": "assistant", "content": reply},
        "malformed",
    )
    beside = f'<tool_call>{{"name": "go"}}</tool_call>{reply}'
    _, message, finish = chat.parse(ids(chat, beside), tools=TOOLS)
    assert (finish, len(message["tool_calls"]), message["content"]) == ("malformed", 1, reply)


def test_a_developer_is_the_system_to_a_template(chat: ChatTemplate) -> None:
    roles = [{"role": role, "content": "be brief"} for role in ("developer", "system")]
    assert chat.render([roles[0], USER], None) == chat.render([roles[1], USER], None)


def test_a_good_call_beside_a_malformed_one_counts() -> None:
    rest, calls = read_hermes('<tool_call>{"name": "a"}</tool_call> <tool_call>oops</tool_call>')
    assert [call["name"] for call in calls] == ["a"]
    assert rest == "<tool_call>oops</tool_call>"


@pytest.mark.parametrize(
    ("reply", "opened", "parts"),
    [
        ("<think>\nwhy\n</think>\n\nso", False, ("why", "so")),
        ("why\n</think>\n\nso", False, ("why", "so")),
        ("why\n</think>\n\nso", True, ("why", "so")),
        ("<think>why not", False, ("why not", "")),
        ("<think>why not", True, ("why not", "")),
        ("why not", True, ("why not", "")),
        ("<think>\n\n</think>\n\nso", False, ("", "so")),
        (" plain ", False, ("", " plain ")),
    ],
)
def test_reasoning_is_split_off(reply: str, opened: bool, parts: tuple[str, str]) -> None:
    assert split_reasoning(reply, opened=opened) == parts


def test_the_tokenizers_own_response_template_comes_first(folder: Path) -> None:
    chat = ChatTemplate.load(folder)
    chat.tokenizer.response_template = {
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {
            "tool_calls": {
                "open": "<tool_call>",
                "close": "</tool_call>",
                "repeats": True,
                "content": "json",
                "transform": {"type": "function", "function": "{content}"},
            },
            "content": {"close_pattern": r"\s*<\|im_end\|>", "content": "text"},
        },
    }
    reply = 'Going.<tool_call>{"name": "go", "arguments": {"to": 1}}</tool_call>'
    _, message, finish = chat.parse([*ids(chat, reply), 2], tools=TOOLS)
    assert finish == "tool_calls"
    assert message["content"] == "Going."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"to": 1}
    broken = "<tool_call>{oops</tool_call>"
    assert chat.parse(ids(chat, broken), tools=TOOLS) == (broken, {"role": "assistant", "content": broken}, "malformed")
    assert chat.counts["unparsed"] == 1


def test_end_tokens_are_those_of_generation_config_model_and_tokenizer(folder: Path, tmp_path: Path) -> None:
    assert ChatTemplate.load(folder).end_token_ids == (2,)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [5, 2]}')
    assert ChatTemplate.load(tmp_path).end_token_ids == (5, 2)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere") as caught:
        ChatTemplate.load(tmp_path / "nowhere")
    assert caught.value.field == "model"
    with pytest.raises(ConfigError, match=r"config\.json"):
        ChatTemplate.load(tmp_path)


def test_a_model_without_a_chat_template_is_refused(folder: Path, tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ConfigError, match="chat template") as caught:
        ChatTemplate.load(tmp_path)
    assert caught.value.remedy == "Use an instruct model, or put a chat_template.jinja into the folder."
