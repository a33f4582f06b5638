"""Answers of providers that are not what their interface promises: what is kept of them, and what is said of it."""

from __future__ import annotations

import json
import time
from typing import Any

import httpx
import openai
import pytest

import cotune
from cotune.cli.main import main
from cotune.storage.sqlite_store import SqliteStore
from tests.integrations.provider import completion, event
from tests.integrations.web.gateway.client import bench


def client(body: Any, kind: str = "application/json") -> openai.OpenAI:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    transport = httpx.MockTransport(
        lambda request: httpx.Response(200, headers={"content-type": kind}, content=content)
    )
    http = httpx.Client(transport=transport)
    return openai.OpenAI(api_key="k", base_url="http://x/v1", max_retries=0, http_client=http)


def chat(change: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    body = completion({"role": "assistant", "content": "hello"}, **more)
    body["choices"][0] |= change or {}
    return body


def tool_event(index: Any) -> bytes:
    return event({"tool_calls": [{"index": index, "id": f"c{index}", "function": {"name": "f", "arguments": "{}"}}]})


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        (chat({"finish_reason": 5}), "finish_reason is 5"),
        (chat({"finish_reason": {"a": 1}}), "finish_reason is of type dict"),
        (chat(usage={"prompt_tokens": 12.5, "completion_tokens": 3}), "usage.prompt_tokens is 12.5"),
        (chat(usage=[1]), "usage.prompt_tokens is of type list"),
        (chat({"logprobs": {"content": [{"token": "h", "logprob": None}]}}), "logprobs are not all numbers"),
        (chat({"token_ids": [1, "2"]}), "token_ids are no token ids"),
        (chat({"message": {"role": "assistant", "content": "hello", "tool_calls": "x"}}), "message.tool_calls"),
        (chat({"index": 0}, usage={"prompt_tokens": 2**70}), "usage.prompt_tokens is a huge number"),
    ],
)
def test_one_mistyped_field_costs_itself(tmp_path, capsys, body, fault):
    with cotune.trace(tmp_path / "records.db") as t:
        client(chat()).chat.completions.create(model="m", messages=[{"role": "user", "content": "one"}])
        client(body).chat.completions.create(model="m", messages=[{"role": "user", "content": "two"}])
        assert [(call.status, call.text) for call in t.calls] == [("ok", "hello"), ("malformed", "hello")]
    assert fault in t.calls[1].error
    assert main(["show", str(tmp_path)]) == 0
    assert main(["records", "sft", str(tmp_path), "--out", str(tmp_path / "sft.jsonl")]) == 0
    assert main(["otel", "export", str(tmp_path), "--out", str(tmp_path / "spans"), "--content", "--tokens"]) == 0
    assert "wrote 1 line" in capsys.readouterr().out


def test_a_whole_number_written_as_a_float_is_one():
    with cotune.trace() as t:
        body = chat(usage={"prompt_tokens": 12.0, "completion_tokens": 3.0})
        client(body).chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}])
    (call,) = t.calls
    assert (call.status, call.record.usage.prompt_tokens) == ("ok", 12)


STREAM = [event({"content": "hel"}), tool_event(1), tool_event(5_000_000), event({"content": "lo"}), event({}, "stop")]


def test_a_huge_tool_index_in_a_stream_costs_nothing_but_itself():
    with cotune.trace() as t:
        began = time.perf_counter()
        streamed = client(b"".join(STREAM) + b"data: [DONE]\n\n", "text/event-stream")
        for _ in streamed.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True):
            pass
        seconds = time.perf_counter() - began
    (call,) = t.calls
    assert seconds < 5
    assert (call.status, call.text, [tool["id"] for tool in call.answer["tool_calls"]]) == (
        "malformed",
        "hello",
        ["c1"],
    )
    assert "index is 5000000, no whole number below 4096" in call.error


def test_a_huge_tool_index_through_the_gateway(tmp_path):
    with bench(tmp_path) as gate:
        gate.provider.reply = lambda body, number: (200, "text/event-stream", [*STREAM, b"data: [DONE]\n\n"])
        opened = gate.open()
        began = time.perf_counter()
        for _ in gate.client(opened["base_url"]).chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        ):
            pass
        gate.when_idle()
        (call,) = gate.calls(opened["id"])
        assert time.perf_counter() - began < 60
    assert (call.status, call.candidates[0].text, len(call.candidates[0].tool_calls)) == ("malformed", "hello", 1)


def test_a_long_stream_is_put_together_in_the_time_of_its_length():
    many = b"".join(event({"content": "four"}) for _ in range(100_000)) + event({}, "stop") + b"data: [DONE]\n\n"
    with cotune.trace() as t:
        began = time.perf_counter()
        found = client(many, "text/event-stream").chat.completions.with_raw_response.create(
            model="m", messages=[{"role": "user", "content": "x"}], stream=True
        )
        found.http_response.read()
        seconds = time.perf_counter() - began
    assert t.calls[0].text == "four" * 100_000
    assert seconds < 15


def test_a_broken_row_is_skipped_and_counted_by_every_reader(tmp_path, capsys):
    with cotune.trace(tmp_path / "records.db") as t:
        for text in ("one", "two"):
            client(chat()).chat.completions.create(model="m", messages=[{"role": "user", "content": text}])
    first = t.calls[0].id
    with SqliteStore.open(tmp_path) as store:
        store._writer._db.execute("UPDATE calls SET body = '{\"id\": 5', candidates = '[[' WHERE id = ?", (first,))
    with SqliteStore.open(tmp_path, read_only=True) as store:
        assert [call.step for call in store.calls(t.id)] == [1]
        assert store.health.unreadable == 1
    assert [call.step for call in t.calls] == [1]
    for ways in ([], ["--groups"], ["--episode", t.id]):
        assert main(["show", str(tmp_path), *ways]) == 0
    capsys.readouterr()
    assert main(["records", "sft", str(tmp_path), "--out", str(tmp_path / "sft.jsonl")]) == 0
    assert capsys.readouterr().out.endswith(
        "wrote 1 line to " + str(tmp_path / "sft.jsonl") + "\nleft out: 1 unreadable\n"
    )
    assert main(["otel", "export", str(tmp_path), "--out", str(tmp_path / "spans")]) == 0
    assert "left out: 1 unreadable" in capsys.readouterr().out
