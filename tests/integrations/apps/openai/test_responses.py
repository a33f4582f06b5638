"""The Responses API: answered by a policy as the SDK reads it, and recorded as chat."""

from __future__ import annotations

import asyncio
import functools
import json
import os

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from cotune.episodes.episode import run_episode
from cotune.episodes.workflows import workflow, workflow_of
from cotune.integrations.apps.anthropic.messages import MESSAGES
from cotune.integrations.apps.openai.forms import RESPONSES, body_of_stream, part_of
from cotune.integrations.apps.openai.response_body import answer_of, to_events
from cotune.integrations.apps.openai.responses import messages_of
from cotune.records.structs import Message, PolicyRef, Task
from cotune.sampling.protocol import Completion
from cotune.sampling.responder import PolicyResponder
from tests.integrations.provider import Provider, json_reply
from tests.integrations.recorded import POLICY, Recorded, Sink, answer, asks, tool_call

ADD = {
    "type": "function",
    "name": "add",
    "description": "Adds.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    "strict": False,
}
THOUGHTFUL = {"role": "assistant", "content": "so", "reasoning_content": "why", **asks(tool_call("add", {"x": 1}))}
THOUGHTFUL["content"] = "so"


@functools.cache
def client(url: str) -> openai.OpenAI:
    """Made once: a client takes longer to make than a call."""
    return openai.OpenAI(base_url=url, api_key="none", max_retries=0)


def create(**options):
    made = client(os.environ["OPENAI_BASE_URL"])
    return made.responses.create(**{"model": "m", "input": "hello", **options})


async def acreate(**options):
    async with openai.AsyncOpenAI(max_retries=0) as made:
        return await made.responses.create(**{"model": "m", "input": "hello", **options})


def messages(record: Recorded, number: int = 0):
    bodies = {r.id: r.body for r in record.sink if isinstance(r, Message)}
    return [bodies[name] for name in record.calls[number].messages]


# Answered by a policy


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_text_is_answered_under_the_name_that_was_asked_for(record: Recorded, way: str):
    got = []

    async def run(task):
        options = {"model": "gpt-x", "instructions": "be brief", "temperature": 0.5, "metadata": {"a": "b"}}
        got.append(await acreate(**options) if way == "async" else await asyncio.to_thread(create, **options))
        return 1

    record(run, lambda call: "hi there")
    response, call = got[0], record.calls[0]
    assert (response.id, response.status, response.model) == (f"resp_{call.id}", "completed", "gpt-x")
    assert (response.output_text, response.temperature, response.metadata) == ("hi there", 0.5, {"a": "b"})
    assert [item.type for item in response.output] == ["message"]
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (3, 2, 5)
    assert messages(record) == [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert (call.policy, call.status, call.candidates[0].token_ids) == (POLICY, "ok", (10, 2))
    assert call.params == {"temperature": 0.5, "metadata": {"a": "b"}, "api": "responses"}


@pytest.mark.usefixtures("nowhere")
def test_tools_and_items_go_both_ways(record: Recorded):
    """The application sends back what it got, item by item, as its next input."""

    def run(task):
        sent = [{"role": "user", "content": [{"type": "input_text", "text": "add"}]}]
        first = create(input=sent, tools=[ADD], tool_choice={"type": "function", "name": "add"})
        sent += [item.model_dump(exclude_none=True) for item in first.output]
        calls = [item for item in first.output if item.type == "function_call"]
        sent += [{"type": "function_call_output", "call_id": c.call_id, "output": "3"} for c in calls]
        second = create(input=sent, tools=[ADD], max_output_tokens=9)
        return {"team": 1, "metrics": {"calls": len(calls), "said": second.output_text == "3, then"}}

    twice = {**THOUGHTFUL, "tool_calls": [tool_call("add", {"x": 1}, "c1"), tool_call("add", {"x": 2}, "c2")]}
    outcome = record(run, lambda call: twice if call.turn == 0 else "3, then")
    assert outcome.episode.metrics == {"calls": 2.0, "said": 1.0}
    user = {"role": "user", "content": "add"}
    results = [{"role": "tool", "tool_call_id": name, "content": "3"} for name in ("c1", "c2")]
    assert messages(record, 0) == [user]
    assert messages(record, 1) == [user, twice, *results]
    assert record.calls[1].parents == (record.calls[0].id,)
    assert record.calls[0].params["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert record.calls[1].params["max_completion_tokens"] == 9
    tools = next(r.body for r in record.sink if isinstance(r, Message) and r.id == record.calls[0].tools)
    assert tools == [{"type": "function", "function": {k: v for k, v in ADD.items() if k != "type"}}]


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("way", ["create", "helper", "async create", "async helper"])
def test_a_stream_has_the_events_of_a_provider(record: Recorded, way: str):
    seen: list = []

    async def run(task):
        client = openai.AsyncOpenAI(max_retries=0)
        if way == "async create":
            seen.extend(
                [e async for e in await client.responses.create(model="m", input="x", tools=[ADD], stream=True)]
            )
        else:
            async with client.responses.stream(model="m", input="x", tools=[ADD]) as stream:
                seen.extend([event async for event in stream])
                assert (await stream.get_final_response()).output_text == "so"
        return 1

    def run_sync(task):
        client = openai.OpenAI(max_retries=0)
        if way == "create":
            seen.extend(client.responses.create(model="m", input="x", tools=[ADD], stream=True))
        else:
            with client.responses.stream(model="m", input="x", tools=[ADD]) as stream:
                seen.extend(stream)
                assert stream.get_final_response().output_text == "so"
        return 1

    record(run if way.startswith("async") else run_sync, lambda call: THOUGHTFUL)
    assert [event.type.removeprefix("response.") for event in seen] == [
        "created",
        "in_progress",
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    call = next(event for event in seen if event.type.endswith("arguments.done"))
    assert (call.name, call.arguments, call.output_index) == ("add", '{"x": 1}', 2)
    assert record.calls[0].streamed
    assert record.calls[0].candidates[0].message == THOUGHTFUL


class Point(BaseModel):
    x: int


@pytest.mark.usefixtures("nowhere")
def test_structured_output_and_parsed_tools(record: Recorded):
    found = []

    def run(task):
        with openai.OpenAI(max_retries=0) as client:
            found.append(client.responses.parse(model="m", input="x", text_format=Point).output_parsed)
            with client.responses.stream(model="m", input="x", text_format=Point) as stream:
                found.append(stream.get_final_response().output_parsed)
            tool = openai.pydantic_function_tool(Point)["function"]
            called = client.responses.parse(model="m", input="x", tools=[{"type": "function", **tool}])
            found.append(called.output[0].parsed_arguments)
        return 1

    record(run, lambda call: asks(tool_call("Point", {"x": 5})) if call.tools else '{"x": 5}')
    assert found == [Point(x=5), Point(x=5), {"x": 5}]
    shape = record.calls[0].params["response_format"]
    assert (shape["type"], shape["json_schema"]["name"], shape["json_schema"]["strict"]) == (
        "json_schema",
        "Point",
        True,
    )


@pytest.mark.usefixtures("nowhere")
def test_a_response_goes_on_from_an_earlier_one_of_the_episode(record: Recorded):
    def run(task):
        first = create(instructions="A", input="one")
        second = create(instructions="B", input="two", previous_response_id=first.id)
        create(input=[{"type": "item_reference", "id": second.output[0].id}, {"role": "user", "content": "three"}])
        create(input="four", previous_response_id=first.id)
        return 1

    record(run, lambda call: f"said {call.turn}")
    one = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "said 0"}]
    assert messages(record, 1) == [{"role": "system", "content": "B"}, *one, {"role": "user", "content": "two"}]
    assert messages(record, 2) == [{"role": "assistant", "content": "said 1"}, {"role": "user", "content": "three"}]
    assert messages(record, 3) == [*one, {"role": "user", "content": "four"}]
    assert [c.parents for c in record.calls] == [
        (),
        (record.calls[0].id,),
        (record.calls[1].id,),
        (record.calls[0].id,),
    ]


@pytest.mark.usefixtures("nowhere")
def test_a_reply_at_the_limit_is_incomplete(record: Recorded):
    import msgspec

    def cut(call):
        found = answer("half a")
        candidate = msgspec.structs.replace(found.candidates[0], finish_reason="length")
        return msgspec.structs.replace(found, candidates=(candidate,))

    got = []
    record(lambda task: got.extend([create(), [*create(stream=True)][-1].response]) or 1, cut)
    assert [(r.status, r.incomplete_details.reason) for r in got] == [("incomplete", "max_output_tokens")] * 2


@pytest.mark.usefixtures("nowhere")
def test_token_ids_and_logprobs_where_they_are_asked_for(record: Recorded):
    got = []
    asked = {"include": ["message.output_text.logprobs"], "extra_body": {"return_token_ids": True}}
    record(lambda task: got.append(create(**asked)) or 1, lambda call: "x")
    assert [item.logprob for item in got[0].output[0].content[0].logprobs] == [-0.5, -0.25]
    assert (got[0].prompt_token_ids, got[0].token_ids) == ([5, 6, 7], [10, 2])


# What only a provider can answer


class OneToken:
    """A sampler and a chat format of one token."""

    def images(self, messages):
        return ()

    def render(self, messages, tools, *, earlier=()):
        return [1]

    def parse(self, token_ids, stop=(), **_):
        return "x", {"role": "assistant", "content": "x"}, "stop"

    async def sample(self, prompt, n, params, policy):
        return [Completion((2,), (-0.5,), "stop")] * n


def run_with_policy(fn, sink: Sink):
    responder = PolicyResponder(OneToken(), OneToken(), {"app": PolicyRef("p")})
    task = Task(id="t", input={})
    return asyncio.run(run_episode(workflow_of(workflow(fn)), task, sink=sink, responder=responder))


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize(
    ("asked", "named"),
    [
        ({"tools": [ADD, {"type": "web_search"}]}, "tools that the provider runs (web_search)"),
        ({"tools": [{"type": "custom", "name": "c"}]}, "tools that the provider runs (custom)"),
        ({"previous_response_id": "resp_other"}, "'resp_other', which was not made in this episode"),
        ({"conversation": "conv_1"}, "a conversation that the provider keeps"),
        ({"prompt": {"id": "p"}}, "a prompt that the provider keeps"),
        ({"background": True}, "a response in the background"),
        ({"input": [{"type": "web_search_call", "id": "w"}]}, "input items of type web_search_call"),
        ({"input": [{"type": "item_reference", "id": "w"}]}, "input items of type item_reference"),
    ],
)
def test_what_no_policy_can_answer_is_a_named_and_counted_error(record: Recorded, asked, named: str):
    def run(task):
        with pytest.raises(openai.BadRequestError) as caught:
            create(**asked)
        return {"team": 1, "metrics": {"named": named in str(caught.value)}}

    outcome = run_with_policy(run, record.sink)
    assert outcome.episode.metrics == {"named": 1.0}
    assert record.statuses == ["error"]
    assert named in record.calls[0].error
    assert outcome.live.warnings == {"unanswerable": 1}
    assert outcome.live.failures == {"error": 1}


@pytest.mark.usefixtures("nowhere")
def test_an_input_that_cannot_be_read_is_refused_and_counted(record: Recorded):
    def run(task):
        with pytest.raises(openai.BadRequestError):
            create(input=[1])
        return 1

    outcome = record(run, lambda call: "x")
    assert record.calls == []
    assert outcome.live.warnings == {"unread_call": 1}


# Passed through to the provider


def output(*items):
    head = {"id": "resp_9", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    usage = {"input_tokens": 4, "output_tokens": 1, "total_tokens": 5}
    return {**head, "output": [*items], "usage": usage, "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def said(text: str, name: str = "msg_1"):
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": name, "type": "message", "role": "assistant", "status": "completed", "content": [part]}


def test_a_providers_response_is_recorded_and_passed_on_as_it_is(provider: Provider, record: Recorded):
    searched = {"id": "ws_1", "type": "web_search_call", "status": "completed"}
    function = {"id": "fc", "type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"}
    thought = {"id": "rs", "type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}
    body = output(thought, searched, said("done"), function)
    provider.reply = lambda request, number: json_reply(body)
    tools = [{"type": "web_search"}]

    def run(task):
        create(tools=tools, instructions="be brief")
        return create(input="more", previous_response_id="resp_9").output_text == "done"

    outcome = record(run, lambda call: None)
    assert outcome.rewards == {"team": 1.0}
    assert provider.requests[0] == {"model": "m", "input": "hello", "tools": tools, "instructions": "be brief"}
    call = record.calls[0]
    assert call.candidates[0].message == {
        "role": "assistant",
        "content": "done",
        "reasoning_content": "why",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}],
        "items": [searched],
    }
    assert (call.candidates[0].finish_reason, call.usage.prompt_tokens, call.policy) == ("tool_calls", 4, None)
    assert [m.get("content") for m in messages(record, 1) if "role" in m] == ["hello", None, "done", "more"]


def test_a_providers_stream_is_recorded_at_its_end(provider: Provider, record: Recorded):
    body = output(said("streamed"))
    provider.reply = lambda request, number: (200, "text/event-stream", [to_events(body, {})])
    record(lambda task: "".join(e.delta for e in create(stream=True) if e.type.endswith("text.delta")) == "streamed")
    assert record.calls[0].candidates[0].text == "streamed"
    assert (record.calls[0].usage.completion_tokens, record.statuses) == (1, ["ok"])


def test_half_a_stream_is_recorded_as_far_as_it_was_read(provider: Provider, record: Recorded):
    whole = to_events(output(said("streamed")), {})
    half = whole[: whole.index(b"event: response.output_text.done")]
    provider.reply = lambda request, number: (200, "text/event-stream", [half, Provider.HANG])

    def run(task):
        with create(stream=True) as stream:
            for event in stream:
                if event.type.endswith("text.delta"):
                    return 1

    record(run)
    assert record.statuses == ["cancelled"]
    candidate = record.calls[0].candidates[0]
    assert (candidate.text, candidate.finish_reason) == ("streamed", "interrupted")


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ({**output(), "status": "failed", "error": {"code": "server_error", "message": "no"}}, "server_error: no"),
        ({**output(), "status": "queued"}, "in the background"),
    ],
)
def test_a_response_without_an_answer_is_an_error(provider: Provider, record: Recorded, reply, error: str):
    provider.reply = lambda request, number: json_reply(reply)
    record(lambda task: create().status == reply["status"])
    assert record.statuses == ["error"]
    assert error in record.calls[0].error


def test_an_error_event_is_an_error(provider: Provider, record: Recorded):
    event = {"type": "error", "code": "server_error", "message": "overloaded", "param": None, "sequence_number": 0}
    raw = b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"
    provider.reply = lambda request, number: (200, "text/event-stream", [raw])
    record(lambda task: [e.type for e in create(stream=True)] == ["error"])
    assert record.statuses == ["error"]
    assert "overloaded" in record.calls[0].error


# Items as messages, and back


def test_items_of_one_assistant_turn_are_one_message():
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "why"}], "summary": []}
    texts = [{"role": "assistant", "content": text} for text in ("a", "b")]
    found = messages_of([*texts, call, call, thought, texts[0], {"role": "user", "content": "x"}, call])
    assert [(m["role"], m["content"], len(m.get("tool_calls", ())), m.get("reasoning_content")) for m in found] == [
        ("assistant", "a", 0, None),
        ("assistant", "b", 2, None),
        ("assistant", "a", 0, "why"),
        ("user", "x", 0, None),
        ("assistant", None, 1, None),
    ]


def test_pictures_and_files_are_parts_of_a_message():
    parts = [
        {"type": "input_text", "text": "see"},
        {"type": "input_image", "image_url": "data:x", "detail": "low"},
        {"type": "input_file", "file_id": "f"},
    ]
    assert messages_of([{"role": "user", "content": parts}])[0]["content"] == [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
        {"type": "file", "file": {"file_id": "f"}},
    ]


calls = st.builds(
    lambda name, arguments, i: tool_call(name, arguments, f"c{i}"),
    st.text(min_size=1, max_size=5),
    st.dictionaries(st.text(max_size=3), st.one_of(st.integers(), st.text(max_size=5)), max_size=2),
    st.integers(0, 9),
)


@given(
    text=st.text(max_size=20),
    thought=st.text(max_size=9),
    tools=st.lists(calls, max_size=3),
    cut=st.integers(0, 5000),
)
def test_an_answer_survives_its_json_its_events_and_any_break(text: str, thought: str, tools: list, cut: int):
    from types import SimpleNamespace

    from cotune.integrations.apps.openai.response_body import response_of

    message = {"role": "assistant", "content": text or (None if tools else "")}
    message |= {"tool_calls": tools} if tools else {}
    message |= {"reasoning_content": thought} if thought else {}
    response = response_of(SimpleNamespace(id="1", model="m"), answer(message), {})
    events = to_events(response, {})
    for body in (response, body_of_stream(RESPONSES, events)):
        assert {**answer_of(body).candidates[0].message, "content": message["content"]} == message
        assert (answer_of(body).candidates[0].message["content"] or "") == text
    part = part_of(RESPONSES, events[:cut], streamed=True)
    if part is not None:
        assert part.candidates[0].finish_reason == "interrupted"
        assert text.startswith(part.candidates[0].text)


# LangChain on it


@pytest.mark.usefixtures("nowhere")
@pytest.mark.parametrize("version", ["v0", "responses/v1"])
def test_langchain_with_tools_streams_and_structured_output(record: Recorded, version: str):
    import langchain_openai
    from langchain_core.messages import HumanMessage, ToolMessage

    def add(x: int) -> int:
        """Adds."""
        return x

    async def run(task):
        model = langchain_openai.ChatOpenAI(
            model="m", use_responses_api=True, output_version=version, base_url=os.environ["OPENAI_BASE_URL"]
        )
        tools = model.bind_tools([add])
        first = tools.invoke([HumanMessage("one")])
        assert [(c["name"], c["args"]) for c in first.tool_calls] == [("add", {"x": 1})]
        whole = None
        async for chunk in tools.astream([HumanMessage("one"), first, ToolMessage("3", tool_call_id="call_1")]):
            whole = chunk if whole is None else whole + chunk
        assert [(c["name"], c["args"]) for c in whole.tool_calls] == [("add", {"x": 1})]
        texts = [part["text"] for part in whole.content if part.get("type") == "text"]
        assert "".join(texts) == "so" if version != "v0" else whole.text == "so"
        assert (await model.with_structured_output(Point).ainvoke("p")).x == 5
        return whole.usage_metadata["total_tokens"]

    outcome = record(run, lambda call: THOUGHTFUL if call.tools else '{"x": 5}')
    assert outcome.rewards == {"team": 5.0}
    assert [c.policy for c in record.calls] == [POLICY] * 3
    said_back = messages(record, 1)[1]
    assert (said_back["content"], said_back["tool_calls"]) == ("so", THOUGHTFUL["tool_calls"])
    assert record.calls[1].streamed


def test_done_does_not_make_a_cut_stream_whole():
    started = b'data: {"type": "response.created", "response": {"id": "1", "model": "m", "output": []}}\n\n'
    assert body_of_stream(RESPONSES, started + b"data: [DONE]\n\n") is None
    block = b'data: {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "half"}}\n\n'
    start = b'data: {"type": "message_start", "message": {"id": "1", "model": "m", "content": []}}\n\n'
    assert body_of_stream(MESSAGES, start + block + b"data: [DONE]\n\n") is None
