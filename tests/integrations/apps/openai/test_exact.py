"""Tools and streams, exactly: what the sampler produced is what is recorded, and what the next prompt begins with."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.integrations.apps.openai.completions import to_stream
from cotune.integrations.apps.openai.forms import CHAT, body_of_stream
from cotune.integrations.models.chat.template import ChatTemplate
from cotune.records.plans import Plan
from cotune.records.structs import PolicyRef, Segment, Task
from cotune.sampling.protocol import Completion
from cotune.sampling.responder import PolicyResponder
from tests.integrations import tiny_models
from tests.integrations.provider import Provider, event
from tests.integrations.recorded import Recorded, Sink

pytestmark = pytest.mark.usefixtures("nowhere")
POLICY = PolicyRef("p", 1)
FUNCTION = {"name": "add", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}
CHAT_TOOLS = [{"type": "function", "function": FUNCTION}]
RESPONSE_TOOLS = [{"type": "function", **FUNCTION, "strict": False}]
TWO_CALLS = 'Both. <tool_call>{"arguments":{"x":1},"name":"add"}</tool_call><tool_call> {"name" : "add"} </tool_call>'
BROKEN = '<tool_call>{"name": "add", "arguments": {"x": </tool_call>'
REPLIES = (TWO_CALLS, BROKEN, "Done.")


class Scripted:
    """A sampler that writes the given texts, the same for all candidates of a call but for a last space."""

    def __init__(self, chat: ChatTemplate, replies: tuple[str, ...]) -> None:
        self.chat, self.replies = chat, replies
        self.prompts: list[tuple[int, ...]] = []
        self.drawn: list[list[tuple[int, ...]]] = []

    async def sample(self, prompt, n, params, policy):
        text = self.replies[len(self.prompts)]
        ids = [self.chat.tokenizer.encode(text + " " * i, add_special_tokens=False) for i in range(n)]
        self.prompts.append(tuple(prompt))
        self.drawn.append([(*one, 2) for one in ids])
        return [Completion(one, tuple(-0.5 - j for j in range(len(one))), "stop") for one in self.drawn[-1]]


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    return ChatTemplate(tiny_models.tokenizer(), [2])


def solve_by_chat(stream: bool):
    """An agent's loop on chat completions: it sends back what it got until there is nothing to call."""

    def run(task):
        messages: list[Any] = [{"role": "user", "content": "add"}]
        with openai.OpenAI(max_retries=0) as client:
            for _ in REPLIES:
                options = {"model": "m", "messages": messages, "tools": CHAT_TOOLS}
                if stream:
                    with client.chat.completions.stream(**options) as events:
                        said = events.get_final_completion().choices[0].message
                else:
                    said = client.chat.completions.create(**options).choices[0].message
                messages.append(said.model_dump(exclude_none=True, include={"role", "content", "tool_calls"}))
                calls = said.tool_calls or []
                messages += [{"role": "tool", "tool_call_id": call.id, "content": "3"} for call in calls]
                messages += [] if calls else [{"role": "user", "content": "on"}]
        return 1

    return run


def solve_by_responses(stream: bool):
    """The same on the Responses API."""

    def run(task):
        items: list[Any] = [{"role": "user", "content": "add"}]
        with openai.OpenAI(max_retries=0) as client:
            for _ in REPLIES:
                options = {"model": "m", "input": items, "tools": RESPONSE_TOOLS}
                if stream:
                    with client.responses.stream(**options) as events:
                        got = events.get_final_response()
                else:
                    got = client.responses.create(**options)
                items += [item.model_dump(exclude={"parsed_arguments"}, exclude_none=True) for item in got.output]
                calls = [item.call_id for item in got.output if item.type == "function_call"]
                items += [{"type": "function_call_output", "call_id": name, "output": "3"} for name in calls]
                items += [] if calls else [{"role": "user", "content": "on"}]
        return 1

    return run


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("solve", [solve_by_chat, solve_by_responses])
def test_ids_are_the_samplers_through_tools_streams_and_turns(chat: ChatTemplate, solve, k: int, stream: bool):
    sampler, sink = Scripted(chat, REPLIES), Sink()
    scorers = {"app": lambda candidate, call, task: float(candidate.malformed) + candidate.index}
    plan = Plan(kind="tree", k=k, select="best") if k > 1 else None
    responder = PolicyResponder(sampler, chat, {"app": POLICY}, plan=plan, scorers=scorers)
    task = Task(id="t", input={})
    outcome = asyncio.run(run_episode(workflow_of(workflow(solve(stream))), task, sink=sink, responder=responder))
    if outcome.error is not None:
        raise outcome.error
    calls = sink.calls()
    assert [[c.token_ids for c in call.candidates] for call in calls] == sampler.drawn
    assert [call.chosen for call in calls] == [k - 1] * 3
    assert [len(call.candidates[0].tool_calls) for call in calls] == [2, 0, 0]
    assert [call.candidates[0].malformed for call in calls] == [False, True, False]
    assert [call.candidates[0].finish_reason for call in calls] == ["tool_calls", "stop", "stop"]
    assert calls[1].candidates[0].message == {"role": "assistant", "content": BROKEN}
    for turn in (0, 1):
        whole = sampler.prompts[turn] + sampler.drawn[turn][k - 1]
        assert sampler.prompts[turn + 1][: len(whole)] == whole
    segments = {r.id: r for r in sink if isinstance(r, Segment)}
    path, name = (), calls[2].prompt
    while name is not None:
        path, name = (*segments[name].token_ids, *path), segments[name].parent
    assert path == sampler.prompts[2]
    rewards = {r.target: r.value for r in sink if getattr(r, "name", "") == "local"}
    assert [rewards[f"{call.id}.0"] for call in calls] == [0.0, 1.0, 0.0]
    assert outcome.live.warnings == ({"buffered_stream": 3} if stream and k > 1 else {})
    assert {call.streamed for call in calls} == {stream}


def test_ids_of_an_engine_upstream_are_the_same_from_json_and_from_events(provider: Provider, record: Recorded):
    """As vLLM sends them with `return_token_ids` and `logprobs`, with two choices and a tool call in pieces."""
    tool = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    pieces = [{**tool, "index": 0, "function": {"name": "add", "arguments": ""}}]
    pieces += [{"index": 0, "function": {"arguments": part}} for part in ('{"x"', ": 1}")]

    def logprobs(*values):
        return {"content": [{"token": "t", "logprob": value} for value in values]}

    choices = [
        {
            "index": 0,
            "message": {"role": "assistant", "content": None, "tool_calls": [tool]},
            "token_ids": [3, 4, 5],
            "logprobs": logprobs(-0.1, -0.2, -0.3),
            "finish_reason": "tool_calls",
        },
        {
            "index": 1,
            "message": {"role": "assistant", "content": "ab"},
            "token_ids": [6, 7],
            "logprobs": logprobs(-0.4, -0.5),
            "finish_reason": "stop",
        },
    ]
    whole = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "choices": choices}
    whole["prompt_token_ids"] = [1, 2]
    first = json.loads(event({"role": "assistant", "content": ""})[6:]) | {"prompt_token_ids": [1, 2]}
    parts = [b"data: " + json.dumps(first).encode() + b"\n\n"]
    for number, (piece, token) in enumerate(zip(pieces, (3, 4, 5), strict=True)):
        parts.append(event({"tool_calls": [piece]}, token_ids=[token], logprobs=logprobs(-0.1 * (number + 1))))
    parts.append(event({}, "tool_calls"))
    parts.append(event({"content": "ab"}, "stop", token_ids=[6, 7], logprobs=logprobs(-0.4, -0.5), index=1))
    parts.append(b"data: [DONE]\n\n")

    def reply(body, number):
        if body.get("stream"):
            return 200, "text/event-stream", parts
        return 200, "application/json", [json.dumps(whole).encode()]

    provider.reply = reply
    options = {"model": "m", "messages": [{"role": "user", "content": "x"}], "n": 2, "logprobs": True}

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            client.chat.completions.create(**options, extra_body={"return_token_ids": True})
            list(client.chat.completions.create(**options, stream=True, extra_body={"return_token_ids": True}))
        return 1

    record(run)
    by_json, by_events = record.calls
    assert [c.token_ids for c in by_json.candidates] == [(3, 4, 5), (6, 7)]
    assert [c.token_ids for c in by_events.candidates] == [(3, 4, 5), (6, 7)]
    for one, other in zip(by_json.candidates, by_events.candidates, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs)
        assert (one.tool_calls, one.finish_reason) == (other.tool_calls, other.finish_reason)
    assert by_json.prompt_tokens == by_events.prompt_tokens == 2
    assert by_json.prompt == by_events.prompt


functions = st.builds(
    lambda name, x, i: {
        "id": f"c{i}",
        "type": "function",
        "function": {"name": name, "arguments": json.dumps({"x": x})},
    },
    st.text(min_size=1, max_size=4),
    st.text(max_size=6),
    st.integers(0, 9),
)
messages = st.builds(
    lambda content, tools, thought: (
        {"role": "assistant", "content": content}
        | ({"tool_calls": tools} if tools else {})
        | ({"reasoning_content": thought} if thought else {})
    ),
    st.one_of(st.none(), st.text(max_size=9)),
    st.lists(functions, max_size=3),
    st.text(max_size=5),
)
ids = st.lists(st.integers(0, 99), max_size=4)


@settings(deadline=None)
@given(choices=st.lists(st.tuples(messages, ids), min_size=1, max_size=3), usage=st.booleans())
def test_a_completion_survives_its_events(choices, usage: bool):
    made = [
        {
            "index": i,
            "message": message,
            "finish_reason": "tool_calls" if message.get("tool_calls") else "stop",
            **({"token_ids": tokens, "logprobs": {"content": [{"logprob": -0.5}] * len(tokens)}} if tokens else {}),
        }
        for i, (message, tokens) in enumerate(choices)
    ]
    head = {"id": "c", "created": 1, "model": "m", "usage": {"total_tokens": 3}, "prompt_token_ids": [1]}
    asked = {"stream_options": {"include_usage": usage}}
    found = body_of_stream(CHAT, to_stream({**head, "choices": made}, asked))
    assert found == {**(head if usage else {k: v for k, v in head.items() if k != "usage"}), "choices": made}
