"""What a gateway keeps and lets stay: slow requests, pages of elsewhere, long prompts, answers asked for again."""

from __future__ import annotations

import contextlib
import gc
import itertools
import json
import socket
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

import cotune
from cotune.integrations.apps.openai import responses as openai_responses
from cotune.integrations.web.http.limits import Limits
from cotune.recording import call_records
from cotune.recording.call_records import CallerContext
from cotune.recording.recorder import LiveEpisode
from cotune.records.answers import Answer
from cotune.records.structs import Candidate, Message, Task
from cotune.runtime import warn_once
from tests.integrations.provider import completion, json_reply, serving
from tests.integrations.web.gateway.client import Bench, ask, bench
from tests.integrations.web.http.unfinished import unfinished_bodies

LENGTH = 1_000_000
"""Characters of a prompt that would be noticed in the memory."""
WHOLE = json.dumps(completion({"role": "assistant", "content": "hello"})).encode()


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    with bench(tmp_path, limits=Limits(timeout=1.0)) as made:
        yield made


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b"408"),
        (b"POST /cotune/epi", b"408"),
        (b"POST /cotune/episodes HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ", b"408"),
        (
            b"POST /cotune/episodes HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
            b"content-length: 100\r\n\r\n{",
            b"408",
        ),
        (b"POST /nowhere HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 100000\r\n\r\n{", b"404"),
    ],
)
def test_a_request_that_comes_drop_by_drop_is_closed(gate: Bench, sent: bytes, status: bytes) -> None:
    with socket.create_connection(("127.0.0.1", gate.running.port)) as client:
        client.settimeout(0.2)
        client.sendall(sent)
        said, begun = b"", time.monotonic()
        while time.monotonic() - begun < 90:
            try:
                with contextlib.suppress(ConnectionError):  # it may have answered and closed meanwhile
                    client.sendall(b" " if sent else b"")
                got = client.recv(4096)
            except TimeoutError:
                continue
            except OSError:
                break
            if not got:
                break
            said += got
    assert time.monotonic() - begun < 60
    assert said.split(b" ")[1:2] == [status]


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", pytest.param("/v1/embeddings", marks=pytest.mark.long), "/cotune/episodes"]
)
def test_bodies_that_never_end_do_not_fill_the_memory(path: str, tmp_path: Path) -> None:
    with bench(tmp_path, limits=Limits(max_body=1 << 20)) as gate:
        room = gate.running.opened.proxy.room
        assert room.most == 8 << 20
        with unfinished_bodies(gate.url, path, room, "application/json", count=40, largest=1 << 20):
            answer = httpx.post(f"{gate.url}/cotune/episodes", json={"task": "a small request"})
            assert answer.status_code == 201
        assert httpx.get(f"{gate.url}/health").status_code == 200


def test_a_slow_answer_is_no_slow_request(gate: Bench) -> None:
    """A connection that is kept, and whose requests come whole, is left alone."""
    with httpx.Client() as client:
        for _ in range(2):
            assert client.get(f"{gate.url}/health").status_code == 200
            time.sleep(1.3)


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ({"host": "evil.example"}, 403, "forbidden_host"),
        ({"host": "evil.example:8100"}, 403, "forbidden_host"),
        ({"origin": "https://evil.example"}, 403, "forbidden_origin"),
        ({"origin": "null"}, 403, "forbidden_origin"),
        ({"origin": "https://127.0.0.1.evil.example"}, 403, "forbidden_origin"),
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"origin": "http://localhost:3000"}, 200, None),
        ({"host": "localhost:8100"}, 200, None),
        ({"host": "[::1]:8100"}, 200, None),
    ],
)
def test_a_page_of_elsewhere_is_refused(gate: Bench, headers: dict[str, str], status: int, code: str | None) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    places = ["/v1/chat/completions", "/cotune/episodes", "/v1/chat/completions/c1", "/health"]
    answers = [
        httpx.request(
            "GET" if place == "/health" else "POST",
            gate.url + place,
            content=body if place.startswith("/v1") else '{"task": 1}',
            headers={"content-type": "application/json", **headers},
        )
        for place in places
    ]
    if status == 200:
        assert {answer.status_code for answer in answers[:2]} <= {200, 201}
        return
    refused = answers if code != "unsupported_media_type" else answers[:3]
    assert [answer.status_code for answer in refused] == [status] * len(refused)
    assert {answer.json()["error"]["code"] for answer in refused} == {code}
    assert gate.provider.requests == [] and gate.running.opened.episodes.open == {}


def test_with_a_token_any_host_is_served(tmp_path: Path) -> None:
    with bench(tmp_path, token="t") as gate:
        headers = {"host": "gateway.example", "x-cotune-token": "t"}
        assert httpx.post(f"{gate.url}/cotune/episodes", json={"task": 1}, headers=headers).status_code == 201
        del headers["x-cotune-token"]
        assert httpx.post(f"{gate.url}/cotune/episodes", json={"task": 1}, headers=headers).status_code == 401


def test_an_answer_that_broke_off_is_a_failed_call(tmp_path: Path) -> None:
    """The SDK's client reads half a body, loses the connection and asks again, twice."""
    with bench(tmp_path) as gate:
        episode = gate.open()["id"]
        heads = [len(WHOLE) * 2, len(WHOLE) + 50, len(WHOLE)]

        server = socket.create_server(("127.0.0.1", 0))
        gate.running.opened.proxy.upstream.url = f"http://127.0.0.1:{server.getsockname()[1]}/v1"

        def serve() -> None:
            for length in heads:  # more than is sent, even of a whole body: the client does not have it
                client, _ = server.accept()
                with client:
                    client.recv(65536)
                    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % length
                    client.sendall(head + WHOLE)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        assert ask(gate.client(f"{gate.url}/e/{episode}/v1", max_retries=2)) == "hello"
        thread.join(10)
        server.close()
        gate.when_idle()
        assert gate.end(episode).json()["calls"] == 3
        *failed, answered = gate.calls(episode)
        assert answered.status == "ok"
        assert ["broke off" in str(call.error) for call in failed if call.status == "error"] == [True, True]


@pytest.fixture
def traced() -> Any:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
def test_an_open_episode_keeps_no_prompts(traced: None, tmp_path: Path) -> None:
    """Not the 1.3 characters for each character of a prompt that it once kept."""
    with bench(tmp_path) as gate:
        episode = gate.open()["id"]
        gate.provider.reply = lambda body, number: (200, "application/json", [WHOLE])

        def asked(count: int, kind: str) -> int:
            for number in range(count):
                ask(gate.client(f"{gate.url}/e/{episode}/v1"), f"{kind}{number} " + "x" * LENGTH)
                gate.provider.forget()
            gate.when_idle()
            gate.store.flush()
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        before = asked(4, "first")
        assert (asked(60, "then") - before) / 60 < LENGTH / 5  # the writer may hold its last rows


@pytest.mark.slow
def test_a_trace_keeps_no_prompts(traced: None, provider: Any, tmp_path: Path) -> None:
    with cotune.trace(tmp_path / "records.db", redactor=lambda message: message) as t:

        def asked(count: int, kind: str) -> int:
            with openai.OpenAI() as client:
                for number in range(count):
                    messages: Any = [{"role": "user", "content": f"{kind}{number} " + "x" * LENGTH}]
                    client.chat.completions.create(model="m", messages=messages)
                    provider.forget()
            assert len(t.warnings) == 0
            assert len(t.calls) >= count  # what is read is stored
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        provider.reply = lambda body, number: (200, "application/json", [WHOLE])
        before = asked(20, "first")  # what redactors returned is kept up to 16 MiB
        assert (asked(60, "then") - before) / 60 < LENGTH / 5  # the writer may hold its last rows


def response(number: int, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    said = {"id": f"msg_{number}", "type": "message", "role": "assistant", "status": "completed", "content": [part]}
    head = {"id": f"resp_{number}", "object": "response", "created_at": 1, "model": "m", "status": "completed"}
    return {**head, "output": [said], "parallel_tool_calls": True, "tool_choice": "auto", "tools": []}


def respond(client: openai.OpenAI, text: str, **more: Any) -> str:
    return client.responses.create(model="m", input=text, **more).id


def provide_responses(provider: Any) -> None:
    numbers = itertools.count()
    provider.reply = lambda body, _: json_reply(response(next(numbers), "yes"))


@pytest.mark.parametrize("way", ["gateway", "trace"])
def test_an_open_episode_keeps_so_many_bytes_of_responses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It kept each whole conversation, without an end. What goes on from a forgotten one is recorded and counted."""
    monkeypatch.setattr(openai_responses, "BYTES", 4 << 20, raising=False)
    warn_once._first_of.cache_clear()
    with contextlib.ExitStack() as stack:
        if way == "gateway":
            gate = stack.enter_context(bench(tmp_path))
            provider, episode = gate.provider, gate.open()["id"]
            client = gate.client(f"{gate.url}/e/{episode}/v1")
        else:
            provider = stack.enter_context(serving())
            trace = stack.enter_context(cotune.trace(tmp_path / "records.db"))
            client = openai.OpenAI(base_url=provider.url, api_key="none", max_retries=0)
        provide_responses(provider)
        respond(client, "hello")  # loads what the SDK needs, which takes ten times as long when it is traced
        tracemalloc.start()
        stack.callback(tracemalloc.stop)

        def asked(count: int) -> int:
            for number in range(count):
                respond(client, f"{number} " + "x" * 500_000)
                provider.forget()
            if way == "gateway":
                gate.when_idle()
                gate.store.flush()
            else:
                assert trace.calls
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        before = asked(12)
        assert (asked(40) - before) / 40 < 300_000  # of 500,000; rows of the store come and go
        respond(client, "go on", previous_response_id="resp_52")
        respond(client, "go on", previous_response_id="resp_1")
        respond(client, "and on", previous_response_id="resp_54")
        if way == "gateway":
            gate.when_idle()
            calls, warnings = gate.calls(episode), gate.health()["warnings"]
        else:
            calls, warnings = trace.calls, trace.warnings
        assert [call.status for call in calls] == ["ok"] * 56
        assert [len(call.messages) for call in calls[-3:]] == [3, 1, 3]
        assert warnings["cut_conversation"] == 2
        assert warnings["forgotten_response"] > 40
    assert sum("least recently" in told.message for told in caplog.records) == 1


@pytest.mark.slow
def test_short_messages_are_bounded_together(traced: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them was kept, 800 bytes for a call, as long as its episode was open."""
    monkeypatch.setattr(call_records, "NAME_BYTES", 1 << 17)
    monkeypatch.setattr(call_records, "OUTPUT_BYTES", 1 << 17)
    stored: set[str] = set()

    class Counting:
        def write(self, records: Any) -> None:
            stored.update(record.id for record in records if isinstance(record, Message))

    live = LiveEpisode(Counting(), Task(id="t", input=None), workflow="w")

    def asked(first: int, count: int) -> int:
        for number in range(first, first + count):
            said = {"role": "assistant", "content": f"{number} " + "y" * 200}
            text = {"role": "user", "content": f"{number} " + "x" * 200}
            call = live.start(CallerContext("app", "test"), {"model": "m", "messages": [text]})
            call.finish(Answer(candidates=(Candidate(index=0, text=said["content"], message=said),)))
        stored.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    before = asked(0, 750)
    assert (asked(750, 1500) - before) / 1500 < 100
    assert live.warnings["forgotten_output"] > 1500
    reads = live.start(
        CallerContext("app", "test"), {"messages": [{"role": "assistant", "content": "2249 " + "y" * 200}]}
    )
    assert len(reads.parents) == 1
    asked(0, 1)
    assert live.failures == {}
    live.end("ok")
