"""What goes wrong passes through the gateway as it is, and is recorded with its status; limits, tokens, shutdown."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cotune.errors import ConfigError, RunError
from cotune.integrations.web.gateway.server import running_gateway
from cotune.integrations.web.gateway.settings import GatewayConfig
from cotune.integrations.web.http.limits import Limits
from cotune.storage.sqlite_store import SqliteStore
from tests.core.storage.whole_file import copied
from tests.integrations import provider as scripted
from tests.integrations.provider import Provider, event
from tests.integrations.web.gateway.client import HELLO, Bench, ask, bench

BODY = {"model": "m", "messages": HELLO}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with bench(tmp_path_factory.mktemp("gateway"), limits=Limits(max_body=4096, max_inflight=2, timeout=60)) as made:
        yield made


@pytest.fixture
def gate(shared: Bench) -> Iterator[Bench]:
    shared.provider.reply = scripted.said
    shared.provider.requests.clear()
    shared.provider.headers.clear()
    yield shared
    shared.when_idle()


def chat(base: str) -> str:
    return f"{base}/chat/completions"


def send(gate: Bench, base: str, body: dict[str, Any]) -> socket.socket:
    """A connection with a request on it, whose answer nobody has read."""
    content = json.dumps(body).encode()
    path = chat(base).removeprefix(gate.url)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection(("127.0.0.1", gate.running.port), timeout=20)
    connection.sendall(head.encode() + content)
    return connection


def test_errors_of_the_provider_pass_as_they_are(gate: Bench) -> None:
    raw = b'{"error": {"message": "slow down",  "type": "rate"}}'
    gate.provider.reply = lambda body, number: (429, "application/json\r\nretry-after: 7\r\nx-request-id: r9", [raw])
    opened = gate.open()
    answer = httpx.post(chat(opened["base_url"]), json=BODY)
    assert (answer.status_code, answer.content) == (429, raw)
    assert (answer.headers["retry-after"], answer.headers["x-request-id"]) == ("7", "r9")
    with pytest.raises(openai.RateLimitError, match="slow down"):
        ask(gate.client(opened["base_url"]))
    gate.end(opened["id"])
    assert [c.error for c in gate.calls(opened["id"])] == ["HTTP 429 Too Many Requests"] * 2


def test_headers_pass_both_ways_but_those_of_the_connection(gate: Bench) -> None:
    kind = "application/json\r\nopenai-version: 1\r\nset-cookie: a=1\r\nset-cookie: b=2\r\nkeep-alive: timeout=5"
    answer = json.dumps(scripted.completion({"role": "assistant", "content": "x"})).encode()
    gate.provider.reply = lambda body, number: (200, kind, [answer])
    sent = {"authorization": "Bearer key", "openai-organization": "o", "te": "trailers", "x-drop": "1"}
    opened = gate.open()
    reply = httpx.post(chat(opened["base_url"]), json=BODY, headers={**sent, "connection": "x-drop"})
    assert reply.headers["openai-version"] == "1"
    assert reply.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "keep-alive" not in reply.headers
    (got,) = gate.provider.headers
    assert (got["authorization"], got["openai-organization"]) == ("Bearer key", "o")
    assert got["host"] == gate.provider.url.split("/")[2]
    assert {"te", "x-drop", "x-cotune-call"} & set(got) == set()


def test_a_client_that_goes_away_cancels_the_request_at_the_provider(gate: Bench) -> None:
    gate.provider.reply = lambda body, number: (200, "text/event-stream", [event({"content": "a"}), Provider.HANG])
    opened = gate.open()
    with send(gate, opened["base_url"], {**BODY, "stream": True}) as connection:
        seen = b""
        while b'"a"' not in seen:
            seen += connection.recv(4096)
    gate.when_idle()
    (call,) = gate.calls(opened["id"])
    assert (call.status, call.streamed) == ("cancelled", True)
    assert "the client went away, after" in str(call.error)
    assert call.candidates[0].text == "a"
    assert gate.health()["requests"]["disconnected"] >= 1


def test_a_client_that_goes_away_before_the_answer(gate: Bench) -> None:
    arrived = threading.Event()

    def reply(body: dict[str, Any], number: int) -> Any:
        arrived.set()
        return 200, "application/json", [Provider.HANG]

    gate.provider.reply = reply
    opened = gate.open()
    with send(gate, opened["base_url"], BODY):
        assert arrived.wait(20)
    gate.when_idle()
    assert [call.status for call in gate.calls(opened["id"])] == ["cancelled"]


def test_a_stream_left_half_read_by_the_sdk(gate: Bench) -> None:
    gate.provider.reply = lambda body, number: (200, "text/event-stream", [event({"content": "a"}), Provider.HANG])
    opened = gate.open()
    with gate.client(opened["base_url"]).chat.completions.create(model="m", messages=HELLO, stream=True) as stream:
        assert next(iter(stream)).choices[0].delta.content == "a"
    gate.when_idle()
    assert [call.status for call in gate.calls(opened["id"])] == ["cancelled"]


def test_a_stream_closed_after_its_last_event_is_whole(gate: Bench) -> None:
    chunks = [event({"content": "a"}), event({}, "stop"), b"data: [DONE]\n\n", Provider.HANG]
    gate.provider.reply = lambda body, number: (200, "text/event-stream", chunks)
    opened = gate.open()
    with send(gate, opened["base_url"], {**BODY, "stream": True}) as connection:
        seen = b""
        while b"[DONE]" not in seen:
            seen += connection.recv(4096)
        assert gate.end(opened["id"]).json()["calls"] == 1
    assert [(call.status, call.candidates[0].text) for call in gate.calls(opened["id"])] == [("ok", "a")]


def test_a_provider_that_dies_in_the_middle(gate: Bench) -> None:
    dies = [event({"content": "a"}), Provider.CUT]
    gate.provider.reply = lambda body, number: (200, "application/json\r\ncontent-length: 9999", [b"{", Provider.CUT])
    opened = gate.open()
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(chat(opened["base_url"]), json=BODY)
    gate.provider.reply = lambda body, number: (200, "text/event-stream\r\ncontent-length: 9999", dies)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.post(chat(opened["base_url"]), json={**BODY, "stream": True})
    gate.when_idle()
    calls = gate.calls(opened["id"])
    assert [call.status for call in calls] == ["error", "error"]
    assert calls[1].error is not None and "broke off" in calls[1].error
    assert calls[1].candidates[0].text == "a"


def test_a_provider_that_is_not_there(tmp_path: Path) -> None:
    with running_gateway(GatewayConfig(upstream="http://127.0.0.1:9/v1"), tmp_path) as running:
        answer = httpx.post(f"{running.url}/v1/chat/completions", json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")


def test_limits(gate: Bench) -> None:
    opened = gate.open()
    large = httpx.post(chat(opened["base_url"]), json={**BODY, "user": "x" * 5000})
    assert (large.status_code, large.json()["error"]["code"]) == (413, "body_too_large")
    gate.provider.reply = lambda body, number: (200, "application/json", [Provider.HANG])
    with send(gate, opened["base_url"], BODY), send(gate, opened["base_url"], BODY):
        made, full = gate.running.opened, threading.Event()

        def look() -> None:
            full.set() if made.proxy.in_flight == 2 else made.loop.call_later(0.005, look)

        made.loop.call_soon_threadsafe(look)
        assert full.wait(20)
        busy = httpx.post(chat(opened["base_url"]), json=BODY)
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "1")
    assert busy.json()["error"]["code"] == "too_many_requests"


def test_a_request_that_takes_too_long(tmp_path: Path) -> None:
    with bench(tmp_path, limits=Limits(timeout=1.0)) as gate:
        gate.provider.reply = lambda body, number: (200, "text/event-stream", [Provider.HANG])
        opened = gate.open()
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.post(chat(opened["base_url"]), json={**BODY, "stream": True})
        gate.when_idle()
        (call,) = gate.calls(opened["id"])
        assert call.status == "timeout"

        def slow(body: dict[str, Any], number: int) -> Any:
            gate.provider.over.wait(60)
            return scripted.said(body)

        gate.provider.reply = slow
        answer = httpx.post(chat(opened["base_url"]), json=BODY)
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
        assert [c.status for c in gate.calls(opened["id"])] == ["timeout", "timeout"]


@pytest.mark.parametrize("leaves", [False, True], ids=["late", "gone"])
def test_a_request_that_ends_while_its_call_starts(tmp_path: Path, leaves: bool) -> None:
    starting, go = threading.Event(), threading.Event()

    def roles(call: Any) -> None:
        starting.set()
        assert go.wait(20)

    with bench(tmp_path, limits=Limits(timeout=60 if leaves else 0.5), roles=roles) as gate:
        opened = gate.open()
        body = {**BODY, "user": "x" * (64 << 10)}
        if leaves:
            with send(gate, opened["base_url"], body):
                assert starting.wait(20)
        else:
            while not starting.is_set():  # the time may be over before
                assert httpx.post(chat(opened["base_url"]), json=body).status_code == 504
        live = gate.running.opened.episodes.open[opened["id"]].live
        go.set()
        gate.when_idle()
        until = time.monotonic() + 20
        while live.pending() or not live.failures:
            assert time.monotonic() < until, live.pending()
            time.sleep(0.01)
        cause = "the client went away" if leaves else "the request ended before its call had started"
        assert {(call.status, call.error) for call in gate.calls(opened["id"])} == {("cancelled", cause)}


def test_a_call_whose_episode_ends_is_cancelled_and_told_so(gate: Bench) -> None:
    arrived, over = threading.Event(), threading.Event()

    def reply(body: dict[str, Any], number: int) -> Any:
        arrived.set()
        over.wait(20)
        return scripted.said(body)

    gate.provider.reply = reply
    opened = gate.open()
    with send(gate, opened["base_url"], BODY) as connection:
        assert arrived.wait(20)
        assert gate.end(opened["id"]).json()["calls"] == 1
        answer = connection.recv(4096)
        over.set()
    assert answer.startswith(b"HTTP/1.1 409") and b"episode_ended" in answer
    assert [call.status for call in gate.calls(opened["id"])] == ["cancelled"]


def test_its_own_token_and_the_provider_key(tmp_path: Path) -> None:
    with bench(tmp_path, token="s3cret", key="real-key") as gate:
        url = f"{gate.url}/v1"
        refused = httpx.post(chat(url), json=BODY, headers={"authorization": "Bearer mine"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.post(f"{gate.url}/cotune/episodes", json={"task": 1}).status_code == 401
        assert httpx.get(f"{gate.url}/health").status_code == 200
        ask(gate.client(url, default_headers={"X-Cotune-Token": "s3cret"}))
        ask(openai.OpenAI(base_url=url, api_key="s3cret"))
        assert [got["authorization"] for got in gate.provider.headers] == ["Bearer provider-key", "Bearer real-key"]


def test_no_access_from_outside_without_a_token_and_no_bad_upstream(tmp_path: Path) -> None:
    config = GatewayConfig(upstream="http://x/v1")
    with pytest.raises(ConfigError, match="--token"), running_gateway(config, tmp_path, host="0.0.0.0"):
        pass
    for wrong in ("api.openai.com", "ftp://x", "http://", "http://x/v1?a=1", "http://x:99999/"):
        with pytest.raises(ConfigError, match="upstream"):
            GatewayConfig(upstream=wrong)


@pytest.mark.parametrize("wrong", [{"max_body": 0}, {"max_inflight": -1}, {"timeout": float("nan")}])
def test_limits_are_above_zero(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Limits(**wrong)


def test_records_that_another_process_writes(tmp_path: Path) -> None:
    with (
        SqliteStore.open(tmp_path),
        pytest.raises(RunError, match="written by process"),
        running_gateway(GatewayConfig(upstream="http://x"), tmp_path),
    ):
        pass


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_closes_open_episodes(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "cotune", "gateway", "--upstream", "http://127.0.0.1:9/v1"]
    options = ["--port", "0", "--records", str(tmp_path)]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        [*command, *options],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2]
        while process.stdout.readline() != "Ctrl-C stops it.\n":
            pass
        opened = httpx.post(f"{url.removesuffix('/v1')}/cotune/episodes", json={"task": {"id": "t"}}).json()
        process.send_signal(number)
        assert process.wait(20) == 0
    with copied(tmp_path) as store:
        assert store.episode(opened["id"]).status == "cancelled"
