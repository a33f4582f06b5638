"""Fields of other servers: honoured, refused by name, or counted; and messages as `vllm serve` reads them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cotune
from cotune.errors import RequestRefused
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.sampling.protocol import NEVER
from cotune.sampling.request_params import CONTINUE, continues_reply, unknown_fields
from tests.integrations.scripted_policy import WEATHER, ScriptedEpisode, bytes_chat, run_scripted

USER = {"role": "user", "content": "q"}


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return bytes_chat()


def ask(**fields: Any) -> Callable[[Any], float]:
    """A workflow of one request; `fields` are added to its body."""

    def solve(task: Any) -> float:
        from openai import OpenAI

        body = {"messages": [USER], **fields}
        with cotune.role("a"):
            OpenAI(api_key="unused", max_retries=0).chat.completions.create(
                model="m", messages=body.pop("messages"), extra_body=body
            )
        return 1.0

    return solve


@pytest.fixture
def run(tmp_path: Path, chat: ChatTemplate) -> Callable[..., ScriptedEpisode]:
    return lambda reply="hello", **fields: run_scripted(tmp_path, ask(**fields), chat, reply)


# Refused, counted


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("chat_template", "{{ 1 }}"),
        ("grammar", 'root ::= "a"'),
        ("json_schema", {"type": "object"}),
        ("documents", [{"text": "d"}]),
        ("best_of", 3),
        ("use_beam_search", True),
        ("include_stop_str_in_output", True),
        ("truncate_prompt_tokens", 3),
        ("typical_p", 0.5),
        ("mirostat", 2),
        ("add_generation_prompt", False),
        ("repeat_penalty", 1.2),
    ],
)
def test_what_no_policy_can_honour_is_refused_by_name(run: Callable[..., ScriptedEpisode], field: str, value: Any):
    ran = run(**{field: value})
    [call] = ran.calls
    assert (call.status, ran.asked) == ("error", [])
    assert f"{field} = " in str(call.error)


def test_values_that_ask_for_nothing_are_answered(run: Callable[..., ScriptedEpisode]):
    fields = {"best_of": 1, "use_beam_search": False, "typical_p": 1.0, "documents": [], "echo": False, "grammar": None}
    assert run(**fields, add_generation_prompt=True).episode.status == "ok"


def test_unknown_fields_are_answered_and_counted(run: Callable[..., ScriptedEpisode]):
    ran = run(sparkle=3, safety_identifier="u1", quiet=False)
    assert ran.episode.status == "ok"
    assert unknown_fields(ran.calls[0].params) == ["sparkle"]


# Honoured


def following(chat: ChatTemplate, grammar: str, text: str) -> bool:
    """Whether a reply of this text, with its end token, is what a grammar allows."""
    matcher = chat._grammars.start(grammar)
    bits = np.empty(matcher.words, np.int32)
    for token in [*chat.tokenizer.encode(text, add_special_tokens=False), chat.end_token_ids[0]]:
        matcher.allowed(bits)
        if not bits[token // 32] >> (token % 32) & 1:
            return False
        matcher.consume(token)
    return True


def test_min_tokens_keeps_the_reply_from_ending(run: Callable[..., ScriptedEpisode], chat: ChatTemplate):
    [(_, params)] = run(min_tokens=5).asked
    lengths = {text: len(chat.tokenizer.encode(text, add_special_tokens=False)) for text in ("zq", "zq zq zq zq")}
    assert lengths["zq"] < 5 <= lengths["zq zq zq zq"]
    assert [following(chat, params.grammar, text) for text in lengths] == [False, True]


def test_bad_words_are_not_written(run: Callable[..., ScriptedEpisode], chat: ChatTemplate):
    [(_, params)] = run(bad_words=["terrible", "a+b"]).asked
    assert following(chat, params.grammar, "fine, a b\n<ok>")
    assert not following(chat, params.grammar, "how terrible!")
    assert not following(chat, params.grammar, "so a+b")


def test_only_allowed_tokens_are_written(run: Callable[..., ScriptedEpisode], chat: ChatTemplate):
    yes, no = (chat.tokenizer.encode(text, add_special_tokens=False) for text in ("yes", "no"))
    end = chat.end_token_ids[0]
    [(_, params)] = run(allowed_token_ids=[*yes, end]).asked
    assert following(chat, params.grammar, "yes") and not following(chat, params.grammar, "no")
    assert params.logit_bias == ()
    assert no


def test_without_its_end_among_the_allowed_tokens_a_reply_does_not_end(
    run: Callable[..., ScriptedEpisode], chat: ChatTemplate
):
    [(_, params)] = run(allowed_token_ids=chat.tokenizer.encode("yes", add_special_tokens=False)).asked
    assert params.logit_bias == tuple((end, NEVER) for end in chat.end_token_ids)


def test_ignore_eos_never_draws_the_end(run: Callable[..., ScriptedEpisode], chat: ChatTemplate):
    [(_, params)] = run(ignore_eos=True).asked
    assert (params.logit_bias, params.grammar) == (tuple((end, NEVER) for end in chat.end_token_ids), "")


def test_a_stop_token_is_no_part_of_the_reply(tmp_path: Path, chat: ChatTemplate):
    token = chat.tokenizer.encode("!", add_special_tokens=False)[0]
    ran = run_scripted(tmp_path, ask(stop_token_ids=[token]), chat, "hello!", end=False)
    [(_, params)], [call] = ran.asked, ran.calls
    assert params.stop_token_ids == (token,)
    assert call.candidates[0].text == "hello"
    assert call.candidates[0].token_ids[-1] == token
    assert call.sampling["stop_token_ids"] == [token]


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"min_tokens": 5, "bad_words": ["a"]}, "together with"),
        ({"min_tokens": 5, "response_format": {"type": "json_object"}}, "together with a fixed form"),
        ({"bad_words": ["a"], "tools": [WEATHER]}, "together with tools"),
        ({"min_tokens": 9, "max_tokens": 5}, "from 0 to max_tokens"),
        ({"min_tokens": "x"}, "which is not an integer"),
        ({"allowed_token_ids": [10**6]}, "the model has the tokens 0 to"),
        ({"allowed_token_ids": ["a"]}, "a list of token ids"),
        ({"stop_token_ids": [-1]}, "a list of token ids"),
        ({"bad_words": [1]}, "nor a list of texts"),
        ({CONTINUE: True}, "which is not a text of the assistant"),
    ],
)
def test_what_cannot_be_honoured_together_is_refused(
    run: Callable[..., ScriptedEpisode], fields: dict[str, Any], why: str
):
    ran = run(**fields)
    assert (ran.calls[0].status, ran.asked) == ("error", [])
    assert why in str(ran.calls[0].error)


# The reply goes on from the last message


@pytest.mark.parametrize(
    ("fields", "last"),
    [
        ({CONTINUE: True, "add_generation_prompt": False}, {"role": "assistant", "content": "Sure:"}),
        ({}, {"role": "assistant", "content": "Sure:", "prefix": True}),
    ],
)
def test_the_reply_goes_on_from_the_last_message(
    run: Callable[..., ScriptedEpisode], chat: ChatTemplate, fields: dict[str, Any], last: dict[str, Any]
):
    ran = run(messages=[USER, last], **fields)
    [(prompt, _)] = ran.asked
    assert chat.tokenizer.decode(prompt).endswith("<|im_start|>assistant\nSure:")
    assert ran.calls[0].candidates[0].text == "hello"


def test_a_call_of_a_tool_is_not_gone_on_from():
    calling = {"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}
    with pytest.raises(RequestRefused, match="not a text of the assistant"):
        continues_reply({CONTINUE: True}, [USER, calling])
    assert not continues_reply({}, [USER, calling])


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_prefill_and_stop_sequence(tmp_path: Path, chat: ChatTemplate, stream: bool):
    import anthropic

    received: list[Any] = []

    def solve(task: Any) -> float:
        with cotune.gateway() as gateway:
            address = gateway.role_url("a").removesuffix("/v1")
            client = anthropic.Anthropic(base_url=address, api_key="unused", max_retries=0)
            options: Any = {
                "model": "m",
                "max_tokens": 64,
                "stop_sequences": ["]", "}"],
                "messages": [USER, {"role": "assistant", "content": '{"name":'}],
            }
            if stream:
                with client.messages.stream(**options) as events:
                    received.append(events.get_final_message())
            else:
                received.append(client.messages.create(**options))
        return 1.0

    ran = run_scripted(tmp_path, solve, chat, ' "Rome"} and more', end=False)
    [(prompt, _)] = ran.asked
    assert chat.tokenizer.decode(prompt).endswith('<|im_start|>assistant\n{"name":')
    [message] = received
    assert (message.stop_reason, message.stop_sequence, message.content[0].text) == ("stop_sequence", "}", ' "Rome"')
    assert ran.calls[0].candidates[0].stop == "}"


# Messages as `vllm serve` reads them

LOOPS = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}" \
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"  # fmt: skip
PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
ONE_CALL = (
    "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}call{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
NOT_NONE = (
    "{% for m in messages %}{% if m.tool_calls is defined and m.tool_calls is not none %}"
    "<calls>{{ m.tool_calls | length }}</calls>{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
ITEMS = (
    "{% for m in messages %}{{ m.content }}{% for call in m.tool_calls or [] %}"
    "{% for key, value in call.function.arguments | items %}{{ key }}{% endfor %}{% endfor %}{% endfor %}"
)


def parts(*contents: Any) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content} for content in contents]


@pytest.mark.parametrize(
    ("template", "content", "written"),
    [
        (PLAIN, parts("Be brief.", "Use JSON."), "user: Be brief.\nUse JSON.\n"),
        (PLAIN, parts("one"), "user: one\n"),
        (PLAIN, parts(None), "user: \n"),
        (PLAIN, [{"type": "refusal", "refusal": "No."}], "user: No.\n"),
        (LOOPS, parts("Be brief.", "Use JSON."), "[Be brief.][Use JSON.]"),
        (LOOPS, [*parts(None), {"type": "refusal", "refusal": "No."}], "[][No.]"),
        (LOOPS, "text", "text"),
    ],
)
def test_contents_in_parts(template: str, content: Any, written: str):
    assert bytes_chat(template).transcript([{"role": "user", "content": content}], None) == written


@pytest.mark.parametrize("template", [ONE_CALL, NOT_NONE])
@pytest.mark.parametrize("empty", [[], None])
def test_no_tool_calls_change_nothing(template: str, empty: Any):
    plain = [USER, {"role": "assistant", "content": "hello"}]
    chat = bytes_chat(template)
    assert chat.transcript([USER, {**plain[1], "tool_calls": empty}], None) == chat.transcript(plain, None) == "qhello"


@pytest.mark.parametrize("arguments", ["null", None, "", "{}", {}])
def test_arguments_that_are_null_are_none(arguments: Any):
    call = {"id": "c", "type": "function", "function": {"name": "now", "arguments": arguments}}
    message = {"role": "assistant", "content": "a", "tool_calls": [call]}
    assert bytes_chat(ITEMS).transcript([USER, message], None) == "qa"
