"""The recorder is never stricter than the client: an answer that the client accepts from a stream is recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest

from cotune.integrations.apps.anthropic.messages import MESSAGES
from cotune.integrations.apps.anthropic.messages import answer_of as answer_of_message
from cotune.integrations.apps.openai.completions import answer_of as answer_of_completion
from cotune.integrations.apps.openai.completions import events
from cotune.integrations.apps.openai.forms import CHAT, RESPONSES, body_of_stream, end_with_body
from cotune.integrations.apps.openai.response_body import answer_of, to_events
from cotune.recording.model_calls import open_call
from tests.integrations.apps.openai.test_responses import create
from tests.integrations.provider import Provider, event
from tests.integrations.recorded import Recorded

TEXT = {"type": "output_text", "text": "hello", "annotations": []}
MESSAGE = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [TEXT]}
CALL = {"id": "fc_1", "type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"x": 1}'}
THOUGHT = {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "why"}]}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "output": [THOUGHT, MESSAGE, CALL],
    "usage": {"input_tokens": 3, "output_tokens": 2, "total_tokens": 5},
}
EVENTS = [json.loads(data) for data in events(to_events(RESPONSE, {}))]


def raw_stream(made: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(f"event: {one['type']}\ndata: {json.dumps(one)}\n\n".encode() for one in made)


def said(raw: bytes) -> tuple[Any, ...]:
    """Text, arguments and reasoning of a Responses stream."""
    body = body_of_stream(RESPONSES, raw)
    assert body is not None
    message = answer_of(body).candidates[0].message
    tools = [tool["function"]["arguments"] for tool in message.get("tool_calls", ())]
    return message["content"], tools, message.get("reasoning_content")


WHOLE = ("hello", ['{"x": 1}'], "why")


@pytest.mark.parametrize("missing", sorted({one["type"] for one in EVENTS} - {"response.completed"}))
def test_a_response_is_read_without_any_one_kind_of_event(missing: str) -> None:
    assert said(raw_stream(one for one in EVENTS if one["type"] != missing)) == WHOLE


@pytest.mark.parametrize("kind", sorted({one["type"] for one in EVENTS} - {"response.completed"}))
@pytest.mark.parametrize("fault", [{}, {"output_index": "x"}, {"delta": 7, "item": 7, "part": 7, "content_index": -1}])
def test_a_fault_before_the_last_event_is_not_one_of_the_answer(kind: str, fault: dict[str, Any]) -> None:
    broken = [{"type": kind, **fault} if one["type"] == kind else one for one in EVENTS]
    assert said(raw_stream(broken)) == WHOLE


@pytest.mark.parametrize("output", [{"output": []}, {"output": None}, {}])
def test_a_last_event_without_the_output_has_that_of_the_events_before(output: dict[str, Any]) -> None:
    last = {key: value for key, value in RESPONSE.items() if key != "output"} | output
    assert said(raw_stream([*EVENTS[:-1], {"type": "response.completed", "response": last}])) == WHOLE


def test_a_stream_that_ends_with_done_is_whole_if_every_item_is() -> None:
    done = b"data: [DONE]\n\n"
    assert said(raw_stream(EVENTS[:-1]) + done) == WHOLE
    assert body_of_stream(RESPONSES, raw_stream(EVENTS[:-2]) + done) is None  # the last item is not
    assert body_of_stream(RESPONSES, raw_stream(EVENTS[:-1])) is None


def test_a_fault_in_a_stream_without_its_last_event_is_named() -> None:
    with pytest.raises(ValueError, match="output_index is x"):
        body_of_stream(RESPONSES, raw_stream([*EVENTS[:-1], {**EVENTS[-2], "output_index": "x"}]))


def test_an_application_that_reads_the_last_event_is_recorded(provider: Provider, record: Recorded) -> None:
    raw = raw_stream(one for one in EVENTS if "part" not in one["type"])
    provider.reply = lambda request, number: (200, "text/event-stream", [raw])

    def run(task: Any) -> bool:
        last = list(create(stream=True))[-1]
        return bool(last.response.output_text == "hello")

    record(run)
    assert record.statuses == ["ok"]
    assert record.calls[0].candidates[0].text == "hello"


def test_a_text_without_the_event_that_announces_it_is_read_for_anthropic_too() -> None:
    raw = raw_stream([
        {"type": "message_start", "message": {"id": "1", "model": "m", "content": []}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "hel"}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "lo"}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 2}},
        {"type": "message_stop"},
    ])  # fmt: skip
    assert answer_of_message(body_of_stream(MESSAGES, raw)).candidates[0].text == "hello"


# Server-sent events as the client reads them


@pytest.mark.parametrize(
    ("raw", "data"),
    [
        (b'data: {"a":\ndata: 1}\n\ndata: 2\n\n', [b'{"a":\n1}', b"2"]),
        (b'data: {"a": 1}\ndata: {"a": 2}\n\n', [b'{"a": 1}', b'{"a": 2}']),
        (b"data: 1\r\n\r\nid: 3\r\ndata: 2\r\n\r\n", [b"1", b"2"]),
        (b"data: 1\r\rdata: 2\r\r", [b"1", b"2"]),
        (b": comment\n\ndata:1\n\ndata: 2", [b"1", b"2"]),
    ],
)
def test_events_are_split_as_clients_split_them(raw: bytes, data: list[bytes]) -> None:
    assert list(events(raw)) == data


HALVES = [
    b'data: {"choices": [{"index": 0, "delta": {"content": "a \\ud83d"}}]}\n\n',
    b'data: {"choices": [{"index": 0, "delta": {"content": "\\ude00 b"}}]}\n\n',
]
END = b'data: {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"".join(HALVES) + END, "a \U0001f600 b"),
        (HALVES[0] + END, "a \\ud83d"),
        (b'data: {"x": NaN, "choices": [{"index": 0, "delta": {"content": "a"}}]}\n\n' + END, "a"),
    ],
)
def test_json_that_only_python_reads_is_recorded(raw: bytes, text: str) -> None:
    record = Recorded()

    def run(task: Any) -> int:
        call = open_call(lambda: {"messages": [{"role": "user", "content": "x"}], "stream": True})
        assert end_with_body(call, CHAT, {}, raw, True)
        return 1

    record(run)
    assert [call.status for call in record.calls] == ["ok"]
    assert record.calls[0].candidates[0].text == text
    assert record.calls[0].candidates[0].message["content"] == text


def test_a_body_that_ends_with_half_of_a_pair_is_not_cut_short() -> None:
    record = Recorded()
    raw = b'{"choices": [{"message": {"role": "assistant", "content": "\\ud83d"}}]}'

    def run(task: Any) -> int:
        call = open_call(lambda: {"messages": [{"role": "user", "content": "x"}]})
        assert end_with_body(call, CHAT, {}, raw, False)
        return 1

    record(run)
    assert [(call.status, call.candidates[0].text) for call in record.calls] == [("ok", "\\ud83d")]


# Tool calls in pieces


def piece(arguments: str = "", name: str | None = None, id: str | None = None, index: int | None = 0) -> bytes:
    tool: dict[str, Any] = {"index": index, "id": id, "function": {"name": name, "arguments": arguments}}
    if index is None:
        del tool["index"]
    return event({"tool_calls": [tool]})


@pytest.mark.parametrize(
    ("pieces", "calls"),
    [
        pytest.param(
            [piece('{"x":1}', "add", "a"), piece('{"city":"Rome"}', "weather", "b")],
            [("a", "add", '{"x":1}'), ("b", "weather", '{"city":"Rome"}')],
            id="two calls under one index",
        ),
        pytest.param(
            [piece("", "add", "a"), piece("", "weather", "b"), piece('{"x":', id="a"), piece("{}", id="b"),
             piece("1}", id="a")],
            [("a", "add", '{"x":1}'), ("b", "weather", "{}")],
            id="their pieces are told apart by id",
        ),
        pytest.param(
            [piece('{"x"', "add", "a"), piece(":", id="b"), piece("1}", id="c")],
            [("c", "add", '{"x":1}')],
            id="a new id with every piece",
        ),
        pytest.param(
            [piece('{"x"', "add", "a", None), piece(":1}", id="b", index=None), piece("{}", "go", "c", None)],
            [("b", "add", '{"x":1}'), ("c", "go", "{}")],
            id="without any index",
        ),
        pytest.param(
            [piece("", "add"), piece('{"x":1}', id="a")],
            [("a", "add", '{"x":1}')],
            id="the id comes later",
        ),
        pytest.param(
            [piece("{}", "second", "b", 7), piece("{}", "first", "a", 2), piece("{}", "third", "c", 7)],
            [("a", "first", "{}"), ("b", "second", "{}"), ("c", "third", "{}")],
            id="by index, then in the order they came",
        ),
    ],
)  # fmt: skip
def test_pieces_of_parallel_tool_calls_are_put_together(pieces: list[bytes], calls: list[tuple[str, str, str]]) -> None:
    body = body_of_stream(CHAT, b"".join(pieces) + event({}, "tool_calls") + b"data: [DONE]\n\n")
    tools = answer_of_completion(body).candidates[0].message["tool_calls"]
    assert [(one["id"], one["function"]["name"], one["function"]["arguments"]) for one in tools] == calls


def test_langchain_gets_the_tool_calls_that_are_recorded(provider: Provider, record: Recorded) -> None:
    from langchain_openai import ChatOpenAI

    pieces = [piece('{"x":1}', "add", "a"), piece('{"city":"Rome"}', "weather", "b"), event({}, "tool_calls")]
    provider.reply = lambda request, number: (200, "text/event-stream", [*pieces, b"data: [DONE]\n\n"])
    received: list[Any] = []

    def run(task: Any) -> int:
        received.extend(ChatOpenAI(model="m", api_key="x", streaming=True).invoke("go").tool_calls)  # type: ignore[arg-type]
        return 1

    record(run)
    tools = record.calls[0].candidates[0].message["tool_calls"]
    assert [(one["id"], one["function"]["name"]) for one in tools] == [(one["id"], one["name"]) for one in received]
    assert [json.loads(one["function"]["arguments"]) for one in tools] == [one["args"] for one in received]
