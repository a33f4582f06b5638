"""One client's request holds up no other client of `cotune serve`, a process of its own."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integrations.second_client import Served, held_up, post, server

pytestmark = pytest.mark.slow

HELLO = {"role": "user", "content": "hello"}


@pytest.fixture(scope="module")
def served(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with server(tmp_path_factory.mktemp("serve"), "serve", str(base), "--role", "m") as made:
        yield made


def asked(**more: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [HELLO], "max_tokens": 4, **more}).encode()


def bias(count: int) -> dict[str, int]:
    return {str(i): 1 for i in range(count)}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"type": "array", "items": value}
    return value


FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array", "minItems": 10**9}}}
LISTS = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(5000)}}


@pytest.mark.parametrize(
    ("make_body", "status", "said"),
    [
        (lambda: asked(logit_bias=bias(800_000)), 413, b"JSON values"),
        (lambda: asked(logit_bias=bias(120_000)), 400, b"logit_bias: Expected `object` of length <= 1024"),
        (lambda: b'{"model":"m","messages":[' + b"{}," * 5_500_000 + b"{}]}", 413, b"JSON values"),
        (lambda: asked(messages=[HELLO] * 9_990), 400, b"tokens"),
        (lambda: asked(messages=[{"role": "user", "content": "a, " * 5_000_000}]), 400, b"characters"),
        (lambda: asked(chat_template_kwargs=bias(120_000)), 400, b"chat_template_kwargs"),
        (lambda: asked(messages=[{**HELLO, "more": nested(300)}]), 200, b"choices"),
        (lambda: asked(n=128, max_tokens=100, logprobs=True, top_logprobs=20), 200, b"choices"),
        (
            lambda: asked(n=128, max_tokens=100, logprobs=True, top_logprobs=20, stream=True, return_token_ids=True),
            200,
            b"choices",
        ),
        (lambda: asked(response_format=FORM), 400, b"cannot be enforced"),
        (
            lambda: asked(response_format={"type": "json_schema", "json_schema": {"schema": LISTS}}),
            400,
            b"cannot be enforced",
        ),
    ],
    ids=[
        "bias",
        "half",
        "messages",
        "9,990",
        "text",
        "options",
        "nested",
        "logprobs",
        "stream",
        "schema",
        "properties",
    ],
)
def test_a_request(served: Served, make_body: Callable[[], bytes], status: int, said: bytes) -> None:
    body = make_body()  # not when the tests are collected: some bodies have 20 MB
    found: list[tuple[int, bytes]] = []
    held = held_up(served, lambda: found.append(post(served.port, body)))
    assert {answered for answered, _ in found} == {status}, found[0][1][:300]
    assert said in found[0][1], found[0][1][:300]
    assert not held
