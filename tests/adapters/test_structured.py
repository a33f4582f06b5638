"""What requests ask, honoured by a model whose replies are noise: served, and deployed in the application."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

import cotune
from cotune.adapters.serving import Endpoint, serving

pytestmark = pytest.mark.slow

USER = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {"move": {"enum": ["left", "right"]}, "steps": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["move", "steps"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "move", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "go", "parameters": SCHEMA}}
OTHER = {"type": "function", "function": {"name": "stay", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def endpoint(export: Path, in_thread: None) -> Iterator[Endpoint]:
    with serving(export) as running:
        yield running


@pytest.fixture(scope="module", params=["served", "deployed"])
def client(request: pytest.FixtureRequest, export: Path, in_thread: None) -> Iterator[openai.OpenAI]:
    if request.param == "served":
        with openai.OpenAI(base_url=request.getfixturevalue("endpoint").url, api_key="x", max_retries=0) as made:
            yield made
    else:
        nowhere = openai.OpenAI(base_url="http://127.0.0.1:9/v1", api_key="x", max_retries=0)
        with nowhere as made, cotune.deployed(export):
            yield made


def ask(client: openai.OpenAI, **asked: Any) -> Any:
    with cotune.role("planner"):
        return client.chat.completions.create(model="planner", messages=USER, **{"max_tokens": 120, **asked})


def test_an_option_that_the_template_does_not_know_is_counted(endpoint: Endpoint) -> None:
    with openai.OpenAI(base_url=endpoint.url, api_key="x", max_retries=0) as client:
        ask(
            client,
            max_tokens=1,
            reasoning_effort="low",
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    health = httpx.get(endpoint.url.replace("/v1", "/health")).json()
    assert health["not_enforced"] == {"enable_thinking": 1, "reasoning_effort": 1}


def test_a_schema(client: openai.OpenAI) -> None:
    answer = ask(client, response_format=FORM, n=6, stop=["no such text"])
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 6
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)


def test_a_call_that_is_required_and_one_of_a_function(client: openai.OpenAI) -> None:
    for choice in ("required", {"type": "function", "function": {"name": "go"}}):
        tools = [TOOL] if choice == "required" else [OTHER, TOOL]
        answer = ask(client, tools=tools, tool_choice=choice, parallel_tool_calls=False).choices[0]
        assert answer.finish_reason == "tool_calls"
        (call,) = answer.message.tool_calls
        assert call.function.name == "go"
        jsonschema.validate(json.loads(call.function.arguments), SCHEMA)


def test_token_biases_and_penalties(client: openai.OpenAI) -> None:
    plain = {"temperature": 0, "max_tokens": 12}
    said = ask(client, logit_bias={"70": 100}, **plain).choices[0].message.content
    assert said == said[0] * 12
    varied = ask(client, logit_bias={"70": 8}, presence_penalty=2, frequency_penalty=2, **plain)
    assert len(set(varied.choices[0].message.content)) > 1
    assert ask(client, extra_body={"min_p": 1.0, "repetition_penalty": 1.3}, max_tokens=3).usage.completion_tokens == 3


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"not": {}}}}}, "not"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly'"),
        ({"logit_bias": {"999999": 1}}, "999999"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"extra_body": {"chat_template_kwargs": {"tokenize": True}}}, "tokenize"),
    ],
)
def test_what_cannot_be_honoured_is_an_error(client: openai.OpenAI, asked: dict[str, Any], cause: str) -> None:
    with pytest.raises(openai.BadRequestError, match=cause):
        ask(client, **asked)


def nested(depth: int) -> dict[str, Any]:
    return {"type": "array", "items": nested(depth - 1)} if depth else {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "fault"),
    [
        ({"type": "array", "items": {"type": "integer"}, "minItems": 10**9, "maxItems": 10**9}, "more than 64 MiB"),
        (nested(300), "nested more than 100 deep"),
    ],
)
def test_a_schema_that_would_end_the_process_is_refused(client: openai.OpenAI, schema: Any, fault: str) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError, match=fault):
        ask(client, response_format=form)
    assert json.loads(ask(client, response_format=FORM, max_tokens=200).choices[0].message.content)
