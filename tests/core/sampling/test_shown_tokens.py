"""What an application is told of the tokens of a reply: those of the content, as OpenAI writes them."""

from __future__ import annotations

import pytest

from cotune.records.structs import ShownToken
from cotune.sampling.protocol import Completion, TokenBytes
from cotune.sampling.shown_tokens import shown_tokens

MARKS = {"<end>", "<think>", "</think>"}


def told(reply: list[str | bytes], message: dict[str, object], top=(), whole=False) -> tuple[ShownToken, ...]:
    """The tokens shown of a reply of these, whose ids are their places; 100 and 101 stand beside."""
    known = {**dict(enumerate(reply)), 100: " maybe", 101: b"\xf0\x9f"}

    def token_bytes(ids):
        texts = [known[id] for id in ids]
        return [TokenBytes(t if isinstance(t, bytes) else t.encode(), t in MARKS) for t in texts]

    logprobs = tuple(-float(i + 1) for i in range(len(reply)))
    return shown_tokens(Completion(tuple(range(len(reply))), logprobs, "stop", top), message, token_bytes, whole)


@pytest.mark.parametrize(
    ("reply", "message", "content"),
    [
        (["Yes", ",", " it is", "<end>"], {"content": "Yes, it is"}, "0 1 2"),
        (["Yes", ",", " it is", "<end>"], {"content": ""}, ""),
        (["a", "<end>"], {"content": None, "tool_calls": [{}]}, ""),
        (["<think>", "no", "t yes", "</think>", "\n\n", "yes", "<end>"],
         {"content": "yes", "reasoning_content": "not yes"}, "5"),
        (["<think>", "why", "</think>", "\n\n", "n", "<end>"], {"content": "n", "reasoning_content": "why"}, "4"),
        (["I call", " it", "<tool", '>{"name": "it"}'], {"content": "I call it", "tool_calls": [{}]}, "0 1"),
        (["so. ", "it", '<tool>{"name": "it"}'],
         {"content": "it", "reasoning_content": "so.", "tool_calls": [{}]}, "1"),
        (["ye", "s##", "#"], {"content": "yes"}, "0 1"),
        ([" yes", "<end>"], {"content": "yes"}, "0"),
        (["one", "<tool>x</tool>", "two", "<end>"], {"content": "onetwo", "tool_calls": [{}]}, "0 1 2"),
        (["en", "<end>"], {"content": "en"}, "0"),
        (["<end>", "d"], {"content": "d"}, "1"),
        (["caf", b"\xc3", b"\xa9", "", "!"], {"content": "café!"}, "0 1 2 4"),
        (["ab", b"\xf0\x9f"], {"content": "ab�"}, "0 1"),
    ],
)  # fmt: skip
def test_the_tokens_of_the_content_are_shown(reply, message, content) -> None:
    shown = told(reply, message)
    assert [token.logprob for token in shown] == [-float(place) - 1 for place in map(int, content.split())]


def test_all_tokens_are_shown_where_ids_stand_beside() -> None:
    shown = told(["<think>", "why", "</think>", "n", "<end>"], {"content": "n", "reasoning_content": "why"}, whole=True)
    assert [token.token for token in shown] == ["<think>", "why", "</think>", "n", "<end>"]


def test_a_part_of_a_character_has_its_bytes_and_an_escaped_text() -> None:
    top = (((101, -0.1), (0, -0.2)), ((1, -0.3),), ())
    shown = told(["go ", b"\xf0\x9f", b"\x98\x80"], {"content": "go 😀"}, top)
    assert shown == (
        ShownToken("go ", -1.0, None, (ShownToken("\\xf0\\x9f", -0.1, (240, 159)), ShownToken("go ", -0.2))),
        ShownToken("\\xf0\\x9f", -2.0, (240, 159), (ShownToken("\\xf0\\x9f", -0.3, (240, 159)),)),
        ShownToken("\\x98\\x80", -3.0, (152, 128)),
    )
