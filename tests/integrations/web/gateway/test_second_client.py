"""One client's request, or one provider's answer, holds up no other client of a gateway."""

from __future__ import annotations

import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx
import pytest

from tests.integrations.provider import completion, event
from tests.integrations.second_client import Served, held_up, post, server

HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: %s\r\n%s\r\n"
OBJECTS = b'{"choices":[' + b"{}," * 20_000_000 + b"{}]}"
"""60 MB of them."""
WHOLE = json.dumps(completion({"role": "assistant", "content": "hello"})).encode()
STREAM = event({"role": "assistant", "content": "word "}) * (60_000_000 // 170)
ANSWERS: dict[str, Callable[[], bytes]] = {
    "packed": lambda: HEAD % (b"application/json", b"content-encoding: gzip\r\n") + gzip.compress(OBJECTS, 1),
    "plain": lambda: HEAD % (b"application/json", b"") + OBJECTS,
    "interim": lambda: b"HTTP/1.1 100 Continue\r\n\r\n" * 100_000 + HEAD % (b"application/json", b"") + WHOLE,
    "stream": lambda: HEAD % (b"text/event-stream", b"") + STREAM + event({}, "stop") + b"data: [DONE]\n\n",
    "whole": lambda: HEAD % (b"application/json", b"") + WHOLE,
}


@pytest.fixture(scope="module")
def provider() -> Iterator[tuple[int, dict[str, bytes]]]:
    """The port of a provider that answers every request with `answer["bytes"]`, byte for byte."""
    answer = {"bytes": ANSWERS["whole"]()}

    def serve(client: socket.socket) -> None:
        with client:
            said = b""
            while b"\r\n\r\n" not in said:
                said += client.recv(65536)
            head, _, body = said.partition(b"\r\n\r\n")
            length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
            while len(body) < length:
                body += client.recv(1 << 20)
            try:
                client.sendall(answer["bytes"])
            except OSError:
                return

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=[client], daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1], answer


@pytest.fixture(scope="module")
def gateway(provider: tuple[int, dict[str, bytes]], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    upstream = f"http://127.0.0.1:{provider[0]}/v1"
    with server(tmp_path_factory.mktemp("gateway"), "gateway", "--upstream", upstream) as made:
        yield made


def failures(served: Served) -> dict[str, int]:
    found: dict[str, int] = httpx.get(f"http://127.0.0.1:{served.port}/health").json()["failures"]
    return found


@pytest.mark.parametrize(
    ("name", "status", "counted"),
    [
        ("packed", 200, "malformed"),
        pytest.param("plain", 200, "malformed", marks=pytest.mark.long),  # "packed" is the same, unpacked first
        ("interim", 502, "error"),
        ("stream", 200, ""),
    ],
)
def test_an_answer(
    gateway: Served, provider: tuple[int, dict[str, bytes]], name: str, status: int, counted: str
) -> None:
    provider[1]["bytes"] = sent = ANSWERS[name]()
    body = json.dumps({"model": "m", "stream": name == "stream", "messages": [{"role": "user", "content": "x"}]})
    before, found = failures(gateway), []
    held = held_up(gateway, lambda: found.append(post(gateway.port, body.encode(), accept_encoding="gzip")))
    provider[1]["bytes"] = ANSWERS["whole"]()
    assert {answered for answered, _ in found} == {status}
    if status == 200:
        assert found[0][1] == sent.partition(b"\r\n\r\n")[2], "the client gets all of it"
    until = time.monotonic() + 60
    while counted and failures(gateway).get(counted, 0) == before.get(counted, 0):
        assert time.monotonic() < until, "the call is counted"
        time.sleep(0.05)
    assert not held


@pytest.mark.parametrize(
    ("make_body", "headers", "status", "said"),
    [
        (lambda: b"[" + b"{}," * 5_500_000 + b"{}]", {}, 413, b"JSON values"),
        (lambda: b'{"model":"m","messages":[' + b"{}," * 5_500_000 + b"{}]}", {}, 413, b"JSON values"),
        (lambda: b'{"model":"m","messages":[' + b"{}," * 20_000_000 + b"{}]}", {}, 413, b"--max-body"),
        (lambda: gzip.compress(b"{}," * 20_000_000), {"content_encoding": "gzip"}, 413, b"--max-body"),
        (lambda: gzip.compress(b"{}," * 5_000_000), {"content_encoding": "gzip"}, 413, b"JSON values"),
        (lambda: b'{"model":"m","messages":[' + b"{}," * 245_000 + b"{}]}", {}, 400, b"<= 10000"),
        (lambda: b'{"model":"m","messages":[' + b"{}," * 9_990 + b"{}]}", {}, 200, b"hello"),
        (
            lambda: b'{"model":"m","messages":[{"role":"user","content":"' + b", " * 8_000_000 + b'"}]}',
            {},
            200,
            b"hello",
        ),
    ],
    ids=["list", "messages", "large", "packed", "packed values", "many", "9,990", "text"],
)
def test_a_request(
    gateway: Served, make_body: Callable[[], bytes], headers: dict[str, str], status: int, said: bytes
) -> None:
    body = make_body()  # not when the tests are collected: some bodies have 60 MB
    found: list[tuple[int, bytes]] = []

    def attack() -> None:
        try:
            found.append(post(gateway.port, body, **headers))
        except OSError:  # it is refused before it was sent
            found.append((413, b"--max-body"))

    held = held_up(gateway, attack)
    assert {answered for answered, _ in found} == {status} and said in found[0][1]
    assert not held
