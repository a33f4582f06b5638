"""Arguments of tool calls that Python's JSON parser takes and other readers refuse: such a call is malformed."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import cotune
from cotune.integrations.apps.anthropic.messages import message_of
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.integrations.models.chat.tool_formats import FORMATS, is_call
from cotune.records.answers import Answer
from cotune.records.structs import Candidate
from tests.integrations.models.chat.test_tool_formats import CALLS, TOOLS, made
from tests.integrations.scripted_policy import WEATHER, bytes_chat, run_scripted, weather_call

NOT_STRICT = {
    "half of a surrogate pair": r'{"why": "\ud83d"}',
    "half of a surrogate pair in a key": r'{"\udc00": 1}',
    "NaN": '{"to": NaN}',
    "-Infinity": '{"by": [-Infinity]}',
    "a number that overflows": '{"to": 1e999}',
    "an integer that overflows": '{"to": 1' + "0" * 5000 + "}",
}


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return bytes_chat()


@pytest.mark.parametrize("fault", NOT_STRICT)
@pytest.mark.parametrize(
    ("name", "reply"),
    [
        ("hermes", '<tool_call>{{"name": "go", "arguments": {}}}</tool_call>'),
        ("mistral", '[TOOL_CALLS] [{{"name": "go", "arguments": {}}}]'),
        ("mistral_v11", "[TOOL_CALLS]go[ARGS]{}"),
        ("llama3_json", '{{"name": "go", "parameters": {}}}'),
    ],
)
def test_a_call_with_arguments_that_are_not_strict_json_is_malformed(name: str, reply: str, fault: str) -> None:
    text = reply.format(NOT_STRICT[fault])
    chat = made(CALLS[name])
    assert chat.tool_format is FORMATS[name]
    read, message, finish = chat.parse(chat.tokenizer.encode(text, add_special_tokens=False), tools=TOOLS)
    assert (read, message, finish) == (text, {"role": "assistant", "content": text}, "malformed")


def test_arguments_in_values_of_python_are_checked_as_well() -> None:
    assert is_call({"name": "go", "arguments": {"to": 1.5, "why": "\U0001f600"}})
    assert not is_call({"name": "go", "arguments": {"to": float("nan")}})
    assert not is_call({"name": "go", "arguments": {"why": "\ud83d"}})
    assert not is_call({"name": "\ud83d", "arguments": {}})


@pytest.mark.parametrize("fault", NOT_STRICT)
def test_the_application_gets_text_and_the_episode_is_recorded(tmp_path: Path, chat: ChatTemplate, fault: str) -> None:
    received: list[Any] = []

    def solve(task: Any) -> float:
        from openai import OpenAI

        client = OpenAI(api_key="unused", max_retries=0)
        with cotune.role("a"):
            completion = client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "q"}], tools=[WEATHER]
            )
        received.append(completion.choices[0])
        return 1.0

    reply = weather_call(NOT_STRICT[fault])
    ran = run_scripted(tmp_path, solve, chat, reply)
    assert (ran.episode.status, ran.lost, [call.status for call in ran.calls]) == ("ok", 0, ["ok"])
    assert (received[0].message.tool_calls, received[0].message.content) == (None, reply)
    assert [candidate.malformed for candidate in ran.calls[0].candidates] == [True]


def test_one_such_candidate_costs_the_others_nothing(tmp_path: Path, chat: ChatTemplate) -> None:
    def solve(task: Any) -> float:
        from openai import OpenAI

        with cotune.role("a"):
            OpenAI(api_key="unused", max_retries=0).chat.completions.create(
                model="m", messages=[{"role": "user", "content": "q"}], tools=[WEATHER]
            )
        return 1.0

    workflow: Any = cotune.workflow(solve)

    @workflow.scorer("a")
    def prefers_rome(candidate: Any, call: Any, task: Any) -> float:
        return float("Rome" in candidate.text)

    rome, oslo = weather_call('{"city": "Rome"}'), weather_call('{"city": "Oslo"}')
    ran = run_scripted(tmp_path, workflow, chat, rome, weather_call(r'{"city": "\ud83d"}'), oslo, rome, k=4)
    [call] = ran.calls
    assert (call.status, ran.lost) == ("ok", 0)
    assert [candidate.malformed for candidate in call.candidates] == [False, True, False, False]


def test_a_long_integer_reaches_anthropic_clients() -> None:
    """It is strict JSON, though many readers round it."""
    arguments = '{"id": 123456789012345678901234567890}'
    assert is_call({"name": "go", "arguments": arguments})
    assert json.loads(arguments)["id"] > 2**64
    call = {"id": "c1", "type": "function", "function": {"name": "go", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    answer = Answer(candidates=(Candidate(index=0, text="", message=message, finish_reason="tool_calls"),))
    episode = SimpleNamespace(notes={}, warn=pytest.fail)
    body = message_of(SimpleNamespace(id="C", model="m", episode=episode), answer, {})  # type: ignore[arg-type]
    assert body["content"][0]["input"] == {"id": 123456789012345678901234567890}
