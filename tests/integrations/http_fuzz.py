"""Malformed requests from a seed, and an ASGI application driven with them without a socket."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import gzip
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

MESSAGES = [{"role": "user", "content": "hello"}]
JSON = (b"content-type", b"application/json")
WRONG: dict[str, list[Any]] = {
    "messages": [None, [], {}, "x", 1, [1], ["x"], [[]], [None], [MESSAGES], True],
    "model": [1, [], {}, True, 1.5],
    "stream": ["yes", 1, [], {}],
    "n": ["2", 1.5, [], {}, True],
    "tools": ["x", 1, {}, [1], ["x"], [[]], True],
}
"""By field of a chat request: values that no endpoint can take."""
NOT_JSON = [
    b"",
    b" ",
    b"{",
    b"}",
    b'{"a":',
    b"[",
    b'"',
    b"nul",
    b"NaN",
    b"{'a': 1}",
    b'{"a": 1,}',
    b"\xff\xfe",
    b"\x00",
]
NO_OBJECT = [b"[]", b"1", b"null", b'"x"', b"true", b"[{}]", b"1e5", b"-0"]


@dataclass
class Attack:
    """One request. `gone` says that the client leaves before its body has ended."""

    method: str = "POST"
    path: bytes = b"/v1/chat/completions"
    query: bytes = b""
    headers: list[tuple[bytes, bytes]] = field(default_factory=lambda: [JSON])
    body: bytes = b""
    gone: bool = False


def bad_bodies(rng: random.Random, valid: dict[str, Any], wrong: dict[str, list[Any]]) -> Iterator[Attack]:
    """Endless requests whose bodies cannot be taken, made of a `valid` one and `wrong` values by field."""
    while True:
        body: bytes
        match rng.randrange(9):
            case 0:
                body = rng.choice(NOT_JSON)
            case 1:
                body = rng.choice(NO_OBJECT)
            case 2:
                whole = json.dumps(valid).encode()
                body = whole[: rng.randrange(1, len(whole))]
            case 3:
                body = rng.randbytes(rng.randrange(1, 200)) + b"\xff"
            case 4:
                opening = rng.choice([b"[", b'{"a":'])
                body = b'{"messages":' + opening * rng.choice([50, 1000, 5000])
            case 5:
                body = (
                    json.dumps(valid)
                    .encode()
                    .replace(b"hello", rng.choice([b"\xff", b"\xc3", b"\xed\xa0\x80", b"\x01"]))
                )
            case 6:
                body = json.dumps(valid).encode() + rng.choice([b"x", b"{}", b"]", b"\x00"])
            case _:
                name = rng.choice(list(wrong))
                changed = {**valid, name: rng.choice(wrong[name])}
                if rng.random() < 0.3:
                    changed[rng.choice(["user", "", "metadata", "\x00", "é" * 40])] = rng.choice(
                        [None, 10**30, "x" * 99, []]
                    )
                body = json.dumps(changed).encode()
        yield Attack(body=body)


def bad_framing(rng: random.Random, valid: bytes, limit: int) -> Iterator[Attack]:
    """Endless requests with a fine body, but of a wrong type, size or coding, or that end early."""
    types = [
        b"text/plain",
        b"",
        b"multipart/form-data",
        b"application/jsonp",
        b"\xff",
        b"json",
        b"application/xml;json",
    ]
    while True:
        match rng.randrange(4):
            case 0:
                yield Attack(headers=[(b"content-type", rng.choice(types))] * rng.randrange(2), body=valid)
            case 1:
                yield Attack(body=valid + b" " * (limit + rng.randrange(1, 99)))
            case 2:
                yield Attack(headers=[JSON, (b"content-length", b"%d" % (limit + rng.randrange(1, 10**9)))], body=valid)
            case _:
                yield Attack(body=valid[: rng.randrange(len(valid))], gone=True)


def bad_codings(rng: random.Random, valid: bytes, limit: int) -> Iterator[Attack]:
    """Endless requests whose content coding is unknown, broken, cut off, or hides too much."""
    bomb = gzip.compress(b" " * (limit * 20))
    while True:
        zipped = gzip.compress(valid)
        coding, body = rng.choice(
            [
                (rng.choice([b"br", b"zstd", b"gzip, br", b"\xff", b"x" * 99]), valid),
                (rng.choice([b"gzip", b"deflate"]), rng.randbytes(40)),
                (b"gzip", zipped[: rng.randrange(1, len(zipped) - 8)]),
                (b"gzip", bomb),
            ]
        )
        yield Attack(headers=[JSON, (b"content-encoding", coding)], body=body)


def bad_paths(rng: random.Random, known: list[bytes]) -> Iterator[Attack]:
    """Endless requests for what is not served, or by a method that is not."""
    alphabet = [
        b"/",
        b"..",
        b".",
        b"%2e%2e",
        b"%2F",
        b"%00",
        b"v1",
        b"e",
        b"r",
        b"x",
        b"\xff",
        b"%ff",
        b"%",
        b";",
        b"models",
    ]
    while True:
        match rng.randrange(3):
            case 0:
                method = rng.choice(["PUT", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "post", ""])
                yield Attack(method=method, path=rng.choice(known), body=b"{}")
            case 1:
                tail = b"".join(rng.choice(alphabet) for _ in range(rng.randrange(12)))
                yield Attack(method="PUT", path=b"/" + tail, body=b"{}")
            case _:
                odd = rng.choice(
                    [b"/..", b"/./x", b"//", b"/%2e%2e/admin", b"\n", b"/x\xff", b"x" * 2000, quote("/é/..").encode()]
                )
                yield Attack(path=rng.choice(known) + odd, body=b"{}")


def mixed(rng: random.Random, count: int, *sources: Iterator[Attack]) -> Iterator[Attack]:
    """So many requests, from the sources in turn by chance."""
    for _ in range(count):
        yield next(rng.choice(sources))


async def answer_to(app: Any, attack: Attack) -> tuple[int, bytes]:
    """Status and body of the answer to one request; raises what the application lets out."""
    halves = [attack.body[: len(attack.body) // 2], attack.body[len(attack.body) // 2 :]]
    sent: list[dict[str, Any]] = [
        {"type": "http.request", "body": half, "more_body": i == 0 or attack.gone} for i, half in enumerate(halves)
    ]
    sent.append({"type": "http.disconnect"})
    answered = asyncio.Event()
    got: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        if len(sent) == 1 and not attack.gone:
            await answered.wait()
        return sent.pop(0) if len(sent) > 1 else sent[0]

    async def send(message: dict[str, Any]) -> None:
        got.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            answered.set()

    scope = {
        "type": "http",
        "http_version": "1.1",
        "scheme": "http",
        "root_path": "",
        "method": attack.method,
        "path": attack.path.decode("utf-8", "replace"),
        "raw_path": attack.path,
        "query_string": attack.query,
        "headers": attack.headers,
        "server": ("127.0.0.1", 80),
        "client": ("127.0.0.1", 1),
        "state": {},
    }
    await app(scope, receive, send)
    return got[0]["status"], b"".join(message.get("body", b"") for message in got[1:])


async def survive(app: Any, count: int, attacks: Iterator[Attack], after: Callable[[], None]) -> Counter[int]:
    """Send all `count`, and require of each a 4xx that names its cause. In the end nothing may be left of them."""
    statuses: Counter[int] = Counter()
    tasks = len(asyncio.all_tasks())
    sizes: list[int] = []
    for number, attack in enumerate(attacks):
        status, body = await answer_to(app, attack)
        await asyncio.sleep(0)  # the loop sweeps timers that were cancelled only when it runs
        assert 400 <= status < 500, (status, body[:300], attack)
        error = json.loads(body)["error"]
        assert error["message"] and error["type"] == "invalid_request_error", (error, attack)
        assert error["code"] or error["param"], (error, attack)
        statuses[status] += 1
        if (number + 1) % (count // 4) == 0:
            gc.collect()
            sizes.append(len(gc.get_objects()))
    assert len(asyncio.all_tasks()) == tasks
    assert sizes[-1] - sizes[-2] < 1000, sizes
    after()
    return statuses


BROKEN_HTTP = [
    b"\x00\x01\x02\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTX/1.1\r\n\r\n",
    b"G\xffT / HTTP/1.1\r\n\r\n",
    b"GET /\x00 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost\r\n\r\n",
    b"GET / HTTP/1.1\r\nA B: x\r\n\r\n",
    b"GET / HTTP/1.1\r\nX: \x00\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 99999999999999999999999\r\n\r\n",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
    b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: nonsense\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
    b"GET /" + b"y" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"GET /\xc3\xa9\xff HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"{}\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
]
"""What is no HTTP request."""


def raw_answer(port: int, sent: bytes) -> bytes:
    """What a server sends back for raw bytes, until its answer is whole or it closes the connection."""
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        got = b""
        try:
            connection.sendall(sent)
            while part := connection.recv(65536):
                got += part
                if _is_whole(got):
                    break  # it would keep the connection open for the next request
        except ConnectionError:
            pass
    return got


def _is_whole(answer: bytes) -> bool:
    head, blank_line, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"^content-length: *(\d+)", head, re.IGNORECASE | re.MULTILINE)
    if length is None:
        return body.startswith(b"{") and body.endswith(b"}}")
    return bool(blank_line) and len(body) >= int(length[1])


def as_http(attack: Attack) -> bytes:
    """A request as its bytes on a connection."""
    target = attack.path + (b"?" + attack.query if attack.query else b"")
    lines = [attack.method.encode() + b" " + target + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n"]
    lines += [name + b": " + value + b"\r\n" for name, value in attack.headers]
    if not any(name == b"content-length" for name, _ in attack.headers):
        lines.append(b"content-length: %d\r\n" % (len(attack.body) + attack.gone))
    return b"".join([*lines, b"\r\n", attack.body])


def besiege(words: list[str], attacks: Iterator[Attack]) -> Counter[int]:
    """Start a server by its command, send all requests and what is no HTTP over connections, and stop it by a signal.

    Statuses of the answers; a connection that is closed without one counts as 0. Nothing of the server may be left.
    """
    command = [sys.executable, "-m", "cotune", *words, "--port", "0"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True)
    try:
        assert server.stdout is not None
        said = [line for line in iter(server.stdout.readline, "Ctrl-C stops it.\n") if line]
        port = int(next(word for line in said for word in line.split() if "://127.0.0.1:" in word).split(":")[2][:-3])
        statuses = Counter(_status(raw_answer(port, sent)) for sent in BROKEN_HTTP)
        for attack in attacks:
            if attack.gone:
                with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
                    connection.sendall(as_http(attack))
            else:
                statuses[_status(raw_answer(port, as_http(attack)))] += 1
        deadline = time.monotonic() + 20  # it may not have seen yet that the last clients have gone
        while b'"in_flight":0' not in (health := asked_for_health(port)).replace(b" ", b""):
            assert time.monotonic() < deadline, health
            time.sleep(0.05)
        assert _status(health) == 200, health
        server.send_signal(signal.SIGTERM)
        assert server.wait(60) == 0
        try:
            os.killpg(server.pid, 0)
        except ProcessLookupError:
            return statuses
        raise AssertionError("processes of the server are left")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def asked_for_health(port: int) -> bytes:
    return raw_answer(port, b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")


def _status(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/") else 0
