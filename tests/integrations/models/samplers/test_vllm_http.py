"""What a sampler by URL says about servers that cannot be trained with, and about what they answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cotune.errors import ConfigError, RequestRefused, SamplerError
from cotune.integrations.models.vllm import client
from cotune.integrations.models.vllm.http import VllmHttpSampler, find_servers
from cotune.integrations.versions import UnsupportedVersion
from cotune.records.structs import PolicyRef
from cotune.sampling.protocol import SamplingParams
from tests.integrations import tiny_models

pytestmark = pytest.mark.slow

TOKEN = {"index": 0, "finish_reason": "stop", "token_ids": [2], "logprobs": {"token_logprobs": [0.0]}}


class FakeServer:
    """Answers as a vLLM server would; tests change one answer at a time. `asked` holds the bodies of completions. A
    connection that was idle for `patience` seconds is closed, even where a request has just arrived on it."""

    def __init__(self, model: Path) -> None:
        self.patience = math.inf
        self.asked: list[dict[str, Any]] = []
        self.answers: dict[tuple[str, str], Any] = {
            ("GET", "/version"): (200, {"version": "0.28.0"}),
            ("GET", "/v1/models"): (200, {"data": [{"id": "base", "root": str(model), "max_model_len": 512}]}),
            ("GET", "/v1/load_lora_adapter"): (405, {}),
            ("POST", "/v1/load_lora_adapter"): (200, b"loaded"),
            ("POST", "/v1/unload_lora_adapter"): (200, b"unloaded"),
            ("POST", "/v1/completions"): (200, {"choices": [TOKEN]}),
        }
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            answered_at = math.inf

            def do_GET(self) -> None:
                self.answer("GET")

            def do_POST(self) -> None:
                fake.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.answer("POST")

            def answer(self, method: str) -> None:
                if time.monotonic() - self.answered_at > fake.patience:
                    self.close_connection = True
                    return
                self.answered_at = time.monotonic()
                found = fake.answers.get((method, self.path), (404, {"detail": "Not Found"}))
                status, body = found(fake.asked[-1]) if callable(found) else found
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: object) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


@pytest.fixture
def server(contract_model: Path) -> Iterator[FakeServer]:
    fake = FakeServer(contract_model)
    yield fake
    fake.http.shutdown()
    fake.http.server_close()


def opening(server: FakeServer, model: Path | str) -> None:
    async def scenario() -> None:
        sampler = await VllmHttpSampler.open(server.url, model)
        await sampler.aclose()

    asyncio.run(scenario())


PLAIN = SamplingParams(max_tokens=3, seed=1)


def sampling(
    server: FakeServer,
    model: Path,
    answer: tuple[int, Any],
    how: SamplingParams = PLAIN,
) -> Any:
    async def scenario() -> Any:
        sampler = await VllmHttpSampler.open(server.url + "/v1/", model)
        server.answers["POST", "/v1/completions"] = answer
        try:
            return await sampler.sample([5, 6], 1, how, PolicyRef("any"))
        finally:
            await sampler.aclose()

    return asyncio.run(scenario())


def test_everything_that_shapes_the_distribution_is_sent(server: FakeServer, contract_model: Path) -> None:
    (reply,) = sampling(server, contract_model, (200, {"choices": [TOKEN]}))
    assert (reply.token_ids, reply.logprobs, reply.finish_reason) == ((2,), (0.0,), "stop")
    *_, body, unloaded = server.asked
    assert body["model"] == unloaded["lora_name"]
    assert (body["prompt"], body["max_tokens"]) == ([5, 6], 3)
    neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0}
    assert {key: body[key] for key in neutral} == neutral


def test_what_a_request_asks_is_sent(server: FakeServer, contract_model: Path) -> None:
    asked = {"min_p": 0.1, "presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.2}
    how = SamplingParams(max_tokens=3, seed=1, grammar="start: /a/", logit_bias=((7, -100.0),), **asked)
    sampling(server, contract_model, (200, {"choices": [TOKEN]}), how)
    body = server.asked[-2]
    assert {key: body[key] for key in asked} == asked
    padding = range(len(tiny_models.tokenizer()), len(tiny_models.tokenizer()) + 60)
    assert body["logit_bias"] == {"7": -100.0, **{str(token): -100.0 for token in padding}}
    assert body["structured_outputs"] == {"grammar": "start: /a/"}


def test_an_answer_with_an_id_that_is_no_token_fails(server: FakeServer, contract_model: Path) -> None:
    last = len(tiny_models.tokenizer()) - 1
    drawn = {**TOKEN, "token_ids": [last + 1]}
    with pytest.raises(SamplerError, match=f"drew the token {last + 1}; the tokenizer ends at {last}"):
        sampling(server, contract_model, (200, {"choices": [drawn]}))


def test_more_padding_than_a_server_can_forbid_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiny_models.build("qwen3", tmp_path, padding=1025)
    fake = FakeServer(tmp_path)
    sampling(fake, tmp_path, (200, {"choices": [TOKEN]}))
    fake.http.shutdown()
    fake.http.server_close()
    last = len(tiny_models.tokenizer()) - 1
    assert [f"can draw the ids {last + 1} to {last + 1025}" in message for message in caplog.messages] == [True]
    assert "logit_bias" not in fake.asked[-2]


@pytest.mark.parametrize(
    ("request_", "answer", "error", "said"),
    [
        (("GET", "/version"), (404, {}), ConfigError, "is not a vLLM server"),
        (("GET", "/version"), (200, b"<html>"), ConfigError, "is not a vLLM server"),
        (("GET", "/version"), (401, {"error": "Unauthorized"}), ConfigError, "VLLM_API_KEY"),
        (("GET", "/version"), (200, {"version": "0.9.1"}), UnsupportedVersion, "vllm 0.9.1 cannot be used"),
        (("GET", "/v1/load_lora_adapter"), (404, {}), ConfigError, "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        (("POST", "/v1/load_lora_adapter"), (500, {"message": "LoRA is not enabled"}), ConfigError, "--enable-lora"),
        (
            ("POST", "/v1/completions"),
            (200, {"choices": [{**TOKEN, "logprobs": {"token_logprobs": [-0.7]}}]}),
            ConfigError,
            "--logprobs-mode processed_logprobs",
        ),
    ],
)
def test_a_server_that_cannot_be_trained_with_is_refused(
    server: FakeServer,
    contract_model: Path,
    request_: tuple[str, str],
    answer: tuple[int, Any],
    error: type[Exception],
    said: str,
) -> None:
    server.answers[request_] = answer
    with pytest.raises(error, match=said):
        opening(server, contract_model)


def test_another_model_is_refused_by_name_and_a_served_name_is_accepted(
    server: FakeServer, contract_model: Path
) -> None:
    answer = {"data": [{"id": "llama", "root": "/elsewhere/llama", "max_model_len": 512}]}
    server.answers["GET", "/v1/models"] = (200, answer)
    with pytest.raises(ConfigError, match=r"serves: \['llama'\]"):
        opening(server, contract_model)
    answer["data"][0]["id"] = str(contract_model)
    opening(server, contract_model)


def test_no_server_is_named_by_its_address(contract_model: Path) -> None:
    with pytest.raises(SamplerError, match=r"http://127\.0\.0\.1:9 does not answer"):
        asyncio.run(VllmHttpSampler.open("http://127.0.0.1:9", contract_model))


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        ((400, {"error": {"message": "no such token"}}), RequestRefused, "answered 400: no such token"),
        ((500, {"error": {"message": "engine dead"}}), SamplerError, "answered 500: engine dead"),
        ((429, b"slow down"), SamplerError, "answered 429: slow down"),
        ((200, {"choices": [{"text": "hello"}]}), SamplerError, "answered in another form"),
        ((200, b"\xff\xfe"), SamplerError, "answered in another form"),
        ((200, {"choices": [{**TOKEN, "finish_reason": "abort"}]}), SamplerError, "'abort'"),
    ],
)
def test_what_a_server_answers_instead_of_candidates_is_said(
    server: FakeServer, contract_model: Path, answer: tuple[int, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        sampling(server, contract_model, answer)
    assert type(raised.value) is error


def test_a_connection_that_the_server_may_be_closing_is_not_used_again(
    server: FakeServer, contract_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "IDLE_SECONDS", 0.05)
    server.patience = 0.2

    async def scenario() -> None:
        sampler = await VllmHttpSampler.open(server.url, contract_model)
        await asyncio.sleep(0.3)
        assert (await sampler.info()).max_model_len == 512
        await sampler.aclose()

    asyncio.run(scenario())


def test_each_base_model_is_found_at_the_server_that_has_it(
    server: FakeServer, contract_model: Path, tmp_path: Path
) -> None:
    second = tmp_path / "second"
    second.mkdir()
    (second / "config.json").write_text("{}")
    other = FakeServer(second)
    try:
        models, urls = [str(second), str(contract_model)], [server.url, other.url]
        found = asyncio.run(find_servers(urls, models, None))
        assert found == {str(second): other.url, str(contract_model): server.url}
        other.answers["GET", "/v1/models"] = (200, {"data": [{"id": "third", "max_model_len": 64}]})
        there = f"names no server of the base model {second}: {server.url} serves base; {other.url} serves third"
        with pytest.raises(ConfigError, match=re.escape(there)):
            asyncio.run(find_servers(urls, models, None))
    finally:
        other.http.shutdown()
        other.http.server_close()
