"""Values replaced in a request's JSON: every other byte stays, whatever the texts look like."""

from __future__ import annotations

import itertools
import json
import random
from typing import Any

import httpx
import msgspec
import openai
from hypothesis import given, settings
from hypothesis import strategies as st

import cotune
from cotune.integrations.apps.openai.splice import replace_values
from tests.integrations.edits import part, prompts
from tests.integrations.provider import completion

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(),
    lambda below: st.lists(below, max_size=4) | st.dictionaries(st.text(), below, max_size=4),
    max_leaves=12,
)
SPELLINGS = [{"ensure_ascii": False}, {"indent": 2}, {"separators": (",", ":")}]


@settings(max_examples=40)
@given(JSON, st.text(max_size=12), st.text(max_size=12), st.sampled_from(SPELLINGS))
def test_one_value_is_replaced_and_the_rest_stays(other: Any, old: str, new: str, spelling: dict[str, Any]) -> None:
    asked = {"before": other, "messages": [{"content": [other, old]}, {"content": other}], "after": other}
    raw = json.dumps(asked, **spelling).encode("utf-8", "surrogatepass")
    try:
        read = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError):  # a half of a character, which no client sends
        return
    changed = {**read, "messages": [{"content": [read["messages"][0]["content"][0], new]}, read["messages"][1]]}
    found = replace_values(raw, read, changed)
    assert msgspec.json.decode(found) == changed
    if new == old:
        assert found is raw
    else:
        start = next(i for i, (a, b) in enumerate(zip(raw, found, strict=False)) if a != b)
        same = raw[:start]
        assert found.startswith(same)
        assert len(same) >= raw.index(b'"messages"')
        tail = raw[raw.rindex(b'"after"') :]
        assert found.endswith(tail)


def test_a_value_of_another_shape() -> None:
    raw = b'{ "a" : [1, {"b": 2.50}],\n"c": "x" }'
    assert replace_values(raw, {"a": [1, {"b": 2.5}], "c": "x"}, {"a": [1], "c": "x"}) == b'{ "a" : [1],\n"c": "x" }'
    assert replace_values(b'{"a": 1}', {"a": 1}, {"a": 1, "b": 2}) == b'{"a":1,"b":2}'


ODD = [
    "Use {braces} and {{doubled}} ones.",
    '{"json": ["in", "a", "prompt"], "n": 1.50}',
    "<system>\n\t<rule id='1'>Say &amp; mean it.</rule>\n</system>",
    "Отвечай коротко, по-русски.",
    "短く答えてください。🙂👩‍👩‍👧",
    "أجب باختصار‏.",
    "back\\slash \\n \\u0041 \"quotes\" 'single'",
    "line\r\nbreaks\u2028and\u2029others\x00\x1f",
    "x" * 50_000,
    "twice the same twice the same",
    "$1 \\1 %s {0} %(name)s ⟦1⟧",
    "   spaces at the ends   ",
]


def test_two_hundred_odd_prompts_through_a_client() -> None:
    sent: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        sent.append(request.content)
        return httpx.Response(200, json=completion({"role": "assistant", "content": "yes"}))

    made = openai.OpenAI(
        base_url="http://x/v1", api_key="k", http_client=httpx.Client(transport=httpx.MockTransport(answer))
    )
    chance = random.Random(0)
    kinds = itertools.islice(itertools.cycle(itertools.product(ODD, ("whole", "start", "end", "middle"))), 200)
    for number, (text, slot) in enumerate(kinds):
        value = f"value {number} {chance.choice(ODD[:8])}"
        old = {"whole": [text], "start": [1, text], "end": [text, 1], "middle": [text, 1, "\nThe end of it."]}[slot]
        new = ["New: ", *reversed(old)]
        asked, wanted = ("".join(p if isinstance(p, str) else value for p in pieces) for pieces in (old, new))
        messages: list[Any] = [
            {"role": "system", "content": asked},
            {"role": "user", "content": asked},
            {"role": "assistant", "content": asked},
            {"role": "user", "content": [{"type": "text", "text": value}]},
        ]
        made.chat.completions.create(model="m", messages=messages)
        with cotune.trace(prompts=prompts(part(old, new))) as traced:
            made.chat.completions.create(model="m", messages=messages)
        before, after = sent[-2:]
        if (unedited := traced.calls[0].record.unedited) == "prompt_ambiguous":
            assert after == before
            continue
        assert not unedited
        encoded = [json.dumps(one, ensure_ascii=False).encode() for one in (asked, wanted)]
        at = before.index(encoded[0])
        assert json.loads(after)["messages"] == [{"role": "system", "content": wanted}, *messages[1:]]
        assert after[:at] == before[:at]
        assert after.endswith(before[at + len(encoded[0]) :])
